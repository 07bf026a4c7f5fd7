"""The age of a plan that an open dialog shows, and the moments at which the dialog asks for a new one."""

from __future__ import annotations

from collections.abc import Set

SHOWN_S = 3.0
"""From this age on a plan says how old it is."""
OLD_S, SELDOM_S = 5.0, 60.0
"""First age at which a plan is renewed. It doubles up to the second while no key is pressed: a plan is audited."""
_LEAST_S = 1.0
"""Least time between two plans."""


class PlanAge:
    """Times are seconds of the caller's clock. `ended`: the requests of the plan that had ended when it was made."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._ended: Set[str] = frozenset()
        self._period = OLD_S

    def made(self, now: float, ended: Set[str]) -> None:
        """Note a plan that was made now."""
        if self._at is not None:
            self._period = min(2 * self._period, SELDOM_S)
        self._at, self._ended = now, ended

    def forget(self) -> None:
        """Note that there is no plan."""
        self._at, self._period = None, OLD_S

    def touched(self) -> None:
        """Note that the operator pressed a key: the plan must be fresh now."""
        self._period = OLD_S

    def is_old(self, now: float, ended: Set[str]) -> bool:
        """Return whether the plan must be renewed: by its age, or as requests of it have ended since."""
        age = self.seconds(now)
        return age >= self._period or (age >= _LEAST_S and ended != self._ended)

    def seconds(self, now: float) -> float:
        """Return the age of the plan in seconds; 0 without a plan."""
        return 0.0 if self._at is None else now - self._at
