"""Requests of the last five minutes that met the service level objectives of the profile, and those that did not."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ppengine.common.durations import SLICE_S, SLICES
from ppengine.common.profile_sections import SloConfig
from ppengine.protocol.snapshot import SloInfo

COUNTED = ("stop", "length", "lost")
"""Finish reasons that count. An abort says nothing about the engine; a lost request has met nothing."""


@dataclass(slots=True)
class _Slice:
    """Counts of ten seconds."""

    begin: float
    finished: int = 0
    met: int = 0
    ttft_missed: int = 0
    itl_missed: int = 0


class SloWindow:
    """Counts ends. Without an objective it counts nothing."""

    def __init__(self, slo: SloConfig) -> None:
        self._slo = slo
        self._slices: deque[_Slice] = deque()
        """The newest last."""
        self.met_total = self.missed_total = 0

    def ended(self, reason: str, ttft_s: float | None, itl_ms: float | None, now: float) -> None:
        """Count a request that has ended. `itl_ms`: mean time between its tokens; None with fewer than two."""
        slo = self._slo
        if not slo.set or reason not in COUNTED:
            return
        if not self._slices or now - self._slices[-1].begin >= SLICE_S:
            self._expire(now)
            self._slices.append(_Slice(now))
        late = slo.ttft_ms is not None and (ttft_s is None or ttft_s * 1e3 > slo.ttft_ms)
        slow = slo.itl_ms is not None and itl_ms is not None and itl_ms > slo.itl_ms
        met = not (late or slow or reason == "lost")
        newest = self._slices[-1]
        newest.finished += 1
        newest.met += met
        newest.ttft_missed += late
        newest.itl_missed += slow
        self.met_total += met
        self.missed_total += not met

    def info(self, now: float) -> SloInfo | None:
        """Return the objectives and the counts of the window; None without an objective."""
        slo = self._slo
        if not slo.set:
            return None
        self._expire(now)
        finished, met = (sum(getattr(each, name) for each in self._slices) for name in ("finished", "met"))
        return SloInfo(
            ttft_ms=slo.ttft_ms, itl_ms=slo.itl_ms, finished=finished, met=met,
            ttft_missed=sum(each.ttft_missed for each in self._slices),
            itl_missed=sum(each.itl_missed for each in self._slices),
            goodput=met / finished if finished else None,
        )  # fmt: skip

    def _expire(self, now: float) -> None:
        """Drop the slices that ended five minutes ago."""
        while self._slices and now - self._slices[0].begin >= SLICE_S * SLICES:
            self._slices.popleft()
