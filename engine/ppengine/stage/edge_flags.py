"""Progress flags of an edge whose messages a device carries: a page under /dev/shm that both devices read and write.

File `<edge>.words` in the engine's ring folder, this user's alone, one page, little-endian:

    offset   0   8 bytes  MAGIC
    offset  64   u64      FILLED: number of the newest message that is complete in the receiver's memory;
                          the sender's device writes it, the receiver's device waits for it
    offset 128   u64      READ: number of the newest message that the receiver's device has read out of its slot;
                          the receiver's device writes it, the sender's device waits for it

Numbers are those of the edge's records (rings `send` and `receive`), from 1 in each generation, for
which the receiver makes a new file. So the flags show from outside how far each device is. A value
of RELEASED or more says that a side has left: its host writes it into the flag that its device
waits for, and no number is above it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from enum import IntEnum
from pathlib import Path

from ppengine.common import mapped_file

MAGIC = b"PPWORDS\x01"
PAGE = 4096
RELEASED = 1 << 62


class Flag(IntEnum):
    """Offsets in bytes, each on a cache line of its own."""

    FILLED = 64
    READ = 128


def _open(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if (size := os.fstat(descriptor).st_size) != PAGE:
            raise ValueError(f"{path.name} has {size} bytes, {PAGE} are right")
        page = mmap.mmap(descriptor, PAGE)
    finally:
        os.close(descriptor)
    if page[: len(MAGIC)] != MAGIC:
        page.close()
        raise ValueError(f"{path.name} does not begin with {MAGIC!r}")
    return page


class EdgeFlags:
    """The mapped page. The receiver of the edge creates the file, and removes it when it closes."""

    def __init__(self, path: Path, create: bool) -> None:
        """Map the file. Raises OSError, and ValueError for a file of something else."""
        self._path = path if create else None
        self._map = mapped_file.make(path, PAGE) if create else _open(path)
        if create:
            self._map[: len(MAGIC)] = MAGIC
        self._cells = {flag: ctypes.c_uint64.from_buffer(self._map, flag) for flag in Flag}
        self.address = ctypes.addressof(self._cells[Flag.FILLED]) - Flag.FILLED
        """Address of the page in this process."""
        self._lock = threading.Lock()

    def value(self, flag: Flag) -> int:
        """Return the present value of a flag."""
        return self._cells[flag].value

    def values(self) -> dict[Flag, int]:
        """Return the present values of all flags, none after `close`; any thread may call it."""
        with self._lock:
            return {flag: cell.value for flag, cell in self._cells.items()}

    def release(self, flag: Flag) -> None:
        """Let a device that waits for `flag` run on; any thread may call it, also after `close`."""
        with self._lock:
            if self._cells:
                self._cells[flag].value = RELEASED

    def close(self) -> None:
        """Unmap the page. No device may be using it."""
        with self._lock:
            self._cells = {}
            self._map.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
