"""Keeps jobs away from a backend that fails: closed, open after failures in a row, half-open for one call."""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half-open"]

FAILURES = 5
"""Failures in a row that open it."""
FIRST_S, MOST_S = 2.0, 60.0
"""Seconds until the first try, which double with each failed one."""


class Breaker:
    """State of one side of a backend. Times are of the caller's clock."""

    def __init__(self) -> None:
        self._failures = 0
        self._wait_s = FIRST_S
        self._until = 0.0
        self._trying = False
        self.state: State = "closed"
        self.why = ""
        """Error of the newest failure."""

    def admit(self, now: float) -> bool:
        """Return whether a call may be made. After a while, one call tries an open breaker."""
        if self.state == "open" and now >= self._until:
            self.state = "half-open"
            self._trying = False
        if self.state == "half-open" and not self._trying:
            self._trying = True
            self._until = now + self._wait_s
            return True
        # A try that was never made, as its job had ended, must not close the door for ever.
        if self.state == "half-open" and now >= self._until:
            self._until = now + self._wait_s
            return True
        return self.state == "closed"

    def succeed(self) -> None:
        """Note a call that went well."""
        self.state, self._failures, self._wait_s = "closed", 0, FIRST_S

    def fail(self, now: float, why: str) -> None:
        """Note a call that failed."""
        self.why = why
        self._failures += 1
        if self.state == "half-open":
            self._wait_s = min(2 * self._wait_s, MOST_S)
        if self.state == "half-open" or self._failures >= FAILURES:
            self.state, self._until = "open", now + self._wait_s
