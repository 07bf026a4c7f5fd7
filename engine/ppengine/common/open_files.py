"""The limit of open files of this process, and of others: descriptors in use, and the limit."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import NamedTuple

FILES_LEFT = 4
"""A process with fewer free descriptors is out of them: a start of a stage takes four."""


class OpenFiles(NamedTuple):
    """Descriptors of a process."""

    used: int
    limit: int

    @property
    def text(self) -> str:
        """Both figures, as a verdict quotes them."""
        return f"{self.used:,} of {self.limit:,} descriptors, RLIMIT_NOFILE"


def raise_limit() -> None:
    """Allow as many open files as the hard limit; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files(pid: int) -> OpenFiles | None:
    """Return the descriptors of a process; None: it is gone, or not readable."""
    limit = 0
    try:
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        with os.scandir(f"/proc/{pid}/fd") as entries:
            used = sum(1 for _ in entries)
    except OSError as error:
        # To look takes a descriptor.
        return OpenFiles(limit, limit) if error.errno == errno.EMFILE and pid == os.getpid() else None
    except ValueError:
        return None
    return OpenFiles(used - (pid == os.getpid()), limit)
