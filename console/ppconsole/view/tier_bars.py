"""Bars of KV tiers: blocks of the device, slots of the host, bytes of a backend."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.stage_info import KvBlocks
from ppengine.protocol.tiers import BackendInfo, TiersInfo

from ppconsole.model.units import UNKNOWN
from ppconsole.view.cells import Cell, Seg

USED, CACHED, MOVING, SWAPPED, FREE = "█", "░", "▒", "▓", "·"
STYLES = {USED: "bar.used", CACHED: "kv.cached", MOVING: "info", SWAPPED: "swap", FREE: "bar.room"}


def bar(parts: Sequence[tuple[str, int]], whole: int, width: int) -> Cell:
    """Return parts of `whole` as a bar of `width` cells; a part that is not empty has a cell, if there is room."""
    if whole <= 0 or width <= 0:
        return (UNKNOWN, "dim")
    cells: list[Seg] = []
    left, end = width, 0
    for glyph, part in parts:
        end += max(0, part)
        size = min(left, max(1 if part > 0 else 0, round(end / whole * width) - (width - left)))
        if size > 0:
            cells.append((glyph * size, STYLES[glyph]))
            left -= size
    if left:
        cells.append((FREE * left, STYLES[FREE]))
    return tuple(cells)


def device_bar(blocks: KvBlocks, width: int) -> Cell:
    """Return the used, cached and free blocks of a stage."""
    return bar([(USED, blocks.used or 0), (CACHED, blocks.cached or 0)], blocks.mapped or 0, width)


def host_bar(tiers: TiersInfo, width: int) -> Cell:
    """Return the swapped, cached, moving and free slots of the host."""
    parts = [(SWAPPED, tiers.slots_swapped), (CACHED, tiers.slots_cached), (MOVING, tiers.slots_moving)]
    return bar(parts, tiers.slots, width)


def backend_bar(backend: BackendInfo, width: int) -> Cell:
    """Return the used bytes of a backend's quota."""
    if backend.used_bytes is None:
        return (UNKNOWN, "dim")
    return bar([(USED, backend.used_bytes)], backend.quota_bytes, width)
