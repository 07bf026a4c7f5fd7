"""Quantiles of queue time, time to the first token and time between tokens, over the last five minutes.

Each figure is a histogram of buckets 4.4 % wide, in slices of ten seconds: bounded memory, and a middle of a bucket
that is at most 2.2 % off.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from ppengine.core.scheduler import Retirement
from ppengine.core.scheduler.request import Request
from ppengine.protocol.snapshot import Latency, Quantiles

SLICE_S, SLICES = 10.0, 30
"""Seconds of a slice, and slices that are kept."""
_PER_OCTAVE = 16
_LEAST, _MOST = -20 * _PER_OCTAVE, 20 * _PER_OCTAVE
"""First and last bucket: a microsecond, twelve days."""


GAPS, PICK_S, WATCHED_STEPS = 4, 0.005, 64
"""Gaps that are measured from one step, least seconds between two such steps, and steps with open gaps."""


class Histogram:
    """Counts of durations in the last five minutes."""

    def __init__(self) -> None:
        self._slices: deque[tuple[float, Counter[int]]] = deque()
        """Begin and counts by bucket, the newest last."""
        self._total: Counter[int] = Counter()

    def add(self, seconds: float, count: int, now: float) -> None:
        """Count a duration that was seen `count` times."""
        if not self._slices or now - self._slices[-1][0] >= SLICE_S:
            self._expire(now)
            self._slices.append((now, Counter()))
        bucket = math.floor(math.log2(seconds) * _PER_OCTAVE) if seconds > 0 else _LEAST
        bucket = max(_LEAST, min(bucket, _MOST))
        self._slices[-1][1][bucket] += count
        self._total[bucket] += count

    def quantiles(self, now: float, scale: float = 1.0) -> Quantiles:
        """Return the quantiles, times `scale`."""
        self._expire(now)
        count = self._total.total()
        if not count:
            return Quantiles()
        ranks, values = [0.5 * count, 0.9 * count, 0.99 * count], list[float]()
        below = 0
        for bucket in sorted(self._total):
            below += self._total[bucket]
            while len(values) < len(ranks) and below >= ranks[len(values)]:
                values.append(2 ** ((bucket + 0.5) / _PER_OCTAVE) * scale)
        return Quantiles(p50=values[0], p90=values[1], p99=values[2], count=count)

    def _expire(self, now: float) -> None:
        """Drop the slices that ended five minutes ago."""
        while self._slices and now - self._slices[0][0] >= SLICE_S * SLICES:
            _, counts = self._slices.popleft()
            self._total -= counts


@dataclass(slots=True)
class _Watched:
    """Requests that got a token at one moment, each with its number of tokens then."""

    at: float
    requests: list[tuple[Request, int]]


class Latencies:
    """Takes the tokens of each retired step.

    Its cost is bounded: of many tokens a step, or many steps a second, some gaps are measured.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue, self._first, self._between = Histogram(), Histogram(), Histogram()
        self._picked = -PICK_S
        """Time of the newest pick of gaps to measure."""
        self._watched: deque[_Watched] = deque(maxlen=WATCHED_STEPS)

    def retired(self, retirement: Retirement) -> None:
        """Count the first tokens and the gaps of a step."""
        now = self._clock()
        for request in retirement.began:
            self._first.add(now - request.arrival_time, 1, now)
            if request.admitted_time is not None:
                self._queue.add(request.admitted_time - request.arrival_time, 1, now)
        if self._watched:
            self._measure(now)
        tokens = retirement.tokens
        if not tokens or now - self._picked < PICK_S:
            return
        self._picked = now
        # Another place in each step, so that no request is always left out.
        start, stride = retirement.number % len(tokens), -(-len(tokens) // GAPS)
        some = [entry[0] for entry in tokens[start % stride :: stride]]
        self._watched.append(_Watched(now, [(request, len(request.output_ids)) for request in some]))

    def info(self) -> Latency:
        """Return the quantiles of this moment."""
        now = self._clock()
        return Latency(
            queue_s=self._queue.quantiles(now), ttft_s=self._first.quantiles(now),
            itl_ms=self._between.quantiles(now, 1e3), window_s=SLICE_S * SLICES,
        )  # fmt: skip

    def _measure(self, now: float) -> None:
        """Count the gaps that end now, and forget the requests that ended without another token."""
        for watched in self._watched:
            left = [pair for pair in watched.requests if len(pair[0].output_ids) == pair[1]]
            if ended := len(watched.requests) - len(left):
                self._between.add(now - watched.at, ended, now)
                left = [pair for pair in left if not pair[0].finished]
            watched.requests = left
        while self._watched and not self._watched[0].requests:
            self._watched.popleft()


def queue_s(request: Request) -> float | None:
    """Return the seconds until a request first got blocks; None: not yet."""
    return None if request.admitted_time is None else request.admitted_time - request.arrival_time


def ttft_s(request: Request) -> float | None:
    """Return the seconds until the first token; None: not yet."""
    return None if request.first_token_time is None else request.first_token_time - request.arrival_time


def itl_ms(request: Request, now: float) -> float | None:
    """Return the mean milliseconds between the tokens up to `now`; None before the second."""
    first, outputs = request.first_token_time, len(request.output_ids)
    return None if first is None or outputs < 2 else (now - first) / (outputs - 1) * 1e3
