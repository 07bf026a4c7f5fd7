"""The KV map: the states of all device blocks, folded into the cells that a console can draw."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from ppengine.core.scheduler import Scheduler
from ppengine.core.scheduler.block_pool import STATES
from ppengine.core.serving import Serving
from ppengine.protocol.inspection import BlocksDetail

FRESH_S = 0.5
"""Seconds for which a fold serves all consoles: each requests one a second."""
CELLS_MOST = 8192
"""Most cells of a map; no terminal draws more."""


class BlockMap:
    """Folds the states of the blocks, once per number of cells within `FRESH_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._folds: dict[int, list[tuple[int, str]]] = {}
        """Runs of equal cells, by the number of blocks in a cell."""
        self._mapped = 0
        self._until = 0.0

    def answer(self, serving: Serving, cells: int, request: str | None) -> BlocksDetail:
        """Return the map in `cells` cells at most, and the cells of `request`."""
        now, scheduler = self._clock(), serving.scheduler
        if now >= self._until or self._mapped != serving.memory.mapped_blocks:
            self._until, self._mapped = now + FRESH_S, serving.memory.mapped_blocks
            self._folds.clear()
        size = max(1, -(-self._mapped // min(max(1, cells), CELLS_MOST)))
        if size not in self._folds:
            self._folds[size] = self._fold(scheduler, size)
        known = scheduler.queues.requests.get(request or "")
        mine = sorted({block // size for block in known.blocks}) if known is not None else []
        return BlocksDetail(mapped=self._mapped, size=size, runs=self._folds[size], request=request, mine=mine)

    def _fold(self, scheduler: Scheduler, size: int) -> list[tuple[int, str]]:
        states = scheduler.blocks.device.states[: self._mapped]
        fullest = (max(states[first : first + size]) for first in range(0, len(states), size))
        return [(sum(1 for _ in run), STATES[state]) for state, run in groupby(fullest)]
