"""Quantiles of durations."""

from __future__ import annotations

import msgspec


class Quantiles(msgspec.Struct, kw_only=True):
    """Quantiles of a duration; null while there is none. They are at most 2.2 % off."""

    p50: float | None = None
    """Median."""
    p90: float | None = None
    """90th percentile."""
    p99: float | None = None
    """99th percentile."""
    count: int = 0
    """Number of durations."""
