"""Events on disk, in the run folder: a gateway that replaces another one numbers on where that one ended.

An event is written before it is published or replayed, so no console knows an event that the file lacks. A record is
its length (4 bytes) and `Entry` as msgpack. At `kept` records the file becomes the older of two.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
from collections import deque
from pathlib import Path

import msgspec

from ppengine.protocol.frames import encode
from ppengine.protocol.snapshot import Event

FILE, OLDER = "events.journal", "events.journal.1"
AGAIN_S = 5.0
"""Seconds after an error of the disk until events are written again."""
_LENGTH = struct.Struct("<I")
log = logging.getLogger("ppengine.gateway")


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One event. `core`: the core's own number of its newest event up to here."""

    event: Event
    core: int = 0


class EventJournal:
    """The file of one engine. A disk that is full costs the numbering of the next gateway, never the engine.

    Events that could not be written are kept in memory, and written when there is room again.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        """Read what a gateway before this one has written, and append to it. Raises OSError."""
        self._folder, self._kept = folder, kept
        path = folder / FILE
        self.follows = path.exists()
        """Whether another gateway of this engine was here before."""
        older, _ = _read(folder / OLDER)
        entries, whole = _read(path)
        self.restored = [*older, *entries][-kept:]
        """The newest events that were written before, the oldest first."""
        self._count, self._size = len(entries), whole
        self._descriptor = _open(path)
        # Half a record is the last one of a gateway that was killed: it was not published.
        os.ftruncate(self._descriptor, whole)
        self._unwritten: deque[Entry] = deque(maxlen=kept)
        self._retry_at = 0.0

    def write(self, entries: list[Entry]) -> None:
        """Append events."""
        self._unwritten.extend(entries)
        if time.monotonic() < self._retry_at:
            return
        try:
            self._append(list(self._unwritten))
        except OSError as error:
            if not self._retry_at:
                log.warning("events are not kept for the next gateway until there is room: %s", error)
            self._retry_at = time.monotonic() + AGAIN_S
            return
        self._unwritten.clear()
        self._retry_at = 0.0

    def _append(self, entries: list[Entry]) -> None:
        bodies = [encode(entry) for entry in entries]
        data = b"".join(_LENGTH.pack(len(body)) + body for body in bodies)
        gone = not (self._folder / FILE).exists()
        if self._descriptor < 0 or self._count >= self._kept or gone:
            self._turn()
        written = os.write(self._descriptor, data)
        if written < len(data):
            os.ftruncate(self._descriptor, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written
        self._count += len(entries)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _turn(self) -> None:
        """Begin another file."""
        self.close()
        if (self._folder / FILE).exists():
            (self._folder / FILE).replace(self._folder / OLDER)
        self._descriptor, self._count, self._size = _open(self._folder / FILE), 0, 0


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _read(path: Path) -> tuple[list[Entry], int]:
    """Return the records of a file and the bytes that they have; a damaged one and all after it are left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    decoder, entries, at = msgspec.msgpack.Decoder(Entry), list[Entry](), 0
    while at + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        end = at + _LENGTH.size + size
        if end > len(data):
            break
        try:
            entries.append(decoder.decode(data[at + _LENGTH.size : end]))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            break
        at = end
    return entries, at
