"""Files of a past in memory: those that were used last, up to a limit of bytes."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Sequence

from ppengine.protocol.recording import Recorded, Recording, RecordingError

BYTES_MOST = 12 * 2**20
"""Bytes of all files in memory. A file that unpacks to more than half of them is read on disk."""


class Minute:
    """One file with time and kind of each frame. The gateway writes a file a minute; a recording is one file."""

    def __init__(self, recording: Recording, unpacked_most: int = 0, frames_most: int | None = None) -> None:
        """Read up to the end, to the damage that `error` has, or to `frames_most` frames."""
        self.error: RecordingError | None = None
        self.walls = array("d")
        """Times of the frames in Unix seconds."""
        self.kinds: list[str] = []
        self.used = 0
        """Number of its last use."""
        self._places = array("Q")
        self._recording = recording.unpacked(unpacked_most) if unpacked_most else recording
        self._reading = threading.Lock()
        last = 0.0
        try:
            for at_s, kind, place in itertools.islice(self._recording.outlines(), frames_most):
                last = max(last, recording.header.recorded_at + at_s)
                self.walls.append(last)
                self.kinds.append(kind)
                self._places.append(place)
        except RecordingError as error:
            self.error = error

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return self._recording.bytes_held + 3 * self.walls.itemsize * len(self.walls)

    def read(self, number: int) -> Recorded:
        """Return a frame. For any thread. Raises RecordingError."""
        with self._reading:
            return self._recording.read(self._places[number])

    def cut(self, number: int) -> None:
        """Forget the frames from `number` on."""
        del self.walls[number:], self.kinds[number:], self._places[number:]


class Minutes:
    """The files of a past by number, the oldest first. Each is read when it is needed; one thread reads at a time."""

    def __init__(self, files: Sequence[Recording], kept: dict[int, Minute] | None = None) -> None:
        """`kept`: those that were read already."""
        self._files = files
        self._kept = kept or {}
        self._lengths: dict[int, int] = {}
        """Frames of the files at their first reading: the newest file may grow meanwhile, and the past does not."""
        self._uses = itertools.count()
        self._changing = threading.Lock()

    def __getitem__(self, file: int) -> Minute:
        """Return a file, up to its damage; a segment may be written now."""
        minute = self._kept.get(file)
        if minute is None:
            with self._changing:  # a file that another thread reads now is there then
                minute = self._kept.get(file) or self._read(file)
        minute.used = next(self._uses)
        return minute

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return sum(minute.bytes for minute in self._kept.values())

    def _read(self, file: int) -> Minute:
        minute = Minute(self._files[file], BYTES_MOST // 2, self._lengths.get(file))
        self._lengths.setdefault(file, len(minute.walls))
        while self._kept and self.bytes + minute.bytes > BYTES_MOST:
            del self._kept[min(self._kept, key=lambda each: self._kept[each].used)]
        self._kept[file] = minute
        return minute
