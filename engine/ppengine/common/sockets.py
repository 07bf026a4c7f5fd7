"""Reading zmq sockets without waiting, for loops that do so thousands of times a second; and their files."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import zmq

NOBLOCK = int(zmq.NOBLOCK)
"""A plain integer, as those below: several are needed for each message, and members of an enum are slow to combine."""
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message is there. An exception each time that none is would cost more than the message."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


LOOK_S = 1.0
"""Seconds between two looks at the files."""


class Bindings:
    """The ipc endpoints that a process binds. A file that is gone is made again, for peers that connect later.

    Connections outlive the file, so a process cannot notice the loss by itself.
    """

    def __init__(self) -> None:
        self._bound: list[tuple[zmq.Socket[bytes], str]] = []
        self._due = 0.0

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Bind `socket`, for this user alone. Raises zmq.ZMQError."""
        _bind(socket, endpoint)
        self._bound.append((socket, endpoint))

    def look(self) -> list[str]:
        """Bind again, once a second, those whose files are gone; return their names."""
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + LOOK_S
        self._bound = [(socket, endpoint) for socket, endpoint in self._bound if not socket.closed]
        made = []
        for socket, endpoint in self._bound:
            path = Path(endpoint.removeprefix("ipc://"))
            # The supervisor makes the folder.
            if not path.exists() and path.parent.is_dir():
                with contextlib.suppress(zmq.ZMQError):
                    _bind(socket, endpoint)
                    made.append(path.name)
        return made


_PORT_S = 2.0
"""Seconds to wait for a port that is still in use."""

BACKLOG = 1024
"""Calls of a port that may wait until libzmq takes them; it takes one in each turn. Its default of 100 drops others."""


def bind_tcp(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind a port that a socket of this process, or of its predecessor, may hold for another moment.

    Raises OSError.
    """
    socket.backlog = BACKLOG
    deadline = time.monotonic() + _PORT_S
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise OSError(f"the port of {endpoint} cannot be used: {os.strerror(error.errno or 0)}") from None
        time.sleep(0.005)


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    # A socket file's mode follows the umask; the 0700 folder guards it as well.
    before = os.umask(0o077)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(before)
