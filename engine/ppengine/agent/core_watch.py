"""Does a stage wait for a core while others idle? Its threads are bound to few cores, or give way to what runs there.

A host that is full explains a wait. So only the part counts that is longer than all time in which no core can have
idled, and a quota's part does not: it has a name of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from ppengine.common import procfs
from ppengine.protocol.stage_samples import StarvedSample

SHARE = 0.2
"""Least share of a look that counts."""
_HEALTHY = 2
"""Number of looks below it, one after the other, that end it: the counts are not of one moment."""


class Waits(NamedTuple):
    """Time so far: of the main thread without a core, of the quota, and of a full host (see `HostLoad`)."""

    main_ns: int
    throttled_us: int
    full_ns: int


class CoreWatch:
    """Watches the main thread of one process. Call `look` about once a second."""

    def __init__(self) -> None:
        self._before: tuple[int, Waits] | None = None
        self._since_ns = 0
        """When it began; 0: it is not so."""
        self._healthy = 0
        self._share = 0.0
        """Share of the newest look that counted."""

    def look(self, now_ns: int, waits: Waits, pid: int) -> StarvedSample | None:
        """Enter the times of this moment; return the state, None if it gets its share."""
        before, self._before = self._before, (now_ns, waits)
        if before is None or now_ns <= before[0]:
            return None
        main_ns, throttled_us, full_ns = (now - then for now, then in zip(waits, before[1], strict=True))
        share = (main_ns - 1000 * throttled_us - full_ns) / (now_ns - before[0])
        if share >= SHARE:
            self._since_ns, self._healthy, self._share = self._since_ns or before[0], 0, share
        else:
            self._healthy += 1
            if self._healthy >= _HEALTHY:
                self._since_ns = 0
        if not self._since_ns:
            return None
        for_ms = round((now_ns - self._since_ns) / 1e6, 1)
        return StarvedSample(share=round(min(1.0, self._share), 3), for_ms=for_ms, scheduling=procfs.scheduling(pid))
