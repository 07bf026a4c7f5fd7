"""Times between the tokens of one request, in buckets 4.4 % wide: bounded memory, and quantiles at most 2.2 % off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_PER_OCTAVE = 16
_LEAST, _MOST = -20 * _PER_OCTAVE, 20 * _PER_OCTAVE
"""First and last bucket: a microsecond, twelve days."""
_FRESH_S = 1.0
"""Seconds for which quantiles are not computed again: reports ask for them ten times a second."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration."""
    bucket = math.floor(math.log2(seconds) * _PER_OCTAVE) if seconds > 0 else _LEAST
    return max(_LEAST, min(bucket, _MOST))


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


class TokenGaps:
    """Counts of the gaps of one request. `last`: time of its newest token, in seconds of the clock."""

    __slots__ = ("_at", "_known", "counts", "last")

    def __init__(self, last: float) -> None:
        self.last = last
        self.counts: dict[int, int] = {}
        """Gaps by bucket: as many keys as there are different gaps, in practice tens, at most 641."""
        self._known: tuple[float, float] | None = None
        self._at = 0.0

    def quantiles_ms(self, now: float) -> tuple[float, float] | None:
        """Return median and 99th percentile, those of a second ago at most; None before the second token."""
        if not self.counts:
            return None
        if self._known is None or now - self._at >= _FRESH_S:
            median, high = quantiles_of(self.counts, (0.5, 0.99))
            self._known, self._at = (median * 1e3, high * 1e3), now
        return self._known

    def final_ms(self) -> tuple[float, float] | None:
        """Return median and 99th percentile of all tokens so far."""
        return self.quantiles_ms(math.inf)
