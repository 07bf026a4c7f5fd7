"""The calls of backends under way in a store, in a file that outlives a crash of its process.

A package of a backend may end the process: a fault in a client library, `os._exit`. The threads of the store note each
call here first. The page is shared memory of the file, so the parent of the process finds it as it was at the end.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppengine.protocol.backend_calls import BackendCall

SLOTS, SLOT_BYTES = 1024, 64
"""More slots than threads of all backends; method and name of a backend fit into one."""
_NOTE = re.compile(r"([a-z]{1,16}) (\S{1,47})")
_FAULTS = frozenset({
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS,
})  # fmt: skip
"""Signals of a fault in the process itself. A SIGKILL comes from outside, and says nothing of a backend."""


class CallPage:
    """The notes of one process. Without a path they are kept nowhere."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises OSError."""
        self._memory: mmap.mmap | None = None
        self._free = deque(range(0, SLOTS * SLOT_BYTES, SLOT_BYTES))
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(descriptor, SLOTS * SLOT_BYTES)
                self._memory = mmap.mmap(descriptor, SLOTS * SLOT_BYTES)
            finally:
                os.close(descriptor)

    @contextmanager
    def call(self, method: str, backend: str) -> Iterator[None]:
        """Note a call while it is under way. From any thread."""
        at = self._free.pop() if self._free else None
        if at is not None:
            self._write(at, f"{method} {backend}".encode())
        try:
            yield
        finally:
            if at is not None:
                self._write(at, b"")
                self._free.append(at)

    def close(self) -> None:
        """Forget all calls: the process ends by its own decision, and calls that hang are not the reason."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory[:] = bytes(len(memory))

    def _write(self, at: int, note: bytes) -> None:
        if (memory := self._memory) is not None:
            memory[at : at + SLOT_BYTES] = note[:SLOT_BYTES].ljust(SLOT_BYTES, b"\0")


def page_path(log: Path) -> Path:
    """Return the path of the page of a process, beside its log."""
    return log.with_suffix(".calls")


def take_calls(log: Path, exit_code: int) -> list[BackendCall]:
    """Return the calls that may be the reason of an end, and remove the page: it must not explain a later end."""
    path = page_path(log)
    try:
        page = path.read_bytes()
        path.unlink()
    except OSError:
        return []  # The process notes none, as most.
    if exit_code < 0 and -exit_code not in _FAULTS:
        return []
    notes = (page[at : at + SLOT_BYTES].rstrip(b"\0") for at in range(0, len(page), SLOT_BYTES))
    found = (_NOTE.fullmatch(note.decode("utf-8", "replace")) for note in notes if note)
    return [BackendCall(each[1], each[2]) for each in found if each is not None]
