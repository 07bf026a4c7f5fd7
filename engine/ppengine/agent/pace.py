"""Is a stage slower than it was? Own compute time of its steps beside what like steps took it before.

Only a stage's own past counts: stages differ in layers and devices. Steps are alike when tokens and context fall into
the same class; of each second in which the stage was well, the mean time of every class is remembered. A second is
judged by the sum over its steps, of what they took and of what their classes have taken. What is remembered of the
host, waits for a core and how busy others were beside it, is of the same seconds: a class known from when it was quiet
says so.
"""

from __future__ import annotations

import statistics
from collections import deque
from math import exp2, log2
from typing import NamedTuple

from ppengine.diagnosis.budgets import HELD_BACK
from ppengine.protocol.reports import PaceSample

SLOW_RATIO = 1.3
WINDOW_NS = 1_000_000_000
CLASSES = 3
"""Classes of work in a factor of two: within one, work differs by 1.26 at most, which is less than `SLOW_RATIO`."""
LEAST_STEPS, LEAST_SECONDS = 10, 2
"""So many steps make a class known, and so many seconds the stage."""
COVERED = 0.5
"""The least share of a second's steps that must be of known classes."""
MOST = 15
"""Of so many newest seconds the means of a class are kept."""
_SMALL_CONTEXT = 256
"""Of a token: below this its context costs little beside its weights."""
_APART_NS = 3_000_000_000
"""Two slow moments so far apart, with nothing between them that could be judged, are not one long slowness."""
_UNJUDGED = 10
"""After so many seconds of work without like, what was slow is forgotten."""

Class = tuple[int, int]
"""Of tokens and of context, each a logarithm."""


class Work(NamedTuple):
    """Steps of one class in one second."""

    steps: int
    ms: float
    waits: float = 0.0
    """In that second: without a core, the quota's part excluded, for each ms of own work."""
    beside: float = 0.0
    """In that second: the share of it in which others worked on each other processor, on an average."""


class Host(NamedTuple):
    """What a second saw of the machine: ms without a core, share that others were busy beside, that of the quota."""

    waited_ms: float
    beside: float
    throttled: float | None


_NO_WORK = Work(0, 0.0)


