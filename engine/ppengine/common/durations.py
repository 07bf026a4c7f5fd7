"""Durations in buckets 4.4 % wide: bounded memory, and quantiles that are at most 2.2 % off."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log2

from ppengine.protocol.quantiles import Quantiles

_PER_OCTAVE = 16
_LEAST, _MOST = -20 * _PER_OCTAVE, 20 * _PER_OCTAVE
"""First and last bucket: a microsecond, twelve days."""
SLICE_S, SLICES = 10.0, 30
"""Seconds of a slice, and slices that are kept."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration."""
    bucket = floor(log2(seconds) * _PER_OCTAVE) if seconds > 0 else _LEAST
    # Comparisons, as `min` and `max` would take as long as the logarithm: each token is counted.
    return bucket if _LEAST <= bucket <= _MOST else _LEAST if bucket < _LEAST else _MOST


def quantiles_of(
    counts: Mapping[int, int], shares: Sequence[float], least: float = 0.0, most: float = math.inf
) -> list[float]:
    """Return the quantiles of counts by bucket, in seconds. `shares` are in order; there must be a count.

    `least`, `most`: the smallest and the largest duration, where they are known. The middle of a bucket may be
    outside of them.
    """
    total, below, values = sum(counts.values()), 0, list[float]()
    for bucket in sorted(counts):
        below += counts[bucket]
        while len(values) < len(shares) and below >= shares[len(values)] * total:
            values.append(max(least, min(2 ** ((bucket + 0.5) / _PER_OCTAVE), most)))
    return values


@dataclass(slots=True)
class _Slice:
    """Counts of ten seconds by bucket, with the smallest and the largest duration in seconds."""

    begin: float
    least: float
    most: float
    counts: Counter[int] = field(default_factory=Counter)


class Histogram:
    """Counts of durations in the last five minutes."""

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque()
        """The newest last."""

    def add(self, seconds: float, count: int, now: float) -> None:
        """Count a duration that was seen `count` times."""
        newest = self._slices[-1] if self._slices else None
        if newest is None or now - newest.begin >= SLICE_S:
            self._expire(now)
            newest = _Slice(now, seconds, seconds)
            self._slices.append(newest)
        if seconds < newest.least:
            newest.least = seconds
        elif seconds > newest.most:
            newest.most = seconds
        newest.counts[bucket_of(seconds)] += count

    def counts(self, now: float) -> dict[int, int]:
        """Return the counts by bucket."""
        return dict(self._total(now))

    def quantiles(self, now: float, scale: float = 1.0) -> Quantiles:
        """Return the quantiles, times `scale`."""
        total = self._total(now)
        count = total.total()
        if not count:
            return Quantiles()
        least, most = min(each.least for each in self._slices), max(each.most for each in self._slices)
        p50, p90, p99 = (value * scale for value in quantiles_of(total, (0.5, 0.9, 0.99), least, most))
        return Quantiles(p50=p50, p90=p90, p99=p99, count=count)

    def _total(self, now: float) -> Counter[int]:
        """Return the sum of the slices. It is made when it is wanted: each token is counted."""
        self._expire(now)
        total: Counter[int] = Counter()
        for each in self._slices:
            total.update(each.counts)
        return total

    def _expire(self, now: float) -> None:
        """Drop the slices that ended five minutes ago."""
        while self._slices and now - self._slices[0].begin >= SLICE_S * SLICES:
            self._slices.popleft()
