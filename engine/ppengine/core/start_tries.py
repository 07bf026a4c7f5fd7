"""Tries of a stage that does not come up: with a back-off, and a limit after which the requests end as lost.

A full disk, a limit of descriptors and a missing folder end without a command, so the tries never end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.common.back_off import pause_s

FIRST_S, MOST_S = 0.5, 15.0
"""Seconds until the second try; each further one doubles them, up to the most."""


@dataclass(eq=False)
class StartTries:
    """Counts the tries since the stages served last."""

    _limit_s: float
    """Seconds until the requests end."""
    _clock: Callable[[], float]
    count: int = field(init=False, default=0)
    """Number of tries that failed."""
    _since: float = field(init=False, default=0.0)
    """Time of the first failure."""
    _due: float | None = field(init=False, default=None)
    """Time of the next try; None: one is under way, or none has failed."""
    over: bool = field(init=False, default=False)
    """The limit has passed, and the requests have ended."""

    def failed(self) -> None:
        """Note that a stage did not come up, and plan the next try."""
        now = self._clock()
        if not self.count:
            self._since = now
        if self._due is None:
            self.count += 1
            self._due = now + pause_s(FIRST_S, MOST_S, self.count)

    def begun(self) -> None:
        """Note that the next try is under way."""
        self._due = None

    def reset(self) -> None:
        """Forget all tries: the stages serve, or an operator decides."""
        self.count, self._due, self.over = 0, None, False

    @property
    def waits(self) -> bool:
        """Whether a try is planned and not due."""
        return self._due is not None and self._clock() < self._due

    @property
    def due(self) -> bool:
        """Whether a planned try is due."""
        return self._due is not None and self._clock() >= self._due

    def expire(self) -> bool:
        """Return, once, whether the limit has passed."""
        expires = bool(self.count) and not self.over and self._clock() - self._since >= self._limit_s
        self.over = self.over or expires
        return expires

    @property
    def loss(self) -> str:
        """Words for the end of the requests."""
        return f"did not come up within {self._limit_s:g} s, {self._counted}"

    @property
    def text(self) -> str:
        """Tries so far, the next one, and the time until the requests end; empty without a failed try."""
        if not self.count:
            return ""
        now = self._clock()
        following = "under way" if self._due is None else f"in {max(0.0, self._due - now):.0f} s"
        text = f"{self._counted} failed, the next one is {following}"
        if self.over:
            return f"{text}; its requests have ended"
        return f"{text}; its requests end in {max(0.0, self._since + self._limit_s - now):.0f} s"

    @property
    def _counted(self) -> str:
        return f"{self.count} {'try' if self.count == 1 else 'tries'}"
