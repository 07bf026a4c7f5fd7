"""The collectives that a rank on a card launches, in a file that the other ranks of its stage read.

Kernels know a call by its number alone: a rank that left one out would add parts of different layers. So
a rank notes each call in its file before it launches it, also the calls in a graph before each replay.
It compares its notes with those of the others while it waits for its device, and before it acknowledges
a step. Its device has then had the others' part of each call, so that their notes of it are there.

A file has a ring of calls behind the number of all calls of the generation. Ranks are a few steps apart at most.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ppengine.common import mapped_file
from ppengine.stage.rank_calls import Call, differ

MOST = 2**14
"""Calls in a ring: many times those of a step."""
_HEAD = 64
_SETTLE_S = 1e-3
_CALL = struct.Struct("<QQIII4x")
"""Step, size, kind, site and code. To make an array of one call would take six times as long."""
_BYTES = _CALL.size

Calls = NDArray[np.uint64]
"""Calls [n, 4] as they are in a file: the first column has the steps."""


class CallLog:
    """The calls of one rank. All but `capture` are for the thread that launches."""

    def __init__(self, folder: Path, stage: int, rank: int) -> None:
        self._folder, self._stage, self._rank = folder, stage, rank
        self._mine: _File | None = None
        """None: the ranks have not met."""
        self._others: dict[int, _File] = {}
        self._compared: dict[int, int] = {}
        self._captured: list[bytes] | None = None

    def begin(self) -> None:
        """Make this rank's file, before the ranks meet."""
        self._mine = _File(mapped_file.make(self._path(self._rank), _HEAD + MOST * _BYTES))

    def open(self, peers: Iterable[int]) -> None:
        """Open the files of the other ranks, of this generation, which are there."""
        self._others = {peer: _File(mapped_file.open_for_reading(self._path(peer))) for peer in peers}
        self._compared = dict.fromkeys(self._others, 0)

    def capture(self, forward: Callable[[], Tensor], calls: list[bytes]) -> Tensor:
        """Return `forward()`; its calls are in `calls` alone, in place of others: they are launched by replays."""
        calls.clear()
        self._captured = calls
        try:
            return forward()
        finally:
            self._captured = None

    def note(self, step: int, kind: int, site: int, size: int, code: int) -> None:
        """Note one call that is about to be launched."""
        call = _CALL.pack(step, size, kind, site, code)
        if self._captured is not None:
            self._captured.append(call)
        elif self._mine is not None:
            self._mine.add(call)

    def replay(self, step: int, calls: Calls) -> None:
        """Note the calls of a graph that is about to be replayed."""
        if self._mine is not None:
            calls[:, 0] = step
            self._mine.add(calls.tobytes())

    def compare(self) -> None:
        """Raise RanksDifferError at the first call in which another rank differs from this one."""
        mine = self._mine
        if mine is None:
            return
        for peer, theirs in self._others.items():
            first, end = self._compared[peer], min(mine.count, theirs.count)
            if first == end:
                continue
            # Older calls have been overwritten.
            first = max(first, max(mine.count, theirs.count) - MOST)
            if not mine.same(theirs, first, end):
                self._judge(mine, theirs, peer, range(first, end))
            self._compared[peer] = end

    def _judge(self, mine: _File, theirs: _File, peer: int, numbers: range) -> None:
        """Raise RanksDifferError unless the calls are the same a moment later, or written over by then.

        Some processors show the count before the calls.
        """
        time.sleep(_SETTLE_S)
        for number in numbers:
            here, there = mine.call(number), theirs.call(number)
            if here != there and number >= theirs.count - MOST:
                raise differ(self._stage, self._rank, here, peer, there, launched=True)

    def close(self) -> None:
        """Leave the generation. The file stays for ranks that still compare."""
        self._mine, self._others = None, {}

    def _path(self, rank: int) -> Path:
        return self._folder / f"g{self._stage}.{rank}.calls"


class _File:
    """One rank's ring of calls."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._map = memory
        self._word = memoryview(memory)[:8].cast("Q")

    @property
    def count(self) -> int:
        """All calls of the generation."""
        return self._word[0]

    def add(self, calls: bytes) -> None:
        """Add calls; a reader sees them once they are whole."""
        count, done = self._word[0], 0
        end = count + len(calls) // _BYTES
        for part in _parts(count, end):
            size = part.stop - part.start
            self._map[part] = calls[done : done + size]
            done += size
        self._word[0] = end

    def same(self, other: _File, first: int, end: int) -> bool:
        """Return whether both have the same calls from `first` to `end`."""
        return all(self._map[part] == other._map[part] for part in _parts(first, end))

    def call(self, number: int) -> Call:
        """Return call `number`, from 0; calls have names from 1, as on CPUs."""
        (part,) = _parts(number, number + 1)
        step, size, kind, site, code = _CALL.unpack(self._map[part])
        return Call(number + 1, kind, site, step, size, code)


def calls_of(captured: list[bytes]) -> Calls:
    """Return the calls of a graph, of which `CallLog.capture` made the list."""
    return np.frombuffer(bytearray(b"".join(captured)), np.uint64).reshape(-1, _BYTES // 8)


def _parts(first: int, end: int) -> Iterator[slice]:
    """Return where in a file the calls from `first` to `end` are."""
    while first < end:
        at = first % MOST
        some = min(end - first, MOST - at)
        yield slice(_HEAD + at * _BYTES, _HEAD + (at + some) * _BYTES)
        first += some
