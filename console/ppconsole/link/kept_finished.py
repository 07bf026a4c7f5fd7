"""Requests that ended, from the events of recordings: of a past, and of an engine that has ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from ppengine.protocol.finished import FINISHED_MOST, FinishedInfo
from ppengine.protocol.inspection import FinishedDetail
from ppengine.protocol.recording import Recording, RecordingError

READ_S = 5.0
"""Seconds after which reading ends; the next look goes on with the files that are left."""


class _Event(msgspec.Struct):
    """The parts of an event that are read here."""

    wall: float
    kind: str
    finished: FinishedInfo | None = None


class _Frame(msgspec.Struct):
    """A frame of which only an event is decoded."""

    event: _Event | None = None


class _Read(NamedTuple):
    """One file: its begin in Unix seconds, the ends in it, and the times of ends without figures."""

    begin: float
    ended: list[FinishedInfo]
    bare: list[float]


_frames = msgspec.msgpack.Decoder(_Frame)


class KeptFinished:
    """Reads each file once. One that is cut short or damaged counts up to its cut. For one thread at a time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """`paths` are in order of time."""
        self._paths = paths
        self._files: dict[Path, _Read | None] = {}

    def before(self, wall: float, read_s: float = READ_S) -> FinishedDetail:
        """Return the requests that had ended at `wall` (Unix seconds), the newest first."""
        found: list[FinishedInfo] = []
        since, unread = None, 0
        for file in self._newest_first(read_s):
            if file.begin > wall:
                continue
            found += [one for one in reversed(file.ended) if one.wall <= wall]
            unread += sum(at <= wall for at in file.bare)
            since = file.begin
            if len(found) >= FINISHED_MOST:
                break
        listed = [msgspec.structs.replace(one, ended_s=wall - one.wall) for one in found[:FINISHED_MOST]]
        return FinishedDetail(requests=listed, since=since if len(found) < FINISHED_MOST else None, unread=unread)

    @property
    def since(self) -> float | None:
        """Begin of the oldest file that was read, in Unix seconds; None: none was."""
        return min((file.begin for file in self._files.values() if file is not None), default=None)

    def with_id(self, wanted: Callable[[str], bool], wall: float = float("inf")) -> list[FinishedInfo]:
        """Return the requests with a wanted id that had ended at `wall`, the newest first; of one file alone."""
        for file in self._newest_first(READ_S):
            found = [one for one in reversed(file.ended) if one.wall <= wall and wanted(one.id)]
            if found:
                now = min(wall, time.time())
                return [msgspec.structs.replace(one, ended_s=max(0.0, now - one.wall)) for one in found]
        return []

    def _newest_first(self, read_s: float) -> Iterator[_Read]:
        """Yield what the files have; reading of further ones ends after `read_s` seconds."""
        until = time.monotonic() + read_s
        for path in reversed(self._paths):
            if path not in self._files:
                if time.monotonic() >= until:
                    break
                self._files[path] = _read(path)
            if (file := self._files[path]) is not None:
                yield file


def _read(path: Path) -> _Read | None:
    """Return the ends in a file; None if it is no recording."""
    try:
        recording = Recording(path)
    except RecordingError:
        return None
    read = _Read(recording.header.recorded_at, [], [])
    with contextlib.suppress(RecordingError, ValueError, RecursionError):
        for body in recording.bodies():
            event = _frames.decode(body).event
            if event is None or event.kind != "request.finished":
                continue
            if event.finished is None:
                read.bare.append(event.wall)
            else:
                read.ended.append(event.finished)
    return read
