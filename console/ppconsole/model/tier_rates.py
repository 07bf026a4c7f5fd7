"""Bytes a second between host cache and devices, from the totals of several snapshots."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ppengine.protocol.snapshot import Snapshot

WINDOW_S = 2.0
_LEAST_S = 0.5


class HostRates(NamedTuple):
    """Bytes a second over about two seconds; None: not known yet."""

    in_s: float | None = None
    """To the devices."""
    out_s: float | None = None
    """From the devices."""


class HostMeter:
    """Keeps the totals of the last snapshots of one epoch."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._epoch = ""

    def note(self, snapshot: Snapshot) -> HostRates:
        """Enter a snapshot and return the rates. One of another epoch, or of an earlier moment, starts again."""
        tiers = snapshot.tiers
        if tiers is None:
            self._seen.clear()
            return HostRates()
        now = snapshot.sampled_at, tiers.in_bytes_total, tiers.out_bytes_total
        last = self._seen[-1] if self._seen else now
        if snapshot.engine.epoch != self._epoch or any(new < old for new, old in zip(now, last, strict=True)):
            self._seen.clear()
        self._epoch = snapshot.engine.epoch
        if not self._seen or now[0] > self._seen[-1][0]:
            self._seen.append(now)
        while len(self._seen) > 2 and self._seen[1][0] <= now[0] - WINDOW_S:
            self._seen.popleft()
        first = self._seen[0]
        took = now[0] - first[0]
        return HostRates() if took < _LEAST_S else HostRates((now[1] - first[1]) / took, (now[2] - first[2]) / took)
