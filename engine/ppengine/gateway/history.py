"""The last hour on disk, a recording a minute: an operator who attaches sees the time before."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ppengine.protocol.recording import Recorder, RecordingError, Update
from ppengine.protocol.snapshot import Cause, Snapshot

SEGMENT_S = 60.0
_PERIOD_MOST_S = 10.0
_AROUND_MOST = 4
"""Most segments kept at the begin, and at the end, of an incident that lasts."""


class History:
    """Writes snapshots and events to `folder`, for `minutes` and at most `bytes_most`. Never raises.

    A large engine gets fewer snapshots, so that the minutes fit, but always those in which a fault begins or ends.
    After an error of the disk, the next segment is a new try; `problem` has the error. A clock that is set changes the
    names of later segments alone: all else goes by the monotonic one.
    """

    def __init__(self, folder: Path, engine: str, name: str, minutes: int, bytes_most: int) -> None:
        self._folder, self._engine, self._name = folder, engine, name
        self._minutes, self._bytes_most = minutes, bytes_most
        self._recorder: Recorder | None = None
        self._until = 0.0
        """End of the segment, and below the time of the next snapshot, in monotonic seconds."""
        self._due = 0.0
        self._kept = sorted(folder.glob("*.rec"))
        """Segments in the order in which they were written."""
        self._period_s = 0.0
        self._snapshots = 0
        self._roots: set[tuple[int | None, int | None, Cause]] = set()
        """Root verdicts of the newest snapshot that was written."""
        self.problem = ""

    def write(self, update: Update) -> None:
        """Append an event, or a snapshot if one is due."""
        now = time.monotonic()
        if not self._minutes:
            return
        if isinstance(update, Snapshot):
            roots = {(each.stage, each.rank, each.cause) for each in update.verdicts if each.root}
            if now < self._due and roots == self._roots:
                return
            self._roots = roots
            self._due = now + self._period_s
            self._snapshots += 1
        try:
            if now >= self._until:
                self._begin(now)
            if self._recorder is not None:
                self._recorder.write(update)
                if isinstance(update, Snapshot):
                    self._recorder.flush()
        except (OSError, RecordingError) as error:
            self.problem = str(error)
            self.close()

    def around(self, begin: float, end: float, folder: Path) -> None:
        """Link the segments between two times (Unix seconds) into `folder`; they stay when the hour is over."""
        try:
            paths = [path for path in sorted(self._folder.glob("*.rec")) if begin - SEGMENT_S < _begun(path) < end]
        except OSError as error:  # No descriptor is left to look.
            self.problem = str(error)
            return
        if len(paths) > 2 * _AROUND_MOST:
            paths = [*paths[:_AROUND_MOST], *paths[-_AROUND_MOST:]]
        for path in paths:
            with contextlib.suppress(OSError):
                os.link(path, folder / path.name)

    def close(self) -> None:
        """Finish the newest segment."""
        with contextlib.suppress(OSError):
            self._end()

    def _begin(self, now: float) -> None:
        """Begin a segment and drop the oldest ones."""
        self._until = now + SEGMENT_S
        self._end()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._free_path()
        self._recorder = Recorder(path, engine=self._engine, name=self._name, packed=True)
        self.problem = ""
        self._kept = [one for one in [*self._kept, path] if one.exists()]
        most, total = round(self._minutes * 60.0 / SEGMENT_S), 0
        for number, one in enumerate(reversed(self._kept)):
            total += one.stat().st_size
            if total > self._bytes_most or number > most:
                one.unlink(missing_ok=True)

    def _free_path(self) -> Path:
        """Return the path of a segment that begins now; none is written twice by a clock that was set back."""
        now_ms = int(time.time() * 1e3)
        while (path := self._folder / f"{now_ms:015d}.rec").exists():
            now_ms += 1
        return path

    def _end(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.close()
        hour = recorder.bytes / max(1, self._snapshots) * self._minutes * 60.0
        self._period_s = min(_PERIOD_MOST_S, hour / self._bytes_most) if hour > self._bytes_most else 0.0
        self._snapshots = 0


def _begun(path: Path) -> float:
    """Return the time of a segment's first update in Unix seconds."""
    return int(path.stem) / 1e3
