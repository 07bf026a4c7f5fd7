"""Is a stage slower than it was? Own compute time of its steps beside what like steps took it before.

Only a stage's own past counts: stages differ in layers and devices. One second makes one point (tokens and context of
a step, own time of a step); points of like work, taken while the stage was well, are the baseline.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from ppengine.protocol.reports import PaceSample

SLOW_RATIO = 1.3
WINDOW_NS = 1_000_000_000
LIKE, LIKE_WHILE_SLOW = 1.25, 2.0
"""Work is alike when tokens and context of a step differ by no more than this factor."""
LEAST, MOST = 5, 15
"""So many points of like work are needed; of more, the nearest count."""
REMEMBERED = 600
_SMALL_CONTEXT = 256
"""Of a token: below this its context costs little beside its weights."""
_UNJUDGED = 10
"""After so many seconds of work without like, what was slow is forgotten."""


class Point(NamedTuple):
    """Means of one second: of a step."""

    tokens: float
    context: float
    ms: float
    waited_ms: float
    """Without a core, the quota's part excluded."""


class Pace:
    """Watches one stage. `add` every step, `close` about every look."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=REMEMBERED)
        self._since_ns = 0
        self._count = self._tokens = self._context = 0
        self._ms = 0.0
        self._waited_ns: int | None = None
        self._throttled_us: int | None = None
        self._slow_since_ns: int | None = None
        self._unjudged = 0
        self._newest: tuple[int, PaceSample] | None = None

    def add(self, tokens: int, context: int, own_ms: float) -> None:
        """Take one step that has ended: its work, and its own compute time, waits and memory work excluded."""
        self._count += 1
        self._tokens += tokens
        self._context += context
        self._ms += own_ms

    def close(self, now_ns: int, waited_ns: int | None = None, throttled_us: int | None = None) -> None:
        """End the second if it is over. `waited_ns`: so far without a core; `throttled_us`: so far by the quota."""
        if now_ns - self._since_ns < WINDOW_NS:
            return
        seconds, begun = (now_ns - self._since_ns) / 1e9, self._since_ns
        waited_ms = _grown(self._waited_ns, waited_ns) / 1e6
        throttled_ms = _grown(self._throttled_us, throttled_us) / 1e3
        share = None if throttled_us is None else min(1.0, throttled_ms / seconds / 1e3)
        if self._count and begun:
            # A core that others have is not this stage's fault; a quota of its own is.
            others_ms = max(0.0, waited_ms - throttled_ms)
            sums = (self._tokens, self._context, self._ms, others_ms)
            self._judge(Point(*(value / self._count for value in sums)), begun, now_ns, share)
        self._since_ns, self._waited_ns, self._throttled_us = now_ns, waited_ns, throttled_us
        self._count = self._tokens = self._context = 0
        self._ms = 0.0

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

    def _judge(self, point: Point, begun_ns: int, now_ns: int, throttled: float | None) -> None:
        like = self._like(point)
        if not like and self._slow_since_ns is not None:
            # Contexts grow on. What is slow is not learned from, so work that grew is compared with less work: made
            # as much longer as the work is more, which no cost of it exceeds.
            like = [old._replace(ms=old.ms * _distance(old, point)) for old in self._like(point, LIKE_WHILE_SLOW)]
        if not like:
            self._unjudged += 1
            if self._slow_since_ns is None or self._unjudged > _UNJUDGED:
                self._slow_since_ns = self._newest = None
                self._points.append(point)
            return
        baseline = statistics.median(old.ms for old in like)
        slow = point.ms >= SLOW_RATIO * baseline
        if slow and point.waited_ms - statistics.median(old.waited_ms for old in like) > (point.ms - baseline) / 2:
            return  # The host may explain it: such a second tells nothing.
        self._unjudged = 0
        if not slow:
            self._slow_since_ns = None
            self._points.append(point)
        elif self._slow_since_ns is None:
            self._slow_since_ns = begun_ns
        slow_ms = 0.0 if self._slow_since_ns is None else (now_ns - self._slow_since_ns) / 1e6
        found = PaceSample(
            step_ms=round(point.ms, 3), baseline_ms=round(baseline, 3), slow_ms=round(slow_ms, 1), throttled=throttled
        )
        self._newest = now_ns, found

    def _like(self, point: Point, limit: float = LIKE) -> list[Point]:
        """Return the nearest points of like work; none if there are too few."""
        like = sorted((distance, old) for old in self._points if (distance := _distance(old, point)) <= limit)
        return [old for _, old in like[:MOST]] if len(like) >= LEAST else []


def _distance(one: Point, other: Point) -> float:
    """Return by which factor the work of two points differs, the larger of tokens and context; 1: not at all."""
    contexts = (point.context + _SMALL_CONTEXT * point.tokens for point in (one, other))
    return max(_factor(one.tokens, other.tokens), _factor(*contexts))


def _factor(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return high / low if low > 0 else 1.0 if high <= 0 else float("inf")


def _grown(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else max(0, now - before)
