"""Small files that one process writes through a mapping and any process of this user may read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def make(path: Path, size: int) -> mmap.mmap:
    """Return the mapping of a new file of `size` zero bytes, this user's alone. Raises OSError.

    It takes the place of a predecessor's at once: another process opens the one or the other, and never an empty file.
    Processes that map the predecessor's keep their mapping.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _fill(descriptor, size, path)
        mapping = mmap.mmap(descriptor, size)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
    return mapping


def _fill(descriptor: int, size: int, predecessor: Path) -> None:
    """Allocate all of a file. On a full file system the predecessor makes room.

    A hole would end the writer by SIGBUS once the file system is full.
    """
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        predecessor.unlink(missing_ok=True)
        os.posix_fallocate(descriptor, 0, size)


def open_for_reading(path: Path) -> mmap.mmap:
    """Return the mapping of a file that another process of this user has made, for reading. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Writable, though it is only read: torch warns of memory that is not.
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
