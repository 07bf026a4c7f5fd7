"""TCP connections between two processes of this host, reached from a third one (pidfd_getfd, Linux 5.6)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from ppengine.drills.registry import FaultError

_PIDFD_GETFD = 438
_ESTABLISHED = "01"
_NEVER = 1 << 30
"""Bytes that must arrive before a reader wakes up; the kernel caps them at half of the receive buffer."""
_MAX_PACING_RATE, _UNLIMITED = 47, 2**64 - 1
"""SO_MAX_PACING_RATE, which Python does not name, and the value that takes it back."""
_libc = ctypes.CDLL(None, use_errno=True)


class Connection:
    """One connection; both ends can be borrowed."""

    def __init__(self, ends: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self._ends = ends

    def shut_down(self) -> None:
        """End it in both directions, as a cable that is cut and reset would."""
        with _borrow(*self._ends[0]) as end, contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def stall(self) -> Callable[[], None]:
        """Hide arriving bytes from both ends; return the undoing."""
        for end in self._ends:
            _low_water(end, _NEVER)

        def undo() -> None:
            for end in self._ends:
                # A process that is gone needs no undoing.
                with contextlib.suppress(OSError):
                    _low_water(end, 1)

        return undo

    def slow_down(self, rate: int) -> Callable[[], None]:
        """Let both ends send at most `rate` bytes a second; return the undoing."""
        for end in self._ends:
            _pace(end, rate)

        def undo() -> None:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    _pace(end, _UNLIMITED)

        return undo


def between(first: int, second: int) -> list[Connection]:
    """Return the established connections between two processes. Raises FaultError if there are none."""
    rows = _rows(first)
    mine, theirs = _descriptors(first), _descriptors(second)
    by_ends = {(local, remote): inode for inode, (local, remote) in rows.items()}
    found = []
    for inode, (local, remote) in rows.items():
        other = by_ends.get((remote, local))
        if inode in mine and other in theirs:
            found.append(Connection(((first, mine[inode]), (second, theirs[other]))))
    if not found:
        raise FaultError(f"there is no TCP connection between pid {first} and pid {second}")
    return found


def _rows(pid: int) -> dict[str, tuple[str, str]]:
    """Return (local, remote) address by inode of the established IPv4 and IPv6 connections that `pid` can see."""
    rows = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    rows[fields[9]] = fields[1], fields[2]
    return rows


def _descriptors(pid: int) -> dict[str, int]:
    """Return the descriptor of each socket of `pid` by inode."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(path.readlink())
            if target.startswith("socket:["):
                found[target[8:-1]] = int(path.name)
    return found


def _low_water(end: tuple[int, int], size: int) -> None:
    with _borrow(*end) as borrowed:
        borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def _pace(end: tuple[int, int], rate: int) -> None:
    with _borrow(*end) as borrowed:
        borrowed.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", rate))


@contextlib.contextmanager
def _borrow(pid: int, descriptor: int) -> Iterator[socket.socket]:
    """Give a duplicate of another process's socket for a moment. Raises FaultError if that is not allowed."""
    holder = os.pidfd_open(pid)
    try:
        number = _libc.syscall(_PIDFD_GETFD, holder, descriptor, 0)
        if number < 0:
            reason = os.strerror(ctypes.get_errno())
            raise FaultError(f"descriptor {descriptor} of pid {pid} cannot be borrowed here: {reason}")
    finally:
        os.close(holder)
    with socket.socket(fileno=number) as borrowed:
        yield borrowed