class Pace:
    """Watches one stage. `add` every step, `close` as soon as a second is over."""

    def __init__(self) -> None:
        self._known: dict[Class, deque[Work]] = {}
        self._seconds = 0
        """So many were learned from."""
        self._second: dict[Class, list[float]] = {}
        """Steps and milliseconds; changed in place, for hundreds are added a second."""
        self._since_ns = 0
        self._waited_ns: int | None = None
        self._throttled_us: int | None = None
        self._beside_ns: int | None = None
        self._slow_ns = 0
        """The seconds that were judged to be slow, with none between them that was well: a gap is not counted."""
        self._slow_until_ns = 0
        self._unjudged = 0
        self._newest: tuple[int, PaceSample] | None = None

    def add(self, tokens: int, context: int, own_ms: float) -> None:
        """Take one step that has ended: its work, and its own compute time, waits and memory work excluded."""
        kind = int(CLASSES * log2(tokens)), int(CLASSES * log2(context + _SMALL_CONTEXT * tokens))
        sums = self._second.get(kind)
        if sums is None:
            self._second[kind] = [1, own_ms]
        else:
            sums[0] += 1
            sums[1] += own_ms

    def due(self, now_ns: int) -> bool:
        """Whether the second is over."""
        return now_ns - self._since_ns >= WINDOW_NS

    def close(
        self,
        now_ns: int,
        waited_ns: int | None = None,
        throttled_us: int | None = None,
        beside_ns: int | None = None,
    ) -> None:
        """End the second if it is over. So far: `waited_ns` all threads without a core, `throttled_us` by the quota.

        `beside_ns`: what others worked on each of the other processors (see `neighbours`).
        """
        if not self.due(now_ns):
            return
        seconds, begun = (now_ns - self._since_ns) / 1e9, self._since_ns
        waited_ms = _grown(self._waited_ns, waited_ns) / 1e6
        throttled_ms = _grown(self._throttled_us, throttled_us) / 1e3
        beside = min(1.0, _grown(self._beside_ns, beside_ns) / 1e9 / seconds)
        share = None if throttled_us is None else min(1.0, throttled_ms / seconds / 1e3)
        second = {kind: Work(int(steps), ms) for kind, (steps, ms) in self._second.items()}
        self._second = {}
        if second and begun:
            # A core that others have is not this stage's fault; a quota of its own is.
            self._judge(second, Host(max(0.0, waited_ms - throttled_ms), beside, share), begun, now_ns)
        self._since_ns, self._waited_ns, self._throttled_us = now_ns, waited_ns, throttled_us
        self._beside_ns = beside_ns

    def sample(self, now_ns: int) -> PaceSample | None:
        """Return the newest judgement; None while there is nothing to compare with."""
        if self._newest is None:
            return None
        at_ns, found = self._newest
        return PaceSample(
            step_ms=found.step_ms,
            baseline_ms=found.baseline_ms,
            slow_ms=found.slow_ms,
            throttled=found.throttled,
            age_ms=round((now_ns - at_ns) / 1e6, 2),
        )

    def _judge(self, second: dict[Class, Work], host: Host, begun_ns: int, now_ns: int) -> None:
        took, usual = self._compare(second)
        if not took.steps:
            self._unjudged += 1
            if not self._slow_ns or self._unjudged > _UNJUDGED:
                self._slow_ns, self._newest = 0, None
                self._learn(second, host)
            return
        slow = took.ms >= SLOW_RATIO * usual.ms
        held_back = (host.throttled or 0.0) > HELD_BACK
        if slow and not held_back and _explained_ms(usual, host) > (took.ms - usual.ms) / 2:
            return  # The host may explain it: such a second tells nothing.
        self._unjudged = 0
        if not slow:
            self._slow_ns = 0
            self._learn(second, host)
        else:
            if self._slow_ns < _APART_NS < begun_ns - self._slow_until_ns:
                self._slow_ns = 0
            # Steps that are longer than a second end in every other one only. A hang is one step, and a moment.
            self._slow_ns += min(max(now_ns - begun_ns, int(took.ms * 1e6)), 2 * WINDOW_NS)
            self._slow_until_ns = now_ns
        found = PaceSample(
            step_ms=round(took.ms / took.steps, 3),
            baseline_ms=round(usual.ms / took.steps, 3),
            slow_ms=round(self._slow_ns / 1e6, 1),
            throttled=host.throttled,
        )
        self._newest = now_ns, found

    def _compare(self, second: dict[Class, Work]) -> tuple[Work, Work]:
        """Return, of the steps that can be compared, what they took and what like ones did before.

        No steps where these are too few.
        """
        if self._seconds < LEAST_SECONDS:
            return _NO_WORK, _NO_WORK
        compared, took, expected, waited, beside = 0, 0.0, 0.0, 0.0, 0.0
        for kind, work in second.items():
            usual = self._usual(kind)
            if usual is not None:
                expects = work.steps * usual.ms
                compared, took, expected = compared + work.steps, took + work.ms, expected + expects
                waited, beside = waited + expects * usual.waits, beside + expects * usual.beside
        if expected <= 0 or compared < COVERED * sum(work.steps for work in second.values()):
            return _NO_WORK, _NO_WORK
        return Work(compared, took), Work(compared, expected, waited / expected, beside / expected)

    def _usual(self, kind: Class) -> Work | None:
        """Return what a step of a class takes; None where that is not known."""
        if (known := self._typical(kind)) is not None or not self._slow_ns:
            return known
        # Contexts grow on. What is slow is not learned from, so work that grew is compared with less work: made
        # as much longer as the work is more, which no cost of it exceeds.
        tokens, context = kind
        for less in range(1, CLASSES + 1):
            if (known := self._typical((tokens, context - less))) is not None:
                return known._replace(ms=known.ms * exp2((less + 1) / CLASSES))
        return None

    def _typical(self, kind: Class) -> Work | None:
        """Return one step of a class as the middle one of its seconds had it."""
        works = self._known.get(kind, ())
        if sum(work.steps for work in works) < LEAST_STEPS:
            return None
        return Work(
            1,
            statistics.median(work.ms / work.steps for work in works),
            statistics.median(work.waits for work in works),
            statistics.median(work.beside for work in works),
        )

    def _learn(self, second: dict[Class, Work], host: Host) -> None:
        waits = host.waited_ms / max(1e-3, sum(work.ms for work in second.values()))
        for kind, work in second.items():
            seen = work._replace(waits=waits, beside=host.beside)
            self._known.setdefault(kind, deque(maxlen=MOST)).append(seen)
        self._seconds += 1


def _explained_ms(usual: Work, host: Host) -> float:
    """Return how much longer work may have taken because of the host, beside when it was learned.

    A wait is time lost. While others work on another thread of the core, or empty its caches, work takes up to twice as
    long, as was measured: what is much slower than that is so for another reason, whoever is beside it.
    """
    waited_ms = max(0.0, host.waited_ms - usual.waits * usual.ms)
    return waited_ms + max(0.0, host.beside - usual.beside) * usual.ms


def _grown(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else max(0, now - before)
