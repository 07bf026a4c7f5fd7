"""The ends of a backend's calls: counts, times, the breaker, and the error that the figures report."""

from __future__ import annotations

import logging

from ppengine.store.breaker import Breaker
from ppengine.store.call_times import CallTimes
from ppengine.store.lane_task import Kind, Outcome

log = logging.getLogger("ppengine.store")


class BackendHealth:
    """Notes how the calls of one backend end. Times are of the caller's clock."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.breaker = Breaker()
        self.error = ""
        """The newest error."""
        self._failed_kind: Kind = "other"
        """Kind of the call that gave it."""
        self._healed = False
        """Whether such a call has succeeded since."""
        self.counts = {"reads": 0, "writes": 0, "read_bytes": 0, "written_bytes": 0, "errors": 0, "corrupt": 0}
        """Calls and bytes since the start, by the fields of `BackendFigures`."""
        self.reads, self.writes = CallTimes(), CallTimes()

    def note(self, kind: Kind, outcome: Outcome, now: float, ms: float) -> None:
        """Note the end of a call at `now`, which took `ms` milliseconds."""
        self.counts["corrupt"] += outcome.corrupt
        if outcome.failed:
            self._note_failure(kind, outcome.error, now)
            return
        self.breaker.succeed()
        if outcome.corrupt:
            self._keep_error(kind, outcome.error)
        elif not outcome.error:
            # A read says nothing of a disk that is full.
            self._healed = self._healed or kind == self._failed_kind
            if kind in ("read", "write"):
                names = ("reads", "read_bytes") if kind == "read" else ("writes", "written_bytes")
                self.counts[names[0]] += 1
                self.counts[names[1]] += outcome.moved
                (self.reads if kind == "read" else self.writes).note(now, ms)

    def _note_failure(self, kind: Kind, error: str, now: float) -> None:
        self.counts["errors"] += 1
        before = self.breaker.state
        self.breaker.fail(now)
        if (before, self.breaker.state) == ("closed", "open"):
            log.warning("%s is left alone for a while: %s", self._name, error)
        self._keep_error(kind, error)

    def _keep_error(self, kind: Kind, error: str) -> None:
        self.error, self._failed_kind, self._healed = error, kind, False

    def report_error(self) -> str:
        """Return the newest error for a report: one that is over is reported once more."""
        error = self.error
        if self._healed:
            self.error, self._healed = "", False
        return error
