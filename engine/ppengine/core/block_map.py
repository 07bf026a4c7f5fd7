"""The KV map: what all device blocks are, folded into the cells that a console can draw."""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING

from ppengine.core.scheduler.block_pool import STATES
from ppengine.protocol.inspection import BlocksDetail

if TYPE_CHECKING:
    from ppengine.core.engine import Engine

FRESH_S = 0.5
"""Consoles ask once a second each; those that can draw as many cells get the same fold."""
CELLS_MOST = 8192
"""More than any terminal draws."""


class BlockMap:
    """Folds the states of the blocks, once for all who ask within `FRESH_S`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._folds: dict[int, list[tuple[int, str]]] = {}
        """Runs by the blocks of a cell."""
        self._mapped = 0
        self._until = 0.0

    def answer(self, cells: int, request: str | None) -> BlocksDetail:
        """Return the map in `cells` cells at most, and the cells of `request`."""
        now = time.monotonic()
        if now >= self._until or self._mapped != self._engine.resizer.mapped_blocks:
            self._until, self._mapped = now + FRESH_S, self._engine.resizer.mapped_blocks
            self._folds.clear()
        size = max(1, -(-self._mapped // min(max(1, cells), CELLS_MOST)))
        if size not in self._folds:
            self._folds[size] = self._fold(size)
        known = self._engine.scheduler.queues.requests.get(request or "")
        mine = sorted({block // size for block in known.blocks}) if known is not None else []
        return BlocksDetail(mapped=self._mapped, size=size, runs=self._folds[size], request=request, mine=mine)

    def _fold(self, size: int) -> list[tuple[int, str]]:
        states = self._engine.scheduler.blocks.device.states[: self._mapped]
        fullest = (max(states[first : first + size]) for first in range(0, len(states), size))
        return [(sum(1 for _ in run), STATES[state]) for state, run in groupby(fullest)]
