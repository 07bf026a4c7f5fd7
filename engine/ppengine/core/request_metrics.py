"""Histograms of all requests since the start of the core, with the bucket edges that vLLM's dashboards read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from ppengine.core.scheduler.request import Request
from ppengine.protocol.metrics import HistogramCounts

_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_BETWEEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_WHOLE = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_FINE = tuple(round(mantissa * 10.0**power, 6) for power in range(-4, 1) for mantissa in (1, 1.5, 2, 3, 5, 7))
"""From 0.1 ms to 7 s: times between tokens of a fast engine lie in the first two buckets of the others."""
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def length_edges(most: int) -> list[float]:
    """Return 1, 2, 5, 10, ... up to `most`."""
    edges = [float(digit * 10**power) for power in range(8) for digit in (1, 2, 5)]
    return [edge for edge in edges if edge <= most] or [1.0]


class BucketCounts:
    """Counts of values by bucket; an edge belongs to the bucket below it, as Prometheus has it."""

    def __init__(self, edges: Iterable[float]) -> None:
        self._edges = [float(edge) for edge in edges]
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value that was seen `count` times."""
        self._counts[bisect_left(self._edges, value)] += count
        self._sum += value * count

    def wire(self) -> HistogramCounts:
        """Return the counts of this moment."""
        return HistogramCounts(self._edges, list(self._counts), self._sum)


class RequestMetrics:
    """Counts first tokens, gaps, steps and ends."""

    def __init__(self, max_model_len: int) -> None:
        lengths = length_edges(max_model_len)
        edges: dict[str, Sequence[float]] = {
            "first_token": _FIRST, "between_tokens": _BETWEEN, "between_tokens_fine": _FINE, "prepare": _FIRST,
            "queue": _WHOLE, "whole": _WHOLE, "prefill": _WHOLE, "decode": _WHOLE, "inference": _WHOLE,
            "per_token": _BETWEEN, "prompt_tokens": lengths, "output_tokens": lengths, "max_output_tokens": lengths,
            "computed_prompt_tokens": lengths, "step_tokens": _STEP_TOKENS, "lookup": _FIRST,
        }  # fmt: skip
        self.histograms = {name: BucketCounts(each) for name, each in edges.items()}
        self.finished: Counter[str] = Counter()
        self.constrained = 0
        """Those of them whose output followed a grammar."""

    def add(self, name: str, value: float, count: int = 1) -> None:
        """Count a value in one histogram."""
        self.histograms[name].add(value, count)

    def gap(self, seconds: float, count: int) -> None:
        """Count a time between two tokens of `count` requests."""
        self.add("between_tokens", seconds, count)
        self.add("between_tokens_fine", seconds, count)

    def ended(self, request: Request, reason: str, now: float) -> None:
        """Count a request that has ended."""
        self.finished[reason] += 1
        self.constrained += request.constrained
        outputs = len(request.output_ids)
        self.add("whole", now - request.arrival_time)
        self.add("prepare", request.queued_time - request.arrival_time)
        self.add("prompt_tokens", request.num_prompt)
        self.add("output_tokens", outputs)
        self.add("max_output_tokens", request.max_tokens)
        admitted, first = request.admitted_time, request.first_token_time
        if admitted is not None:
            self.add("queue", admitted - request.queued_time)
            self.add("inference", now - admitted)
        if admitted is not None and first is not None:
            self.add("prefill", first - admitted)
            self.add("decode", now - first)
            self.add("computed_prompt_tokens", max(0, request.num_prompt - request.num_cached))
        if first is not None and outputs > 1:
            self.add("per_token", (now - first) / (outputs - 1))
