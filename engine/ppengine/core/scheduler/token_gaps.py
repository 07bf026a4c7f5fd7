"""Times between the tokens of one request, in buckets 4.4 % wide: bounded memory, and quantiles at most 2.2 % off."""

from __future__ import annotations

import math
from itertools import cycle

from ppengine.common.durations import quantiles_of

_FRESH_S = cycle((0.5, 0.9, 0.6, 1.0, 0.7, 0.8))
"""Seconds for which quantiles are not computed again: reports ask for them ten times a second.

They differ, or all requests that began together would have theirs made in one report, for which a turn waits.
"""


class TokenGaps:
    """Counts of the gaps of one request. `last`: time of its newest token, in seconds of the clock."""

    __slots__ = ("_at", "_fresh_s", "_known", "counts", "last")

    def __init__(self, last: float) -> None:
        self.last = last
        self.counts: dict[int, int] = {}
        """Gaps by bucket: as many keys as there are different gaps, in practice tens, at most 641."""
        self._known: tuple[float, float] | None = None
        self._at, self._fresh_s = 0.0, next(_FRESH_S)

    def quantiles_ms(self, now: float) -> tuple[float, float] | None:
        """Return median and 99th percentile, those of a second ago at most; None before the second token."""
        if not self.counts:
            return None
        if self._known is None or now - self._at >= self._fresh_s:
            median, high = quantiles_of(self.counts, (0.5, 0.99))
            self._known, self._at = (median * 1e3, high * 1e3), now
        return self._known

    def final_ms(self) -> tuple[float, float] | None:
        """Return median and 99th percentile of all tokens so far."""
        return self.quantiles_ms(math.inf)
