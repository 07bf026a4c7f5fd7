"""The file in which the core keeps its requests, so that another core can go on with them.

A frame is a mark, its length, a CRC-32 and a list of records in msgpack. The records of a turn are one frame and one
`write`, before any of it is seen outside: readers never have a token, and consoles no answer, that the next core
lacks. A kill leaves the kernel's pages, so no turn waits for the disk.

The file is bounded. Beyond its limit another one begins, and the live state moves there in slices of a millisecond a
turn; then the older file goes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from ppengine.core.journal_records import DECODER, ENCODER, Moved, Record

FILE, OLDER, FRESH = "core.journal", "core.journal.1", "core.journal.new"
LIMIT_BYTES = 8 * 1024 * 1024
"""Bytes from which another file is begun; twice the size of the live state where that is more."""
FRAME_BYTES = 64 * 1024
"""Bytes from which the live state goes on in another frame."""
FIND_BYTES = 64 * 1024
"""Bytes that are searched at once for the frame behind a broken one."""
SLICE_S = 0.001
"""Seconds of a turn that go into moving the live state."""
AGAIN_S = 10.0
"""Seconds after an error of the disk until another file is tried."""
LOOK_S = 1.0
"""Seconds between two looks whether the file is there."""
SYNC_S = 1.0
"""Seconds between two syncs to the disk, for a host that goes down."""
_MARK = b"\xc1pj\n"
"""Begin of a frame. Its first byte is in no msgpack, so the next frame is found behind a broken one."""
_HEAD = struct.Struct("<4sII")
_MOVED = ENCODER.encode([Moved()])
"""Content of the frame behind the last one of a state."""
_T = TypeVar("_T")
log = logging.getLogger("ppengine.core.journal")

State = Callable[[], Iterator[Record]]
"""Yields the records of the live state, each as of the moment at which it is taken."""


class Journal:
    """Appends records. A disk that is full costs the next core its requests, never this one."""

    def __init__(self, folder: Path, limit: int = LIMIT_BYTES) -> None:
        self._folder, self._least, self._limit = folder, limit, limit
        self._failure = ""
        self._records: list[Record] = []
        self._descriptor = -1
        self._size = 0
        self._moving: Iterator[Record] | None = None
        """The rest of the live state, while an older file is needed for it."""
        self._look_at = 0.0
        """Time of the next look whether the file is there."""
        self._retry_at: float | None = None
        """Time of the next try after an error; None: the file is good."""
        self._sync = _Sync()

    def note(self, record: Record) -> None:
        """Add a record to the present turn."""
        self._records.append(record)

    @property
    def pending(self) -> bool:
        """Whether the present turn has records."""
        return bool(self._records)

    def begin(self, state: State) -> None:
        """Write the live state into a file that replaces all others."""
        try:
            self._descriptor, self._size = _open(self._folder / FRESH), 0
            self._write_state(state())
            (self._folder / FRESH).replace(self._folder / FILE)
            (self._folder / OLDER).unlink(missing_ok=True)
            self._sync.of(self._descriptor)
        except OSError as error:
            self._fail(error)
            return
        self._limit = max(self._least, 2 * self._size)

    def commit(self, state: State, now: float) -> None:
        """Write the records of the turn. Raises nothing: an error switches the journal off for a while."""
        records, self._records = self._records, []
        if self._descriptor >= 0 and now >= self._look_at:
            self._look_at = now + LOOK_S
            try:
                gone = not (self._folder / FILE).exists() and self._folder.is_dir()
            except OSError as error:
                self._fail(error)
                return
            if gone:
                self._fail(FileNotFoundError(errno.ENOENT, "its file was removed; another one is begun"))
                self._retry_at = now
        if self._descriptor < 0:
            if self._retry_at is not None and now >= self._retry_at:
                self._retry_at = None
                self.begin(state)
            return
        try:
            if records:
                self._write(records)
            if self._moving is not None:
                self._move(self._moving)
            elif self._size > self._limit:
                self._turn(state)
        except OSError as error:
            self._fail(error)

    def take_failure(self) -> str:
        """Return, once, why nothing is kept any more; empty if nothing has failed since the last call."""
        failure, self._failure = self._failure, ""
        return failure

    def close(self) -> None:
        """Close the file."""
        self._sync.of(-1)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, records: Sequence[Record | msgspec.Raw]) -> None:
        body = ENCODER.encode(records)
        data = _HEAD.pack(_MARK, len(body), zlib.crc32(body)) + body
        if os.write(self._descriptor, data) < len(data):
            raise OSError(28, "No space left on device")
        self._size += len(data)
        self._sync.due = True

    def _write_state(self, records: Iterable[Record]) -> None:
        """Write the whole live state in frames of bounded size: its records are made one after another."""
        bodies, size = list[msgspec.Raw](), 0
        for record in records:
            bodies.append(msgspec.Raw(ENCODER.encode(record)))
            size += len(bodies[-1])
            if size > FRAME_BYTES:
                self._write(bodies)
                bodies, size = [], 0
        self._write(bodies)
        self._write([Moved()])

    def _turn(self, state: State) -> None:
        """Begin another file; the live state follows in slices."""
        (self._folder / FILE).replace(self._folder / OLDER)
        before, self._descriptor = self._descriptor, _open(self._folder / FILE)
        os.close(before)
        self._size, self._moving = 0, state()
        self._sync.of(self._descriptor)

    def _move(self, rest: Iterator[Record]) -> None:
        """Write the next slice of the live state, and drop the older file behind the last one."""
        until, bodies = time.perf_counter() + SLICE_S, list[msgspec.Raw]()
        for record in rest:
            bodies.append(msgspec.Raw(ENCODER.encode(record)))
            if time.perf_counter() > until:
                self._write(bodies)
                return
        self._write(bodies)
        self._write([Moved()])
        self._moving, self._limit = None, max(self._least, 2 * self._size)
        (self._folder / OLDER).unlink(missing_ok=True)

    def _fail(self, error: OSError) -> None:
        with contextlib.suppress(OSError):
            self.close()
        self._descriptor, self._moving = -1, None
        self._retry_at = time.monotonic() + AGAIN_S
        self._failure = error.strerror or str(error)


class _Sync:
    """Syncs the file to its disk in a thread of its own, all turns of a second at once."""

    def __init__(self) -> None:
        self.due = False
        self._lock = threading.Lock()
        self._descriptor = -1
        self._thread: threading.Thread | None = None

    def of(self, descriptor: int) -> None:
        """Go on with another file; -1: with none. Raises OSError without a descriptor for it."""
        with self._lock:
            before, self._descriptor = self._descriptor, -1
            if before >= 0:
                os.close(before)
            if descriptor >= 0:
                self._descriptor = os.dup(descriptor)
        if descriptor >= 0 and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(SYNC_S)
            if not self.due:
                continue
            self.due = False
            try:
                with self._lock:
                    copy = os.dup(self._descriptor) if self._descriptor >= 0 else -1
            except OSError:  # No descriptor is left at present.
                self.due = True
                continue
            if copy >= 0:
                with contextlib.suppress(OSError):
                    os.fdatasync(copy)
                os.close(copy)


def exists(folder: Path) -> bool:
    """Return whether a core of this engine was here before."""
    return (folder / FILE).exists() or (folder / OLDER).exists()


def read(folder: Path, damage: Callable[[str], None]) -> Iterator[Record]:
    """Yield the records of both files in order, a frame at a time.

    `damage` takes one line about each part that cannot be read.
    """
    if not (folder / OLDER).exists() or _MOVED not in _frames(folder / FILE, lambda _: None, bytes):
        yield from chain.from_iterable(_frames(folder / OLDER, damage, DECODER.decode))
    yield from chain.from_iterable(_frames(folder / FILE, damage, DECODER.decode))


def _frames(path: Path, damage: Callable[[str], None], decode: Callable[[bytes], _T]) -> Iterator[_T]:
    """Yield the decoded frames of a file. Half a frame at its end is the last one of a core that was killed."""
    try:
        with path.open("rb") as file:
            yield from _frames_of(file, path.name, damage, decode)
    except FileNotFoundError:
        return
    except OSError as error:
        damage(f"{path.name}: {error.strerror}")


def _frames_of(file: BinaryIO, name: str, damage: Callable[[str], None], decode: Callable[[bytes], _T]) -> Iterator[_T]:
    at, size = 0, os.fstat(file.fileno()).st_size
    while at < size:
        body, why = _body(file, size - at)
        if body is not None:
            try:
                content = decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                why = str(error)
            else:
                yield content
                at += _HEAD.size + len(body)
                continue
        following = _find_mark(file, at + 1)
        if following < 0:
            log.info("%s: %d bytes at its end are no whole frame", name, size - at)
            return
        damage(f"{name}: {following - at} bytes from byte {at} on are left out: {why}")
        at = following


def _body(file: BinaryIO, left: int) -> tuple[bytes | None, str]:
    """Return the content of the next frame in a file with `left` bytes, or None and the reason why there is none."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None, "half a frame"
    mark, length, checksum = _HEAD.unpack(head)
    if mark != _MARK:
        return None, "no frame begins there"
    if left - _HEAD.size < length:
        return None, f"a frame of {length} bytes of which {left - _HEAD.size} are there"
    body = file.read(length)
    return (body, "") if zlib.crc32(body) == checksum else (None, "its checksum does not match")


def _find_mark(file: BinaryIO, at: int) -> int:
    """Go to the first mark from byte `at` on and return its place; -1: there is none."""
    while True:
        file.seek(at)
        data = file.read(FIND_BYTES)
        if (found := data.find(_MARK)) >= 0:
            file.seek(at + found)
            return at + found
        if len(data) < FIND_BYTES:
            return -1
        at += FIND_BYTES - len(_MARK) + 1


def _open(path: Path) -> int:
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
