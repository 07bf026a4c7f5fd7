"""The bytes that a backend holds, asked for in turn with its other calls."""

from __future__ import annotations

from collections.abc import Callable

from ppengine.store.backend import Backend, Usage
from ppengine.store.bounce import Bounce
from ppengine.store.lane_task import Outcome, Task

USAGE_S = 2.0
"""Seconds between an answer and the next question."""


class UsageWatch:
    """Keeps the newest usage. One question at a time is under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.newest = Usage(-1)
        """Set by threads of the lane, behind each call that learns it."""
        self.error = ""
        """Why the newest question has failed, in one line; empty: it has not."""
        self._due = 0.0
        self._asks = False

    def question(self) -> Task | None:
        """Return the task that asks for the usage; None: none is due."""
        if self._asks or self._clock() < self._due:
            return None
        self._asks = True
        return Task("care", self._ask, self._ended, counts=False)

    def _ask(self, backend: Backend, _: Bounce) -> int:
        try:
            self.newest = backend.usage()
        finally:
            # Not in `_ended`: a call that hangs holds one thread, and must not be followed by others.
            self._asks = False
        return 0

    def _ended(self, outcome: Outcome) -> None:
        self._due = self._clock() + USAGE_S
        if outcome.skipped:
            self._asks = False
        self.error = outcome.error if outcome.failed else ""
        if outcome.error:
            self.newest = Usage(-1, self.newest.evicted)
