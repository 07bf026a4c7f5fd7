"""Constants of the weighted sum, for all of its forms."""

from __future__ import annotations

MARK = -(2**63)
"""Highest bit of an int64, set in every sum: no sum is 0."""
LOW = 2**63 - 1
"""The other bits."""
GOLDEN = -7046029254386353131
"""2**64 over the golden ratio, odd, as an int64: it spreads places over all bits."""
