"""Times of the calls of the last minute."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
MOST = 2048
"""Calls kept; of a busy backend they are those of some seconds."""


class CallTimes:
    """Milliseconds of calls, the newest last."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, float]] = deque(maxlen=MOST)

    def note(self, now: float, ms: float) -> None:
        """Enter a call that ended at `now`."""
        self._calls.append((now, ms))

    def quantiles(self, now: float) -> tuple[float, float]:
        """Return p50 and p99; -1 for both without a call."""
        while self._calls and now - self._calls[0][0] > WINDOW_S:
            self._calls.popleft()
        times = sorted(ms for _, ms in self._calls)
        if not times:
            return -1.0, -1.0
        return times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
