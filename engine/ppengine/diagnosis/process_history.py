"""The memory of one process: its newest sample, stops, death, old ticks, out-of-memory kills."""

from __future__ import annotations

from collections import deque

import msgspec
from msgspec.structs import replace

from ppengine.diagnosis.budgets import TRACED_AFTER_S
from ppengine.protocol.stage_samples import TRACED, StageSample

TICK_OLD_S = 1.0
"""Age in seconds from which a tick is old: the control thread ticks ten times a second."""
_SAME_TICK_NS = 500_000_000
"""Two old ticks are farther apart than `TICK_OLD_S`. Reports of one tick differ by the delay of the agent."""
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


class Glance(msgspec.Struct, frozen=True):
    """The kernel state of a process, read by the gateway itself while the agent is silent."""

    mono_ns: int
    state: str | None
    wchan: str | None = None
    tracer: str | None = None
    frozen: str = ""


class Sighting(msgspec.Struct, frozen=True):
    """A stage sample with the time of its report on this host's clock. `here`: the stage runs on this host."""

    sample: StageSample
    mono_ns: int
    here: bool = True
    glance: Glance | None = None
    """A newer look than the sample."""
    node: str = ""

    @property
    def state(self) -> Glance:
        """The newest kernel state."""
        sample = self.sample
        return self.glance or Glance(self.mono_ns, sample.process_state, sample.wchan, sample.tracer, sample.frozen)


class ProcessHistory(msgspec.Struct):
    """Memory of one process."""

    seen: Sighting | None = None
    stopped: Run | None = None
    traced: bool = False
    """Whether a tracer made the newest stop."""
    ended: bool = False
    """A fact says that it exited, or cannot go on."""
    dead_ns: int | None = None
    resumed_ns: int | None = None
    stale: Run | None = None
    """The looks that found one tick old."""
    stale_tick_ns: int = 0
    """Time of that tick."""
    stale_slept: bool = False
    """Whether the control thread slept at one of those looks, or its state is not known."""
    kills: deque[tuple[int, int]] = msgspec.field(default_factory=deque)
    """Counts of out-of-memory kills with their times, over `OOM_WINDOW_NS`."""
    grown: int | None = None

    def look(self, seen: Sighting) -> None:
        """Enter a sample of the process; one that has ended keeps the streams from before its page was gone."""
        if self.ended and self.seen is not None and not seen.sample.streams:
            seen = replace(seen, sample=replace(seen.sample, streams=self.seen.sample.streams))
        self.seen = seen

    def end(self, at_ns: int | None, kills: int | None) -> None:
        """Note that it has ended. `at_ns`: when it exited, None: it may still be there; `kills`: a late count."""
        self.ended = True
        if at_ns is not None:
            self.dead_ns = min(at_ns, self.dead_ns or at_ns)
        if self.kills:
            self.note_kills(kills, self.dead_ns or 0)

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

    def note_tick(self, age_s: float, at_ns: int, tick_ns: int, state: str | None) -> float:
        """Enter the age of the control thread's tick, of `tick_ns`; return it without the time of a stop.

        `state`: its state letter; None: not known.

        On a host without a free core the thread may tick between two looks and be late at both.
        """
        age_s = self.since_resumed(age_s, at_ns)
        if age_s < TICK_OLD_S or self.stopped is not None:
            self.stale = None
            return age_s
        slept = state in (None, "S", "D")
        if self.stale is None or tick_ns - self.stale_tick_ns > _SAME_TICK_NS:
            self.stale, self.stale_tick_ns, self.stale_slept = Run(at_ns, at_ns), tick_ns, slept
        else:
            self.stale.last_ns, self.stale_slept = max(self.stale.last_ns, at_ns), self.stale_slept or slept
        return age_s

    def note_kills(self, count: int | None, at_ns: int) -> int | None:
        """Enter a count of out-of-memory kills; return its growth around the death, or lately."""
        if count is None or (self.dead_ns is not None and at_ns - self.dead_ns >= OOM_LATE_NS):
            return self.grown
        if self.dead_ns is None or not self.kills:
            self.kills.append((at_ns, count))
        while self.dead_ns is None and at_ns - self.kills[0][0] > OOM_WINDOW_NS:
            self.kills.popleft()
        growth = max(0, count - self.kills[0][1])
        self.grown = growth if self.dead_ns is None else max(growth, self.grown or 0)
        return self.grown
