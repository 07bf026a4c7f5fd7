"""The generation that a stage is in, and the newest one that the core has announced."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Generations:
    """`announce` may be called by any thread; only the step loop enters a generation."""

    def __init__(self, first: int) -> None:
        self.current = first
        self.newest = first
        self._on_newer: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def when_newer(self, call: Callable[[], None] | None) -> None:
        """Have `call` called when the present generation is over, by the thread that receives the news; None: nothing.

        A call that has begun ends before this returns. So a release that comes late is none of the next generation.
        """
        with self._lock:
            self._on_newer = call

    def announce(self, generation: int) -> None:
        """Note that the core has begun a generation."""
        with self._lock:
            self.newest = max(self.newest, generation)
            if self.superseded and self._on_newer is not None:
                self._on_newer()

    def enter(self) -> int:
        """Go on in the newest generation, and return it."""
        self.current = self.newest
        return self.current

    @property
    def superseded(self) -> bool:
        """Whether the present generation is over."""
        return self.newest > self.current
