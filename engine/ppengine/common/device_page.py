"""Progress of a device's streams, in a page of host memory that the device itself writes and any process reads.

One file of one page a stage, beside its rings: a line of 64 bytes for each stream, with its name and three words of 8
bytes. The upper half of a word counts pieces of work, the lower half is the step of the newest: one write sets both. So
begun and unfinished work is visible from outside in any state of the process, without a call to the driver.

Behind magic and pid is a word of the host: the ranks of the stage for which the layers' stream waits in a collective.
Its upper half is the piece of work that this is of, its lower half a bit for each rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ppengine.common import mapped_file
from ppengine.common.config import EngineConfig

PAGE_BYTES = mmap.PAGESIZE
_MAGIC = b"PPDEVP\x00\x01"
_HEAD = struct.Struct("<8sQ")
"""Magic and pid."""
LATE_AT = _HEAD.size
"""Offset of the word of late ranks."""
LAYERS = "compute"
"""Name of the stream that the layers are on."""
_LINE = struct.Struct("<5Q24s")
_MOST = PAGE_BYTES // _LINE.size - 1
_LOW = 0xFFFFFFFF
_BITS = 32


class Word(IntEnum):
    """Words of one line, in order."""

    LAUNCHED = 0
    """Written by the thread that launches."""
    BEGUN = 1
    """Written by the device, as is the next."""
    DONE = 2


class Mark(NamedTuple):
    """How many pieces of work so far, and the step of the newest; both modulo 2**32."""

    pieces: int
    step: int


class Line(NamedTuple):
    """One stream."""

    name: str
    launched: Mark
    begun: Mark
    done: Mark


def page_path(config: EngineConfig, stage: int, rank: int = 0) -> Path:
    """Return where the page of a stage is."""
    return Path(config.ring_dir) / f"s{stage}.{rank}.device.page"


def word_of(count: int, step: int) -> int:
    """Return both numbers as one word."""
    return (count & _LOW) << 32 | (step & _LOW)


class DevicePage:
    """The stage's side."""

    def __init__(self, path: Path) -> None:
        """Make the file, in place of a predecessor's."""
        self._map = mapped_file.make(path, PAGE_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._words = memoryview(self._map).cast("Q")
        self._lines = 0
        self._map[: _HEAD.size] = _HEAD.pack(_MAGIC, os.getpid())

    def add(self, name: str) -> int:
        """Take a line for stream `name`; return where in the page it begins. Raises ValueError when all are taken."""
        if self._lines == _MOST:
            raise ValueError(f"stream {name}: a page has lines for {_MOST} streams")
        self._lines += 1
        offset = self._lines * _LINE.size
        _LINE.pack_into(self._map, offset, 0, 0, 0, 0, 0, name.encode())
        return offset

    def launched(self, offset: int, word: int) -> None:
        """Note work that was put on the stream of a line."""
        self._words[offset // 8 + Word.LAUNCHED] = word

    def layers(self) -> Line | None:
        """Return the stream of the layers as it is now; None before it has a line."""
        return next((line for line in _lines(self._map) if line.name == LAYERS), None)

    def late(self, pieces: int, ranks: Iterable[int]) -> None:
        """Note the ranks for which the layers' stream waits in its piece of work number `pieces`."""
        self._words[LATE_AT // 8] = word_of(pieces, sum(1 << rank for rank in ranks if rank < _BITS))


class DevicePageReader:
    """The reader, in any process."""

    def __init__(self, path: Path) -> None:
        """Map the page. Raises OSError, or ValueError for a file that is not (yet) a whole page."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._map) != PAGE_BYTES or self._map[: len(_MAGIC)] != _MAGIC:
            self._map.close()
            raise ValueError(f"{path} is not a page of device streams")
        self.pid = int(_HEAD.unpack_from(self._map)[1])

    def lines(self) -> list[Line]:
        """Return every stream as it is now."""
        return _lines(self._map)

    def late(self) -> tuple[int, list[int]]:
        """Return the ranks for which the layers' stream waits, behind the number of the piece that this is of."""
        (word,) = struct.unpack_from("<Q", self._map, LATE_AT)
        return word >> 32, [rank for rank in range(_BITS) if word >> rank & 1]

    def close(self) -> None:
        """Unmap."""
        self._map.close()


def _lines(page: mmap.mmap) -> list[Line]:
    found = []
    for number in range(1, _MOST + 1):
        *words, name = _LINE.unpack_from(page, number * _LINE.size)
        if not name[0]:
            break
        launched, begun, done = (Mark(word >> 32, word & _LOW) for word in words[: len(Word)])
        found.append(Line(name.rstrip(b"\x00").decode("utf-8", "replace"), launched, begun, done))
    return found
