"""For how much of the time, and for how long, a CPU quota has held a stage back: of its own cgroup or of one above."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ppengine.common.cgroup_limits import Quota
from ppengine.protocol.stage_samples import QuotaSample

LEAST_SHARE = 0.1
"""Share of a second from which a quota counts as holding back."""
_KEPT = 30
"""Seconds of the time before, whose shares are kept."""


class QuotaWatch:
    """Watches one process. Call `look` about once a second."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Quota]] = {}
        self._before: deque[float] = deque(maxlen=_KEPT)
        self._since: dict[str, tuple[int, Quota]] = {}
        """The quotas as they were when the present run of held-back seconds began; empty: there is none."""
        self._newest: QuotaSample | None = None

    @property
    def sample(self) -> QuotaSample | None:
        """The quota that holds most back at this moment; None: none does."""
        return self._newest

    @property
    def throttled_us(self) -> int | None:
        """Microseconds so far by the quota that has held most back; None: there is no quota."""
        return max((quota.throttled_us for _, quota in self._last.values()), default=None)

    def look(self, now_ns: int, quotas: Sequence[Quota]) -> None:
        """Enter the counts of this moment."""
        before, self._last = self._last, {str(quota.file): (now_ns, quota) for quota in quotas}
        # Of a quota that is new, all that it has counted may be of a time before the process came in.
        shares = {name: _share(before[name], self._last[name]) for name in self._last if name in before}
        share = max(shares.values(), default=0.0)
        if share < LEAST_SHARE:
            self._since, self._newest = {}, None
            self._before.append(share)
            return
        self._since = self._since or before
        file = max(shares, key=lambda name: shares[name])
        first_ns, first = self._since.get(file, before[file])
        quota = self._last[file][1]
        self._newest = QuotaSample(
            file=file,
            none=quota.none,
            cores=quota.cores,
            share=_share((first_ns, first), (now_ns, quota)),
            before=sum(self._before) / len(self._before) if self._before else None,
            nr_throttled=quota.nr_throttled - first.nr_throttled,
            throttled_us=quota.throttled_us - first.throttled_us,
            for_ms=round((now_ns - first_ns) / 1e6, 1),
        )


def _share(first: tuple[int, Quota], last: tuple[int, Quota]) -> float:
    """Return the share of the time between two looks in which a quota held back."""
    length_us = (last[0] - first[0]) / 1e3
    held_us = last[1].throttled_us - first[1].throttled_us
    return round(min(1.0, max(0.0, held_us / length_us)), 3) if length_us > 0 else 0.0
