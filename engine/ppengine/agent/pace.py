"""Is a stage slower than it was? Compares the own compute time of its steps with that of similar earlier steps.

Only a stage's own past counts: stages differ in layers and devices. Steps are similar if tokens and context fall into
the same class. Every healthy second keeps the mean time of each of its classes. A second is judged by the sum over
its steps: their times beside the usual times of their classes.

The same seconds keep the load of the host: waits for a core, and how busy others were beside the stage. So a class that
was learned on an idle host says so.

Slowness may come in fits: a single healthy second between two of at least `FIT_RATIO` does not end it.
"""

from __future__ import annotations

import statistics
from collections import deque
from math import exp2, log2
from typing import NamedTuple

from ppengine.diagnosis.budgets import HELD_BACK
from ppengine.protocol.stage_samples import PaceSample

SLOW_RATIO = 1.3
FIT_RATIO = 3.0
WINDOW_NS = 1_000_000_000
CLASSES = 3
"""Classes of work per factor of two: within one, work differs by at most 1.26, less than `SLOW_RATIO`."""
LEAST_STEPS, LEAST_SECONDS = 10, 2
"""Least number of steps of a known class, and of seconds of a known stage."""
BEYOND_RATIO = 3.0
"""Time on a core, beside the usual time, that no host explains: others make work twice as long at most."""
CROWDED = 0.5
"""Least time without a core, per own work, of a second that proves nothing: its caches are cold, too."""
COVERED = 0.5
"""Least share of a second's steps that must be of known classes."""
MOST = 15
"""Number of newest seconds of which the means of a class are kept."""
_SMALL_CONTEXT = 256
"""Context of a token below which it costs little beside the weights."""
_APART_NS = 3_000_000_000
"""Nanoseconds without a judgement after which two slow moments are no longer one slowness."""
_LOOKS_BACK = 30
"""Seconds of the host's totals that are kept: a step lasts hardly longer."""
_UNJUDGED = 10
"""Seconds of work of unknown classes after which a slowness is forgotten."""

Class = tuple[int, int]
"""Class of the tokens and of the context, each a logarithm."""


class Work(NamedTuple):
    """Steps of one class in one second."""

    steps: int
    ms: float
    waits: float = 0.0
    """Time without a core in that second, per ms of own work, without the quota's part."""
    beside: float = 0.0
    """Share of that second in which others worked, averaged over the other processors."""


class Totals(NamedTuple):
    """Waits and load so far; None where the host does not say."""

    waited_ns: int | None = None
    """Time of all threads without a core."""
    throttled_us: int | None = None
    """Time in which the quota held the process back."""
    beside_ns: int | None = None
    """Work of others, see `HostLoad`."""
    ran_ns: int | None = None
    """Time of the main thread on a core."""


class Host(NamedTuple):
    """The machine in one second, or for as long as its steps took.

    It has the ms without a core, the busy share of others beside the stage, the throttled share, and the ms of the
    main thread on a core.
    """

    waited_ms: float
    beside: float
    throttled: float | None
    ran_ms: float


class _Judged(NamedTuple):
    """A slow second: when it ended, and its time beside the usual one."""

    end_ns: int
    ratio: float


_NO_WORK = Work(0, 0.0)


