"""The time that a stage which starts may be silent: a try without a sign of life counts as failed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ppengine.diagnosis.budgets import PHASE_BUDGET_S

ANSWER_S = 10.0
"""Seconds from the supervisor's report of a process to its first message: a forked one has loaded all it needs."""
ORDERED, PROCESS = "ordered", "process"
"""The start is ordered; there is a process. Later signs are phases of the ring."""


@dataclass(slots=True)
class SignsOfLife:
    """The newest sign of one stage on its way to the core."""

    sign: str = ORDERED
    at: float = math.inf
    """Time of it, in seconds of the clock; infinite: there was none."""
    answer_s: float = ANSWER_S
    """Seconds that a process has for its first message."""

    def note(self, sign: str, now: float) -> None:
        """Note a sign."""
        self.sign, self.at = sign, now

    def missing(self, now: float) -> str:
        """Return why the stage counts as failed, in one line; empty while it does not."""
        limit = self._limit_s
        if now - self.at < limit:
            return ""
        if self.sign == ORDERED:
            return f"no process of it came within {limit:g} s"
        if self.sign == PROCESS:
            return f"its process did not reach the core within {limit:g} s"
        return f"no progress in phase {self.sign} for {limit:g} s"

    @property
    def _limit_s(self) -> float:
        if self.sign == PROCESS:
            return self.answer_s
        if self.sign == "meet":
            return math.inf  # It waits for others, which have limits of their own.
        return PHASE_BUDGET_S.get("start" if self.sign == ORDERED else self.sign, math.inf)
