"""Restarts of an engine's processes by the supervisor: which, and when."""

from __future__ import annotations

import time

from ppengine.supervisor.process_deaths import HELPER_AGAIN_S, ProcessDeaths

AGAIN_S = 1.0
"""Seconds until a process is tried again for which there was no descriptor, folder or process."""
MOST_AGENTS = 5
"""Most agents in all: one that keeps ending has a reason that a restart does not remove."""


class RestartPlan:
    """The time at which each process is due, by role. Stages are no part of it: the core orders their restarts."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._deaths: dict[str, ProcessDeaths] = {}
        self._agents = 1

    def first_start(self, role: str) -> None:
        """Plan the start of a process that has waited for its stage."""
        self._due.setdefault(role, 0.0)

    def vital_ended(self, role: str) -> bool:
        """Plan the restart of a gateway or core; return whether there is one: not after the fifth end."""
        delay = self._note(role)
        if delay is None:
            return False
        self._due[role] = time.monotonic() + delay
        return True

    def helper_ended(self, role: str) -> None:
        """Plan the restart of an HTTP process, a store or `texts`: one that keeps ending is tried now and then."""
        delay = self._note(role)
        self._due[role] = time.monotonic() + (HELPER_AGAIN_S if delay is None else delay)

    def agent_ended(self) -> bool:
        """Plan the restart of the agent at once; return whether there is one.

        It only looks, and knows nothing that it cannot learn again.
        """
        if self._agents >= MOST_AGENTS:
            return False
        self._agents += 1
        self._due["agent"] = time.monotonic()
        return True

    def try_again(self, role: str) -> None:
        """Plan another try for a process that could not be started."""
        self._due[role] = time.monotonic() + AGAIN_S

    def waits(self, role: str) -> bool:
        """Return whether a planned start of a process has not come."""
        return time.monotonic() < self._due.get(role, 0.0)

    def take_due(self) -> list[str]:
        """Return the roles whose time has come; they are planned no more."""
        now = time.monotonic()
        due = [role for role, at in self._due.items() if now >= at]
        for role in due:
            del self._due[role]
        return due

    def _note(self, role: str) -> float | None:
        return self._deaths.setdefault(role, ProcessDeaths()).note(time.monotonic())
