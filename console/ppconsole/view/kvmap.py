"""KV map: the states of all mapped device blocks, folded into cells; those of the selected request are lit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ppengine.protocol.inspection import BlocksDetail
from ppengine.protocol.stage_info import KvBlocks
from ppengine.protocol.tiers import TiersInfo

from ppconsole.model.units import count_text
from ppconsole.view.cells import Row, Seg, clip, fit, row, runs, width_of
from ppconsole.view.tier_bars import CACHED, MOVING, STYLES, SWAPPED, host_bar

GLYPHS: dict[str, tuple[str, str]] = {
    "free": ("·", "kv.free"),
    "cached": ("░", "kv.cached"),
    "used": ("■", "kv.used"),
    "shared": ("▓", "kv.shared"),
    "null": ("×", "kv.free"),
}
SELECTED = ("█", "kv.mine")


def room(width: int, height: int) -> int:
    """Return how many cells `rows` can draw: header and legend take a row each."""
    return max(0, width - 2) * max(0, height - 2)


def cells(detail: BlocksDetail, most: int, selected: str | None = None) -> list[tuple[str, str]]:
    """Return one (glyph, style) a cell, `most` at most; where the selected request has blocks, that wins."""
    glyphs = (GLYPHS.get(state, GLYPHS["null"]) for count, state in detail.runs for _ in range(min(count, most)))
    found = list(islice(glyphs, most))
    if selected is not None and detail.request == selected:
        for cell in detail.mine:
            if 0 <= cell < len(found):
                found[cell] = SELECTED
    return found


def rows(
    detail: BlocksDetail | None, width: int, height: int, selected: str | None = None, pool: KvBlocks | None = None
) -> list[Row]:
    """Return header, map and legend in at most `height` rows. `pool`: the numbers of blocks, for the header."""
    if height < 3:
        return []
    if detail is None:
        return [row((fit(" KV MAP", width), ""), fill="head"), row((fit("  no block map yet", width), "dim"))]
    size, counts = f"{detail.size} a cell", _counts(pool)
    plain = f" KV MAP  {detail.mapped} blocks, {size}"
    forms = (f"{plain}: {counts}", f" KV MAP  {counts}; {size}", f" KV MAP {counts.replace(',', '')}") if counts else ()
    head = next((form for form in forms if len(form) <= width), plain)
    lines = [row((fit(head, width), ""), fill="head")]
    found = cells(detail, room(width, height), selected)
    if detail.size == 1 and 2 * detail.mapped <= room(width, height):  # then a gap beside each block reads better
        found = [(f"{glyph} ", style) for glyph, style in found]
        lines.extend(_lines(found, (width - 2) // 2))
    else:
        lines.extend(_lines(found, width - 2))
    return [*lines[: height - 1], _legend(selected, width)]


def _counts(pool: KvBlocks | None) -> str:
    """Return the numbers of blocks by state, as the POOL line has them; empty if they are not known."""
    if pool is None or pool.used is None:
        return ""
    found = (("used", pool.used), ("cached", pool.cached), ("free", pool.free))
    return ", ".join(f"{count_text(count)} {name}" for name, count in found if count is not None)


def host_rows(tiers: TiersInfo | None, width: int) -> list[Row]:
    """Return the slots of the host as one bar with their numbers; nothing without KV tiers."""
    if tiers is None or not tiers.slots:
        return []
    counts: list[Seg] = []
    for glyph, name, count in (
        (SWAPPED, "swapped", tiers.slots_swapped), (CACHED, "cached", tiers.slots_cached),
        (MOVING, "moving", tiers.slots_moving),
    ):  # fmt: skip
        counts += [(f" {glyph}", STYLES[glyph]), (f" {name} {count_text(count)}", "dim")]
    cells = host_bar(tiers, max(1, width - 7))
    found = [Row(((" host ", "dim"), *(cells if not isinstance(cells[0], str) else ())))]
    return [*found, clip(Row(tuple(counts)), width)]


def _legend(selected: str | None, width: int) -> Row:
    """Return the meaning of the glyphs; without gaps, and then without the id, if it is narrow."""
    made = Row(())
    for gap, mine in ((" ", selected), ("", selected), ("", "selected")):
        segs: list[Seg] = [(" ", "")]
        for name in ("used", "shared", "cached", "free"):
            glyph, style = GLYPHS[name]
            segs += [(glyph, style), (f"{gap}{name} ", "dim")]
        made = Row((*segs, SELECTED, (f"{gap}{mine}", "dim")) if selected else tuple(segs))
        if sum(width_of(text) for text, _ in made.segs) <= width:
            break
    return clip(made, width)


def _lines(found: Sequence[tuple[str, str]], width: int) -> list[Row]:
    """Return the cells as rows of `width`."""
    return [
        Row(((" ", ""), *runs(found[first : first + width])))
        for first in range(0, len(found), width)
    ]  # fmt: skip
