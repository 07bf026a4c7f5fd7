"""The ends of a backend's calls: counts, times, the breakers, and the error that the figures report."""

from __future__ import annotations

import logging

from ppengine.store.breaker import Breaker
from ppengine.store.call_times import CallTimes
from ppengine.store.lane_task import SIDES, Kind, Outcome, Side

log = logging.getLogger("ppengine.store")

_DONE: dict[Side, str] = {"read": "read", "write": "written"}


class BackendHealth:
    """Notes how the calls of one backend end. Times are of the caller's clock."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.breakers: dict[Side, Breaker] = {"read": Breaker(), "write": Breaker()}
        self.error = ""
        """The newest error."""
        self._failed_kind: Kind = "care"
        """Kind of the call that gave it."""
        self._healed = False
        """Whether such a call has succeeded since."""
        self.counts = {"reads": 0, "writes": 0, "read_bytes": 0, "written_bytes": 0, "errors": 0, "corrupt": 0}
        """Calls and bytes since the start, by the fields of `BackendFigures`."""
        self.reads, self.writes = CallTimes(), CallTimes()

    def note(self, kind: Kind, outcome: Outcome, now: float, ms: float, *, tests: bool = False) -> None:
        """Note the end of a call at `now`, which took `ms` milliseconds. `tests`: it was a test of both sides."""
        self.counts["corrupt"] += outcome.corrupt
        if outcome.failed:
            self._note_failure(kind, outcome.error, now)
            return
        if kind in SIDES:
            self.breakers[SIDES[kind]].succeed()
        elif tests and not outcome.error:
            for breaker in self.breakers.values():
                breaker.succeed()
        if outcome.corrupt:
            self._keep_error(kind, outcome.error)
        elif not outcome.error:
            # A read says nothing of a disk that is full.
            self._healed = self._healed or tests or kind == self._failed_kind
            if kind in ("read", "write"):
                names = ("reads", "read_bytes") if kind == "read" else ("writes", "written_bytes")
                self.counts[names[0]] += 1
                self.counts[names[1]] += outcome.moved
                (self.reads if kind == "read" else self.writes).note(now, ms)

    def _note_failure(self, kind: Kind, error: str, now: float) -> None:
        self.counts["errors"] += 1
        if kind in SIDES:
            breaker = self.breakers[SIDES[kind]]
            before = breaker.state
            breaker.fail(now, error)
            if (before, breaker.state) == ("closed", "open"):
                log.warning("%s is not %s for a while: %s", self._name, _DONE[SIDES[kind]], error)
        self._keep_error(kind, error)

    def _keep_error(self, kind: Kind, error: str) -> None:
        self.error, self._failed_kind, self._healed = error, kind, False

    def refusal(self, side: Side, now: float) -> str:
        """Return why no job of a side is taken now; empty: it is. An open breaker lets one try through."""
        breaker = self.breakers[side]
        if breaker.admit(now):
            return ""
        return f"{self._name} is left alone after failures, and not {_DONE[side]}: {breaker.why}"

    def report_error(self) -> str:
        """Return the newest error for a report: one that is over is reported once more.

        Without one, it is the error of a breaker that is not closed.
        """
        error = self.error or next((each.why for each in self.breakers.values() if each.state != "closed"), "")
        if self._healed:
            self.error, self._healed = "", False
        return error
