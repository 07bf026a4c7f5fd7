"""Quantiles of the times of requests, and goodput, over five minutes.

Times are those before the queue, in it, to the first token, and between tokens. Those to the first token, and goodput,
count from the arrival of a request at the first process of the engine.

Each figure is a histogram of buckets 4.4 % wide, in slices of ten seconds: bounded memory, and a middle of a bucket
that is at most 2.2 % off, within the smallest and the largest duration.
"""

from __future__ import annotations

from collections.abc import Callable

from ppengine.common.durations import SLICE_S, SLICES, Histogram, bucket_of
from ppengine.common.profile_sections import SloConfig
from ppengine.core.request_metrics import RequestMetrics
from ppengine.core.scheduler import Retirement
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.token_gaps import TokenGaps
from ppengine.core.slo_window import SloWindow
from ppengine.protocol.snapshot import Latency


class Latencies:
    """Takes the tokens of each retired step: gaps of each request, and quantiles of all."""

    def __init__(self, clock: Callable[[], float], metrics: RequestMetrics, slo: SloConfig) -> None:
        self._clock, self._metrics = clock, metrics
        self.slo = SloWindow(slo)
        self._prepare, self._queue, self._first, self._between = Histogram(), Histogram(), Histogram(), Histogram()

    def retired(self, retirement: Retirement) -> None:
        """Count the first tokens and the gaps of a step."""
        now = self._clock()
        for request in retirement.began:
            self._first.add(now - request.arrival_time, 1, now)
            self._metrics.add("first_token", now - request.arrival_time)
            self._prepare.add(prepare_s(request), 1, now)
            if (queued := queue_s(request)) is not None:
                self._queue.add(queued, 1, now)
        # Most requests of a step had their last token in the same step: a gap is computed once for all of them.
        seen: dict[float, int] = {}
        last, bucket = now, bucket_of(0.0)
        for entry in retirement.tokens:
            gaps = entry[0].gaps
            if gaps is None:
                entry[0].gaps = TokenGaps(now)
                continue
            if gaps.last != last:
                last = gaps.last
                bucket = bucket_of(now - last)
            seen[last] = seen.get(last, 0) + 1
            counts = gaps.counts
            counts[bucket] = counts.get(bucket, 0) + 1
            gaps.last = now
        for last, count in seen.items():
            self._between.add(now - last, count, now)
            self._metrics.gap(now - last, count)
        if retirement.number:
            self._metrics.add("step_tokens", retirement.prompt_tokens + len(retirement.tokens))

    def ended(self, request: Request, reason: str, now: float) -> None:
        """Count the end of a request: it has met the objectives of the profile, or not."""
        self.slo.ended(reason, ttft_s(request), itl_ms(request, now), now)

    def info(self) -> Latency:
        """Return the quantiles of this moment."""
        now = self._clock()
        return Latency(
            prepare_s=self._prepare.quantiles(now), queue_s=self._queue.quantiles(now),
            ttft_s=self._first.quantiles(now), itl_ms=self._between.quantiles(now, 1e3), window_s=SLICE_S * SLICES,
            slo=self.slo.info(now),
        )  # fmt: skip


def prepare_s(request: Request) -> float:
    """Return the seconds from the arrival of a request to the queue: its text, its tokens, its grammar."""
    return request.queued_time - request.arrival_time


def queue_s(request: Request) -> float | None:
    """Return the seconds in the queue until a request first got blocks; None: not yet."""
    return None if request.admitted_time is None else request.admitted_time - request.queued_time


def ttft_s(request: Request) -> float | None:
    """Return the seconds from the arrival to the first token; None: not yet."""
    return None if request.first_token_time is None else request.first_token_time - request.arrival_time


def itl_ms(request: Request, now: float) -> float | None:
    """Return the mean milliseconds between the tokens up to `now`; None before the second."""
    first, outputs = request.first_token_time, len(request.output_ids)
    return None if first is None or outputs < 2 else (now - first) / (outputs - 1) * 1e3


def itl_quantiles_ms(request: Request, now: float) -> tuple[float | None, float | None]:
    """Return median and 99th percentile of the milliseconds between the tokens; None before the second.

    They are a second old at most while the request lives, and final after its end.
    """
    if request.gaps is None:
        return None, None
    known = request.gaps.final_ms() if request.finished else request.gaps.quantiles_ms(now)
    return known or (None, None)
