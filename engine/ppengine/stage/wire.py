"""A connection to one neighbour: bytes over a TCP socket, without a thread.

Sent bytes are in the kernel as far as there is room, so a message that fits costs its sender one
system call and wakes no thread but its receiver. A wait ends when the peer's process goes, or when
`left()` says that this side must leave, which is checked ten times a second.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable
from typing import ClassVar

POLL_MS = 100
_GONE = {errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT}


class PeerLostError(Exception):
    """The process at the other end of an edge is gone, or sent a wrong message; one line.

    `peer`: the stage there; `rank`: its tensor rank, None: this one's. Both are this process itself if it expected a
    wrong message. `rows`: rows that it expected of a message that was not due.
    """

    def __init__(
        self, text: str, peer: int | None = None, rank: int | None = None, rows: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(text)
        self.peer, self.rank, self.rows = peer, rank, rows


class SupersededError(Exception):
    """A wait was left: a newer generation has begun, or the stage must end."""


class Wire:
    """One connected socket to stage `peer`. A method that waits raises PeerLostError or SupersededError.

    `rank`: the tensor rank there; None: this one's. `key`: the secret that both ends have proved to know.
    """

    carrier: ClassVar[str] = "TCP"
    """Protocol that carries the bytes."""

    def __init__(
        self,
        connection: socket.socket,
        peer: int,
        left: Callable[[], bool],
        rank: int | None = None,
        key: bytes = b"",
    ) -> None:
        self.peer, self.rank, self.key = peer, rank, key
        self._left = left
        self._socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readable, self._writable, self._ended = select.poll(), select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._ended.register(connection, select.POLLRDHUP)

    @property
    def left(self) -> bool:
        """Whether this side must leave the connection."""
        return self._left()

    def push(self, parts: list[memoryview]) -> list[memoryview]:
        """Send as much as there is room for, and return the rest."""
        try:
            sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            return parts
        except OSError as error:
            raise self._lost(error) from None
        while parts and sent >= len(parts[0]):
            sent -= len(parts[0])
            parts = parts[1:]
        return [parts[0][sent:], *parts[1:]] if parts else []

    def send(self, parts: list[memoryview]) -> None:
        """Send all, waiting for room."""
        while parts := self.push(parts):
            self._wait(self._writable)

    def receive(self, into: memoryview) -> None:
        """Fill `into`."""
        while into:
            into = into[self.read([into]) :]

    def read(self, parts: list[memoryview]) -> int:
        """Wait until bytes have come, and put them into `parts`, one behind the other; return their number."""
        while True:
            # A poll before each read: a message that is held up in the kernel then shows as a wait.
            self._wait(self._readable)
            try:
                count = self._socket.recvmsg_into(parts)[0]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not count:
                raise self._lost()
            return count

    @property
    def readable(self) -> bool:
        """Whether something has come, be it the end."""
        return bool(self._readable.poll(0))

    def check_open(self) -> None:
        """Raise PeerLostError if the peer has closed, even if there is still something to read."""
        if self._ended.poll(0):
            raise self._lost()

    def check_sendable(self) -> None:
        """Raise PeerLostError if the peer is known to be gone: the first message after that would be lost silently.

        Nothing comes back on a wire, so that all there can be to read is its end.
        """
        if self.readable:
            raise self._lost()

    def close(self) -> None:
        """Close the connection; the peer sees it at once."""
        self._socket.close()

    @property
    def _name(self) -> str:
        return f"stage {self.peer}" if self.rank is None else f"stage {self.peer} rank {self.rank}"

    def _wait(self, poll: select.poll) -> None:
        try:
            while not poll.poll(POLL_MS):
                if self._left():
                    raise SupersededError(f"{self._name} was waited for")
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError | None = None) -> PeerLostError:
        closed = error is None or error.errno in _GONE
        what = "it closed the connection" if closed else f"{error}"
        return PeerLostError(f"lost {self._name}: {what}", self.peer, self.rank)
