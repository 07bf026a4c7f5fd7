"""Files of Unix sockets: a process that was killed leaves its own, and no other process may listen there."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from pathlib import Path

_ANSWERS_S = 1.0


def remove_socket(path: str) -> None:
    """Remove the file of a socket, if there is one. Raises OSError: a process listens there, or it is another file."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "it is a file, and no socket", path)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWERS_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:
            pass  # It listens, and its backlog is full.
    raise OSError(errno.EADDRINUSE, "a process listens there", path)


def hold_socket(path: str) -> socket.socket:
    """Return a socket that keeps `path` from other engines until it is closed, or its process ends. Raises OSError.

    It has a name in the kernel's table, made of the path, and no file.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {file.parent}", path)
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"no file can be made in {file.parent}", path)
    whole = os.fsencode(file.parent.resolve() / file.name)
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(b"\0ppconsole/http/" + hashlib.sha256(whole).hexdigest().encode())
        # Not before: the file of an engine that holds the path may be between its making and its first connection.
        remove_socket(path)
    except OSError:
        held.close()
        raise
    return held
