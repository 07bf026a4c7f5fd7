"""Recordings read by time: one file, or the segments that a gateway has written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from ppengine.protocol.control import InspectWhat
from ppengine.protocol.recording import (
    LinkState,
    Recorded,
    Recording,
    RecordingError,
    RecordingHeader,
)
from ppengine.protocol.snapshot import Event, Snapshot

EVENTS_MOST = 500
"""Events that a moment has: as many as the console keeps."""


class Frame(NamedTuple):
    """One recorded update: its time in Unix seconds, its kind, and its place in one of the files."""

    wall: float
    kind: str
    file: int
    place: int


class Moment(NamedTuple):
    """Everything that was known at one time. `following`: number of the first frame after it."""

    snapshot: Snapshot | None
    events: list[Event]
    details: dict[InspectWhat, msgspec.Raw]
    link: LinkState | None
    following: int


class History:
    """All updates of an engine that were kept, in order of time. Close it when it is not needed any more."""

    def __init__(self, path: Path) -> None:
        """Read one recording. Raises RecordingError; one that is cut short ends there, and `error` says so."""
        self._files = [Recording(path)]
        self.header: RecordingHeader | None = self._files[0].header
        self.frames: list[Frame] = []
        self.error: RecordingError | None = None
        self._index(0)

    @classmethod
    def of_segments(cls, paths: Iterable[Path]) -> History:
        """Read segments of a gateway; of several with one name the first counts.

        The newest one may be written now, and its end is no error. A segment that cannot be read is left out.
        """
        made = cls.__new__(cls)
        made._files, made.frames, made.header, made.error = [], [], None, None
        for path in sorted({path.name: path for path in reversed(list(paths))}.values(), key=lambda path: path.name):
            try:
                made._files.append(Recording(path))
            except RecordingError:
                continue
            made.header = made._files[-1].header
            made._index(len(made._files) - 1)
        made.error = None
        return made

    @property
    def begin(self) -> float:
        """Time of the first update in Unix seconds; 0 without any."""
        return self.frames[0].wall if self.frames else 0.0

    @property
    def end(self) -> float:
        """Time of the last update in Unix seconds; 0 without any."""
        return self.frames[-1].wall if self.frames else 0.0

    def read(self, number: int) -> Recorded:
        """Return one frame. Raises RecordingError."""
        frame = self.frames[number]
        return self._files[frame.file].read(frame.place)

    def following(self, wall: float) -> int:
        """Return the number of the first frame after `wall`."""
        return bisect_right(self.frames, wall, key=lambda frame: frame.wall)

    def at(self, wall: float, events_most: int = EVENTS_MOST) -> Moment:
        """Return the picture at `wall` (Unix seconds): snapshot, newest events, details. Raises RecordingError.

        Before the first snapshot that one counts: a recording begins with events of the past.
        """
        following = self.following(wall)
        if not any(frame.kind == "snapshot" for frame in self.frames[:following]):
            first = next((at for at, frame in enumerate(self.frames) if frame.kind == "snapshot"), None)
            following = following if first is None else first + 1
        snapshot, link = self._last("snapshot", following), self._last("link", following)
        events = [self.read(at).event for at in self._numbers("event", following)[-events_most:]] if events_most else []
        details = {}
        for at in self._numbers("detail", following):
            if (detail := self.read(at).detail) is not None:
                details[detail.what] = detail.data
        return Moment(
            snapshot.snapshot if snapshot else None,
            [event for event in events if event is not None],
            details,
            link.link if link else None,
            following,
        )

    def cut(self, number: int, error: RecordingError) -> None:
        """End before frame `number`, which cannot be read."""
        del self.frames[number:]
        self.error = error

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _index(self, number: int) -> None:
        """Note the frames of one file, up to its end or to damage."""
        file = self._files[number]
        last = self.end
        try:
            for at_s, kind, place in file.outlines():
                last = max(last, file.header.recorded_at + at_s)  # A clock that was set back turns nothing around.
                self.frames.append(Frame(last, kind, number, place))
        except RecordingError as error:
            self.error = error

    def _numbers(self, kind: str, before: int) -> list[int]:
        return [number for number in range(before) if self.frames[number].kind == kind]

    def _last(self, kind: str, before: int) -> Recorded | None:
        number = next((at for at in range(before - 1, -1, -1) if self.frames[at].kind == kind), None)
        return None if number is None else self.read(number)


def segments(folders: Sequence[Path]) -> list[Path]:
    """Return the segments in `folders`."""
    return [path for folder in folders for path in folder.glob("*.rec")]
