"""A folder for files that are being written. Its lock shows that its process lives, on any host."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import shutil
from pathlib import Path

_LOCK = "lock"
_NAME = re.compile(r"[0-9a-f]{12}")


class DraftFolder:
    """A subfolder of `parent` for this process. `close` removes it; a later process does after a kill."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(mode=0o700, exist_ok=True)
        self._numbers = itertools.count(1)
        while True:
            self.path = parent / secrets.token_hex(6)
            self.path.mkdir(mode=0o700)
            # A sweeper may come in between, and take the folder for one of a dead process.
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.fstat(self._lock).st_nlink:
                    return
                os.close(self._lock)

    def draft(self) -> Path:
        """Return the path of a new draft."""
        return self.path / f"{next(self._numbers)}"

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(parent: Path) -> int:
    """Remove the folders of processes that have ended without it; return their number.

    Other folders stay: a profile may name one that is no backend's, and has drafts of its user.
    """
    removed = 0
    for folder in parent.iterdir() if parent.is_dir() else ():
        removed += _NAME.fullmatch(folder.name) is not None and _remove_dead(folder)
    return removed


def _remove_dead(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(OSError):  # Its process had no time for the lock, nor for a draft.
            folder.rmdir()
            return True
        return False
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            return True
        return False
    finally:
        os.close(lock)
