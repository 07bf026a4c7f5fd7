"""Reading zmq sockets without waiting, for loops that do so thousands of times a second."""

from __future__ import annotations

import zmq

NOBLOCK = int(zmq.NOBLOCK)
"""A plain integer, as those below: several are needed for each message, and members of an enum are slow to combine."""
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message is there. An exception each time that none is would cost more than the message."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)
