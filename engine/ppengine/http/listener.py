"""The listening socket of an HTTP process: at a port that others share, or at a file."""

from __future__ import annotations

import os
import socket

from ppengine.common.http_address import HttpAddress
from ppengine.common.socket_files import remove_socket

BACKLOG = 2048


def listen(address: HttpAddress, *, keys: bool) -> socket.socket:
    """Return a listening socket. `keys`: whether callers need an API key. Raises OSError.

    Without keys a file is its user's alone, as a port is its host's.
    """
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        if address.path:
            remove_socket(address.path)
            _make_file(listener, address.path, 0o666 if keys else 0o600)
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


def _make_file(listener: socket.socket, path: str, mode: int) -> None:
    """Bind to a file that has `mode` from its beginning: a chmod would follow a link that another user put there."""
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
