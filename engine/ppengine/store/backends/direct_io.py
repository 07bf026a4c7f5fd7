"""Whole files by O_DIRECT, where file system, buffer and length allow that, else through the page cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from ppengine.store.backend import PAGE

LEAST = 64 * 1024
"""Bytes from which on O_DIRECT is used; smaller files are better off in the page cache."""


def can_direct(folder: Path) -> bool:
    """Return whether files in `folder` can be written and read by O_DIRECT. Raises OSError for other failures."""
    probe = folder / "probe"
    page = mmap.mmap(-1, PAGE)
    try:
        with memoryview(page) as view:
            _write(probe, view, os.O_DIRECT)
            return _read(probe, view, os.O_DIRECT) == PAGE
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
        page.close()


def write_file(path: Path, data: memoryview, *, direct: bool) -> None:
    """Make a file of `data`. Raises OSError, FileExistsError too."""
    if direct and _fits(data):
        try:
            _write(path, data, os.O_DIRECT)
            return
        except OSError as error:
            # The buffer is not aligned, as one of a caller outside of the store may be.
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
    _write(path, data, 0)


def read_file(path: Path, into: memoryview, *, direct: bool) -> int:
    """Fill `into` from a file and return its length; a longer file is not read. Raises OSError."""
    if direct and _fits(into):
        try:
            return _read(path, into, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return _read(path, into, 0)


def _fits(buffer: memoryview) -> bool:
    return len(buffer) >= LEAST and len(buffer) % PAGE == 0


def _write(path: Path, data: memoryview, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.write(descriptor, data[done:])
    finally:
        os.close(descriptor)


def _read(path: Path, into: memoryview, flags: int) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    try:
        size = os.fstat(descriptor).st_size
        done = 0
        while size <= len(into) and done < size:
            # The whole rest of the buffer: a length by O_DIRECT is a multiple of a page, that of a file may not be.
            count = os.preadv(descriptor, [into[done:]], done)
            if count == 0:
                return done
            done += count
        return size
    finally:
        os.close(descriptor)