class Pace:
    """Watches one stage. `add` every step, `close` as soon as a second is over."""

    def __init__(self) -> None:
        self._known: dict[Class, deque[Work]] = {}
        self._seconds = 0
        """Number of seconds that were learned from."""
        self._second: dict[Class, list[float]] = {}
        """Steps and milliseconds by class; changed in place, because hundreds are added a second."""
        self._since_ns = 0
        self._totals: deque[tuple[int, Totals]] = deque(maxlen=_LOOKS_BACK)
        """Totals at the ends of the newest seconds."""
        self._slow_ns = 0
        """Nanoseconds judged slow, with no more than fits in between; a gap is not counted."""
        self._slow_until = _Judged(0, 0.0)
        self._paused_ns = 0
        """Healthy nanoseconds since the newest slow second of a fit, which count if another one follows."""
        self._unjudged = 0
        self._newest: tuple[int, PaceSample] | None = None

    def add(self, tokens: int, context: int, own_ms: float) -> None:
        """Add a finished step: its work and its own compute time, without waits and memory work."""
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

    def close(self, now_ns: int, totals: Totals) -> None:
        """End the second if it is over."""
        if not self.due(now_ns):
            return
        begun, self._since_ns = self._since_ns, now_ns
        second = {kind: Work(int(steps), ms) for kind, (steps, ms) in self._second.items()}
        self._second = {}
        if second and self._totals:
            self._judge(second, self._host(now_ns, totals, sum(work.ms for work in second.values())), begun, now_ns)
        self._totals.append((now_ns, totals))

    def _host(self, now_ns: int, now: Totals, took_ms: float) -> Host:
        """Return the host's part in `took_ms`, a second at least: a step of seconds has waited in all of them."""
        begun_ns = now_ns - took_ms * 1e6
        at_ns, before = next((each for each in reversed(self._totals) if each[0] <= begun_ns), self._totals[0])
        seconds = (now_ns - at_ns) / 1e9
        waited_ms = _grown(before.waited_ns, now.waited_ns) / 1e6
        throttled_ms = _grown(before.throttled_us, now.throttled_us) / 1e3
        beside = min(1.0, _grown(before.beside_ns, now.beside_ns) / 1e9 / seconds)
        share = None if now.throttled_us is None else min(1.0, throttled_ms / seconds / 1e3)
        # A core taken by others is not this stage's fault; a quota of its own is.
        ran_ms = _grown(before.ran_ns, now.ran_ns) / 1e6
        return Host(max(0.0, waited_ms - throttled_ms), beside, share, ran_ms)

    def sample(self, now_ns: int) -> PaceSample | None:
        """Return the newest judgement; None while nothing similar is known."""
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
        crowded = host.waited_ms > CROWDED * sum(work.ms for work in second.values())
        beyond = min(took.ms, host.ran_ms) >= BEYOND_RATIO * usual.ms
        explained = crowded or _explained_ms(usual, host) > (took.ms - usual.ms) / 2
        if slow and explained and not (held_back or beyond):
            return  # The host may explain it: such a second proves nothing.
        self._unjudged = 0
        if not slow:
            self._learn(second, host)
            if self._slow_ns and not self._paused_ns and self._slow_until.ratio >= FIT_RATIO:
                self._paused_ns = now_ns - begun_ns
                return  # It may be the pause of a fit; what was seen before it counts on.
            self._slow_ns = self._paused_ns = 0
        else:
            ratio = took.ms / usual.ms
            if self._paused_ns and ratio < FIT_RATIO:
                self._slow_ns = self._paused_ns = 0
            if self._slow_ns < _APART_NS < begun_ns - self._slow_until.end_ns:
                self._slow_ns = self._paused_ns = 0
            # Steps that are longer than a second end in every other one only. A hang is one step, and a moment.
            self._slow_ns += self._paused_ns + min(max(now_ns - begun_ns, int(took.ms * 1e6)), 2 * WINDOW_NS)
            self._slow_until, self._paused_ns = _Judged(now_ns, ratio), 0
        found = PaceSample(
            step_ms=round(took.ms / took.steps, 3),
            baseline_ms=round(usual.ms / took.steps, 3),
            slow_ms=round(self._slow_ns / 1e6, 1),
            throttled=host.throttled,
        )
        self._newest = now_ns, found

    def _compare(self, second: dict[Class, Work]) -> tuple[Work, Work]:
        """Return the time of the steps that can be compared, and the usual time of their classes.

        Both have no steps if too few can be compared.
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
        """Return the usual time of one step of a class; None if unknown."""
        if (known := self._typical(kind)) is not None or not self._slow_ns:
            return known
        # Contexts keep growing, and slow seconds are not learned from. So larger work is compared with smaller work,
        # lengthened in proportion, which no cost of it exceeds.
        tokens, context = kind
        for less in range(1, CLASSES + 1):
            if (known := self._typical((tokens, context - less))) is not None:
                return known._replace(ms=known.ms * exp2((less + 1) / CLASSES))
        return None

    def _typical(self, kind: Class) -> Work | None:
        """Return one step of a class, the median of its seconds."""
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
    """Return how much longer the work may have taken because of the host than when it was learned.

    A wait is time lost. Others that work on another thread of the core, or empty its caches, make work up to twice as
    long (measured). Work that is slower still has another reason.
    """
    waited_ms = max(0.0, host.waited_ms - usual.waits * usual.ms)
    return waited_ms + max(0.0, host.beside - usual.beside) * usual.ms


def _grown(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else max(0, now - before)
