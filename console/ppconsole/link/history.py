"""Recordings read by time: one file, or the segments that a gateway has written."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
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

from ppconsole.link.minutes import Minute, Minutes

EVENTS_MOST = 500
"""Events that a moment has: as many as the console keeps."""
BACK_S = 600.0
"""Seconds before a moment from which its events come: reading an hour of a large engine takes seconds."""

Place = tuple[int, int]
"""Number of a file, and number of a frame in it."""


class Frame(NamedTuple):
    """One recorded update: its time in Unix seconds and its kind."""

    wall: float
    kind: str


class Moment(NamedTuple):
    """Everything that was known at one time. `following`: the first frame after it; None: it is the end."""

    snapshot: Snapshot | None
    events: list[Event]
    details: dict[InspectWhat, msgspec.Raw]
    link: LinkState | None
    following: Place | None


class History:
    """All updates of an engine that were kept, in order of time. Files are read when they are needed. Close it.

    Any thread may read: the console reads moments in one, so that no key waits for them.
    """

    def __init__(self, path: Path) -> None:
        """Read one recording. Raises RecordingError; one that is cut short ends there, and `error` says so."""
        self._files = [Recording(path)]
        whole = Minute(self._files[0])
        self._minutes = Minutes(self._files, {0: whole})
        self.error = whole.error
        self._begin: float | None = None
        self._end: float | None = None

    @classmethod
    def of_segments(cls, paths: Iterable[Path]) -> History:
        """Read segments of a gateway.

        The newest one may be written now, and its end is no error. A segment that cannot be read is left out.
        """
        made = cls.__new__(cls)
        made.error, made._files, made._begin, made._end = None, [], None, None
        for path in unique(paths):
            with contextlib.suppress(RecordingError):
                made._files.append(Recording(path))
        made._minutes = Minutes(made._files)
        return made

    @property
    def paths(self) -> list[Path]:
        """The files, the oldest first."""
        return [file.path for file in self._files]

    @property
    def header(self) -> RecordingHeader | None:
        """Engine and time of the newest file; None without any."""
        return self._files[-1].header if self._files else None

    @property
    def first(self) -> Place | None:
        """The first frame; None: there is nothing in it."""
        return self._from(0, 0)

    @property
    def begin(self) -> float:
        """Time of the first update in Unix seconds; 0 without any."""
        if self._begin is None:
            self._begin = 0.0 if self.first is None else self.frame(self.first).wall
        return self._begin

    @property
    def end(self) -> float:
        """Time of the last update in Unix seconds; 0 without any."""
        if self._end is None:
            walls = (self._minutes[file].walls for file in reversed(range(len(self._files))))
            self._end = next((found[-1] for found in walls if found), 0.0)
        return self._end

    @property
    def bytes(self) -> int:
        """Bytes of it in memory."""
        return self._minutes.bytes

    def frame(self, place: Place) -> Frame:
        """Return time and kind of a frame."""
        minute = self._minutes[place[0]]
        return Frame(minute.walls[place[1]], minute.kinds[place[1]])

    def read(self, place: Place) -> Recorded:
        """Return one frame. Raises RecordingError."""
        return self._minutes[place[0]].read(place[1])

    def after(self, place: Place) -> Place | None:
        """Return the next frame; None at the end."""
        return self._from(place[0], place[1] + 1)

    def before(self, place: Place) -> Place | None:
        """Return the frame before `place`; None at the begin."""
        return next(self._before(place, float("-inf")), None)

    def following(self, wall: float) -> Place | None:
        """Return the first frame after `wall`; None at the end."""
        file = max(0, bisect_right(self._files, wall, key=lambda file: file.header.recorded_at) - 1)
        if not self._files:
            return None
        return self._from(file, bisect_right(self._minutes[file].walls, wall))

    def prepare(self, wall: float) -> None:
        """Read the file of a moment that may be wanted next."""
        self.following(wall)

    def at(self, wall: float, events_most: int = EVENTS_MOST, back_s: float = BACK_S) -> Moment:
        """Return the picture at `wall` (Unix seconds): snapshot, newest events, details. Raises RecordingError.

        Before the first snapshot that one counts: a recording begins with events of the past.
        """
        following = self.following(wall)
        place = self._newest("snapshot", following)
        if place is None:
            place = self.first
            while place is not None and self.frame(place).kind != "snapshot":
                place = self.after(place)
            following = None if place is None else self.after(place)
        # Segments of a gateway hold neither links nor details: looking for one would read ten minutes of them.
        link = self._newest("link", following, back_s) if len(self._files) == 1 else None
        events = sorted(islice(self._before(following, wall - back_s, "event"), events_most))
        found = self._read_all([place, link, *events])
        return Moment(
            None if place is None else found[place].snapshot,
            [event for each in events if (event := found[each].event) is not None],
            self._details(following),
            None if link is None else found[link].link,
            following,
        )

    def cut(self, place: Place, error: RecordingError) -> None:
        """End before a frame that cannot be read."""
        del self._files[place[0] + 1 :]
        self._minutes[place[0]].cut(place[1])
        self._end = None
        self.error = error

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _read_all(self, places: Iterable[Place | None]) -> dict[Place, Recorded]:
        """Read frames in the order of their files: a step back in a packed file on disk unpacks it from its begin."""
        return {place: self.read(place) for place in sorted({place for place in places if place is not None})}

    # --- frames of the files ------------------------------------------------------------------------------------

    def _from(self, file: int, number: int) -> Place | None:
        while file < len(self._files):
            if number < len(self._minutes[file].walls):
                return file, number
            file, number = file + 1, 0
        return None

    def _before(self, place: Place | None, not_before: float, kind: str = "") -> Iterator[Place]:
        """Yield the frames before `place`, the newest first, back to a time; whole files before it are not read.

        `kind`: frames of that kind alone.
        """
        file, number = place or (len(self._files), 0)
        while True:
            if number:
                minute = self._minutes[file]
                for at in reversed(range(number)):
                    if minute.walls[at] < not_before:
                        return
                    if not kind or minute.kinds[at] == kind:
                        yield file, at
            file -= 1
            if file < 0 or (file + 1 < len(self._files) and self._files[file + 1].header.recorded_at < not_before):
                return
            number = len(self._minutes[file].walls)

    def _newest(self, kind: str, place: Place | None, back_s: float = float("inf")) -> Place | None:
        """Return the newest frame of a kind before `place`, at most `back_s` before it."""
        newest = self.before(place or (len(self._files), 0))
        if newest is None:
            return None
        return next(self._before(place, self.frame(newest).wall - back_s, kind), None)

    def _details(self, place: Place | None) -> dict[InspectWhat, msgspec.Raw]:
        """Return the newest details before `place`; segments of a gateway have none."""
        found: dict[InspectWhat, msgspec.Raw] = {}
        for each in self._before(place, float("-inf"), "detail") if len(self._files) == 1 else ():
            if (detail := self.read(each).detail) is not None:
                found.setdefault(detail.what, detail.data)
        return found


def segments(folders: Sequence[Path]) -> list[Path]:
    """Return the segments in `folders`."""
    return [path for folder in folders for path in folder.glob("*.rec")]


def unique(paths: Iterable[Path]) -> list[Path]:
    """Return segments in order of time; of several with one name the first counts."""
    return sorted({path.name: path for path in reversed(list(paths))}.values(), key=lambda path: path.name)
