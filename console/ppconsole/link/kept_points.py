"""Points of the trends from recordings: those that an engine keeps (`protocol/kept_files.py`), or any other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from ppengine.protocol.frames import ProtocolError, decode_as
from ppengine.protocol.recording import Recording, RecordingError

from ppconsole.link.history import unique
from ppconsole.model.trends import PERIOD_S, Figures, Point, measure

READ_S = 5.0
"""Seconds after which reading ends, with as much of the newest past as was read by then."""


class _Outline(msgspec.Struct):
    """A frame whose snapshot is decoded only if it is wanted."""

    at_s: float
    snapshot: msgspec.Raw = msgspec.Raw()


_outlines = msgspec.msgpack.Decoder(_Outline)


def read_points(
    paths: Iterable[Path], since: float, before: float, leaving: threading.Event, read_s: float = READ_S
) -> list[Point]:
    """Return the points between two times (Unix seconds) in the recordings `paths`, a point a second.

    For a thread: it ends early once `leaving` is set. The newest recordings are read first; one that is damaged or
    still written counts up to its cut.
    """
    until = time.monotonic() + read_s

    def over() -> bool:
        return leaving.is_set() or time.monotonic() >= until

    parts: list[list[Point]] = []
    for path in reversed(unique(paths)):
        part = list(_segment(path, before, over))
        if part and part[0].wall < since:
            break
        parts.append(part)
        if over():
            break
    return [point for part in reversed(parts) for point in part]


def _segment(path: Path, before: float, over: Callable[[], bool]) -> Iterator[Point]:
    """Yield the points of one recording."""
    due = float("-inf")
    with contextlib.suppress(RecordingError, ProtocolError, ValueError, RecursionError):
        recording = Recording(path)
        for number, body in enumerate(recording.bodies()):
            if number % 64 == 0 and over():
                recording.close()
                break
            outline = _outlines.decode(body)
            if outline.at_s < due or not len(memoryview(outline.snapshot)):
                continue
            due = outline.at_s + PERIOD_S - 0.05
            snapshot = decode_as(Figures, bytes(outline.snapshot))
            if snapshot.sampled_at < before:
                yield measure(snapshot)
