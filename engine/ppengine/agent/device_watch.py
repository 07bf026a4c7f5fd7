"""The progress of a stage's device streams, read from outside, from its page."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ppengine.common.device_page import LAYERS, DevicePageReader, Line
from ppengine.common.ring import in_ms
from ppengine.protocol.stage_info import StreamInfo

OWNER = "main"
"""The thread that launches on all streams."""


class DeviceWatch:
    """Reads one page. Ages begin at a look, because the device writes no time."""

    def __init__(self, path: Path, inode: int) -> None:
        self.inode = inode
        self._path = path
        self._page: DevicePageReader | None = None
        self._seen: dict[str, tuple[Line, int]] = {}
        """Newest line of each stream, and the time of the first look with it."""

    def look(self, pid: int) -> list[StreamInfo]:
        """Return the streams now; none before the page of process `pid` is whole."""
        if self._page is None:
            with contextlib.suppress(OSError, ValueError):
                self._page = DevicePageReader(self._path)
        if self._page is None or self._page.pid != pid:
            return []
        pieces, late = self._page.late()
        return [
            self._stream(line, time.monotonic_ns(), late if (line.name, line.begun.pieces) == (LAYERS, pieces) else [])
            for line in self._page.lines()
        ]

    def close(self) -> None:
        """Unmap."""
        if self._page is not None:
            self._page.close()

    def _stream(self, line: Line, now_ns: int, late: list[int]) -> StreamInfo:
        before, since_ns = self._seen.get(line.name, (line, now_ns))
        idle = before.launched == before.done
        if idle or (before.begun, before.done) != (line.begun, line.done):
            since_ns = now_ns
        self._seen[line.name] = line, since_ns
        pending = (line.launched.pieces - line.done.pieces) & 0xFFFFFFFF
        at_work = line.begun != line.done
        return StreamInfo(
            name=line.name,
            owner=OWNER,
            op=f"device m{line.begun.step}" if at_work else None,
            age_ms=in_ms(now_ns - since_ns) if pending else None,
            pending=pending,
            waits_for="another stream" if pending and not at_work else None,
            begun_step=line.begun.step if line.begun.pieces else None,
            done_step=line.done.step if line.done.pieces else None,
            on_device=True,
            late_ranks=late if at_work else [],
        )
