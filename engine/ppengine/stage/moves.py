"""Block copies of a step: the list order of the protocol, in as few tensor operations as that order allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ppengine.protocol.steps import Move, MoveKind


class MoveRun(NamedTuple):
    """Neighbouring moves of one kind that may be read all first and written all after."""

    kind: MoveKind
    src: list[int]
    dst: list[int]


def runs(moves: list[Move]) -> Iterator[MoveRun]:
    """Cut `moves` where the kind changes or a copy touches what an earlier one of its run has written."""
    current: MoveRun | None = None
    written: set[int] = set()
    for move in moves:
        kind = MoveKind(move.kind)
        # Only a copy inside the device reads the memory that it writes.
        reads_written = kind is MoveKind.DEVICE and move.src in written
        if current is None or kind is not current.kind or reads_written or move.dst in written:
            if current is not None:
                yield current
            current = MoveRun(kind, [], [])
            written = set()
        current.src.append(move.src)
        current.dst.append(move.dst)
        written.add(move.dst)
    if current is not None:
        yield current
