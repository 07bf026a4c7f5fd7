"""The generation that a stage is in, and the newest one that the core has announced."""

from __future__ import annotations

from collections.abc import Callable


class Generations:
    """`announce` may be called by any thread; only the step loop enters a generation."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.current = first
        self.newest = first
        self.on_newer: Callable[[], None] | None = None
        """Called when the present generation is over, by the thread that receives the news.

        That may be late, in the next generation, and no thread waits for it.
        """

    def announce(self, generation: int, started: int) -> None:
        """Note that the core has begun a generation. `started`: that for which the newest process here was started.

        A replaced process ignores it: it would meet neighbours that its successor needs.
        """
        if started > self._first:
            return
        self.newest = max(self.newest, generation)
        on_newer = self.on_newer
        if self.superseded and on_newer is not None:
            on_newer()

    def enter(self) -> int:
        """Go on in the newest generation, and return it."""
        self.current = self.newest
        return self.current

    @property
    def superseded(self) -> bool:
        """Whether the present generation is over."""
        return self.newest > self.current
