"""How sums between ranks on cards go by their size, and how long they take: for the Topology screen.

When ranks have met they make sums of a few sizes, each several times in a row, by the calls that steps make. All ranks
have the same plan, so their calls have the same numbers and notes. Events on the stream that serves take the times.

A host launches small sums more slowly than cards make them. So its stream is held until all is launched.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from ppkernels.gpu import collectives
from torch import Tensor

from ppengine.common.groups import EMBED, site
from ppengine.common.sizes import size_text
from ppengine.protocol.stage_info import SumRoute, SumTime
from ppengine.stage.backends.cuda import copied_sums
from ppengine.stage.backends.cuda.streams import Event, Stream
from ppengine.stage.edge_flags import EdgeFlags, Flag
from ppengine.stage.rank_group import RankGroup

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings

ONE_SHOT, TWO_SHOTS, COPIES = "one shot", "two shots", "copies"
BYTES = (2**13, 2**20, 2**22, 2**24)
"""Bytes of timed parts, if steps have as many; beside these, the smallest sum by copies."""
_CALLS, _FEW_CALLS, _FEW_FROM = 16, 4, 2**22
"""Timed calls of a sum, and those of large ones: on a slow link one may take milliseconds."""
_HELD_S = 0.05
"""Longest time that the stream is held. A launch that waits for the device, as a debugger's does, must end."""


class StepRows(NamedTuple):
    """The rows that steps sum."""

    width: int
    dtype: torch.dtype
    most: int
    """Rows of the largest step."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize


class SumToTime(NamedTuple):
    """A sum of one size."""

    pieces: list[slice]
    """Rows of its pieces, one for a sum by kernels."""
    bytes: int
    way: str
    calls: int


def routes(size: int) -> list[SumRoute]:
    """Return how sums of `size` ranks go, by the bytes of a part."""
    tokens, least = copied_sums.AT_ONCE_ROWS * size, size_text(copied_sums.LEAST_BYTES)
    return [
        SumRoute(most_bytes=collectives.WORD_BYTES, way=f"{ONE_SHOT}, data is its own flag; float32 has flags"),
        SumRoute(most_bytes=collectives.two_shots_from(size) - 1, way=f"{ONE_SHOT}, flags"),
        SumRoute(most_bytes=None, way=f"{COPIES} beside products, above {tokens:,} tokens, from {least} on"),
        SumRoute(most_bytes=None, way=f"{TWO_SHOTS}, flags"),
    ]


def sums_to_time(group: RankGroup, rows: StepRows, room: int) -> list[SumToTime]:
    """Return the sums that are timed, from small to large, the same on all ranks.

    No piece is larger than `room` bytes.
    """
    each = rows.row_bytes
    copied = max(copied_sums.AT_ONCE_ROWS * group.size + 1, -(-copied_sums.LEAST_BYTES // each))
    counts = {min(max(1, size // each), rows.most) for size in BYTES}
    counts |= {copied} if copied <= rows.most else set()
    found = []
    for count in sorted(counts):
        pieces, size = group.pieces(count, each), count * each
        if max(piece.stop - piece.start for piece in pieces) * each > room:
            continue
        one_shot = ONE_SHOT if size < collectives.two_shots_from(group.size) else TWO_SHOTS
        calls = _CALLS if size < _FEW_FROM else _FEW_CALLS
        found.append(SumToTime(pieces, size, COPIES if len(pieces) > 1 else one_shot, calls))
    return found


class TimedSums:
    """The timed sums of one rank. `memory` is its own: parts and a residual stream of zeros, in bytes."""

    def __init__(self, group: RankGroup, rows: StepRows, memory: Sequence[Tensor], compute: Stream) -> None:
        self._group, self._rows, self._compute = group, rows, compute
        self._part, self._residual = memory
        self._sums = sums_to_time(group, rows, self._part.nbytes)
        for each in memory:
            each.zero_()

    def warm_up(self) -> None:
        """Make each sum once, before the ranks meet: a kernel that is compiled or loaded later may wait for a rank."""
        with self._compute.use():
            for each in self._sums:
                self._make(each)

    def measure(self, driver: Driver, flags: EdgeFlags, page: int) -> list[SumTime]:
        """Make all sums with the other ranks; return their times. The device must be idle.

        The stream is held by the flag `READ` of `flags`, which the device has at `page`. Raises errors of waits.
        """
        let_go = partial(flags.release, Flag.READ)
        timer = threading.Timer(_HELD_S, let_go)
        timer.start()
        try:
            driver.wait_for(page + Flag.READ, 1, self._compute.handle)
            with self._compute.use():
                points = [self._launch(each) for each in self._sums]
        finally:
            timer.cancel()
            let_go()
        self._compute.order.wait(points[-1][1].done)
        return [
            SumTime(bytes=each.bytes, us=begin.raw.elapsed_time(end.raw) * 1e3 / each.calls, way=each.way)
            for each, (begin, end) in zip(self._sums, points, strict=True)
        ]

    def _launch(self, one: SumToTime) -> tuple[Event, Event]:
        """Launch a sum once, since ranks begin at different times, then its timed calls; return the points around."""
        self._make(one)
        begin = self._point()
        for _ in range(one.calls):
            self._make(one)
        return begin, self._point()

    def _point(self) -> Event:
        return self._compute.record("timed sums", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def _make(self, one: SumToTime) -> None:
        if one.way != COPIES:
            self._group.all_reduce(self._rows_of(self._part, one.pieces[0]), site(0, EMBED))
            return
        # No kernel writes to pieces, so they may be the same memory.
        sums = [self._group.send(self._rows_of(self._part, rows), site(0, EMBED)) for rows in one.pieces]
        for each, rows in zip(sums, one.pieces, strict=True):
            each.add_to(self._rows_of(self._residual, rows))

    def _rows_of(self, memory: Tensor, rows: slice) -> Tensor:
        """Return as many rows of memory."""
        count, width = rows.stop - rows.start, self._rows.width
        return memory[: count * self._rows.row_bytes].view(self._rows.dtype).view(count, width)
