"""The listening socket of an HTTP process: at a port that others share, or at a file."""

from __future__ import annotations

import socket
from pathlib import Path

from ppengine.common.http_address import HttpAddress
from ppengine.common.socket_files import remove_socket

BACKLOG = 2048


def listen(address: HttpAddress, *, keys: bool) -> socket.socket:
    """Return a listening socket. `keys`: whether callers need an API key. Raises OSError."""
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        if address.path:
            remove_socket(address.path)
            listener.bind(address.place)
            # No client connects before `listen`. Without a key, a file is its user's alone, as a port is its host's.
            Path(address.path).chmod(0o666 if keys else 0o600)
        else:
            # Other HTTP processes of the engine share the port: the kernel divides connections.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address.place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
