"""Pauses between tries that fail."""

from __future__ import annotations

import math

_DOUBLINGS = 32
"""Doublings that bring any first pause above any most: more would exceed a float."""


def pause_s(first_s: float, most_s: float, failures: int) -> float:
    """Return the seconds to wait after `failures` of them, at least 1: `first_s`, doubled by each further one."""
    return min(most_s, math.ldexp(first_s, min(failures - 1, _DOUBLINGS)))
