"""The ended engines for a list that is looked at again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from ppengine.protocol.discovery import EndedEngine, ended_engines
from ppengine.protocol.kept_files import state_dir

SETTLED_S = 10.0
"""Seconds after a change in which the files of an ended engine may still change: two processes can note its end."""


class EndedList:
    """Reads the kept files when an engine has come or gone, and for some seconds after that; then it reads nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: tuple[int | None, frozenset[str]] | None = None
        self._unsettled_until = 0.0
        self._engines: list[EndedEngine] = []

    def read(self, live: Collection[str]) -> list[EndedEngine]:
        """Return the ended engines, the newest first. `live`: ids of the engines that run."""
        seen, now = (_changed_ns(state_dir() / "engines"), frozenset(live)), self._clock()
        if seen != self._seen:
            self._seen, self._unsettled_until = seen, now + SETTLED_S
        if now < self._unsettled_until:
            self._engines = ended_engines()
        return self._engines


def _changed_ns(folder: Path) -> int | None:
    """Return when a folder got or lost an entry; None if it is missing."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None
