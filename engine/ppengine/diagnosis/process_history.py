"""The memory of one process that its ages need: stops, death, old ticks, out-of-memory kills."""

from __future__ import annotations

from collections import deque

import msgspec

from ppengine.diagnosis.budgets import TRACED_AFTER_S
from ppengine.protocol.reports import TRACED

TICK_OLD_S = 1.0
"""Age in seconds from which a tick is old: the control thread ticks ten times a second."""
OOM_WINDOW_NS, OOM_LATE_NS = 3_000_000_000, 1_500_000_000
"""Nanoseconds around a death in which a kill counts: the kernel counts it early, and the agent reads it late."""


class Run(msgspec.Struct):
    """An unbroken run of one observation, in monotonic nanoseconds."""

    first_ns: int
    last_ns: int

    @property
    def length_s(self) -> float:
        """Length in seconds."""
        return (self.last_ns - self.first_ns) / 1e9


class ProcessHistory(msgspec.Struct):
    """Memory of one process; another pid starts a new one."""

    pid: int
    stopped: Run | None = None
    traced: bool = False
    """Whether a tracer made the newest stop."""
    dead_ns: int | None = None
    lost: tuple[str, int] = "", 0
    """The core's reason why the stage cannot go on, and the generation of that process."""
    lost_ns: int = 0
    """Time of the newest change of `lost`."""
    resumed_ns: int | None = None
    stale: Run | None = None
    kills: deque[tuple[int, int]] = msgspec.field(default_factory=deque)
    """Counts of out-of-memory kills with their times, over `OOM_WINDOW_NS`."""
    grown: int | None = None

    def note_state(self, state: str | None, at_ns: int) -> bool:
        """Enter the state letter of one look (None: no such process); return whether a stop has just ended."""
        ended = self.stopped
        if state in ("T", TRACED):
            self.traced = state == TRACED
            self.stopped = self.stopped or Run(at_ns, at_ns)
            self.stopped.last_ns = max(self.stopped.last_ns, at_ns)
        else:
            self.stopped = None
        if state in (None, "Z", "X"):
            self.dead_ns = self.dead_ns or at_ns
        if ended is None or self.stopped is not None:
            return False
        if self.traced and ended.length_s < TRACED_AFTER_S:
            return False  # A short look by a debugger: a hang before it continues.
        self.resumed_ns = at_ns
        return True

    def since_resumed(self, age_s: float, at_ns: int) -> float:
        """Return an age in seconds without the time of a stop."""
        return age_s if self.resumed_ns is None else min(age_s, (at_ns - self.resumed_ns) / 1e9)

    def note_tick(self, age_s: float, at_ns: int) -> float:
        """Enter the age of the control thread's tick; return it without the time of a stop."""
        age_s = self.since_resumed(age_s, at_ns)
        if age_s < TICK_OLD_S or self.stopped is not None:
            self.stale = None
        else:
            self.stale = self.stale or Run(at_ns, at_ns)
            self.stale.last_ns = max(self.stale.last_ns, at_ns)
        return age_s

    def note_kills(self, count: int | None, at_ns: int) -> int | None:
        """Enter a count of out-of-memory kills; return its growth around the death, or lately."""
        if count is not None and (self.dead_ns is None or at_ns - self.dead_ns < OOM_LATE_NS):
            self.kills.append((at_ns, count))
            while self.dead_ns is None and at_ns - self.kills[0][0] > OOM_WINDOW_NS:
                self.kills.popleft()
            self.grown = max(0, count - self.kills[0][1])
        return self.grown
