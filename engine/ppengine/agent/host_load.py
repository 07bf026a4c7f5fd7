"""CPU time of a host's other processes, which can slow down the stages of an engine.

Two processors may be threads of one core, and they share caches and memory in any case. A busy process beside a stage
slows it down although it waits for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ppengine.common import procfs


class HostLoad:
    """Sums up the work of others on this host's other processors. Call `look` with every sample of the stages."""

    def __init__(self) -> None:
        # On the only processor a stage waits for the others, which counts as a wait.
        self._others = (os.cpu_count() or 1) - 1
        """Number of processors beside the one of a stage."""
        self._busy_s = procfs.busy_s() if self._others else None
        self._stages: dict[int, float] = {}
        self._beside_s = 0.0

    @property
    def beside_ns(self) -> int | None:
        """Nanoseconds of such work so far, averaged over the other processors; None: not readable, or there is none."""
        return None if self._busy_s is None else int(self._beside_s * 1e9)

    def look(self, stages: Mapping[int, float]) -> None:
        """Read the counters. `stages` holds the CPU seconds of their processes so far, by pid."""
        busy_s = procfs.busy_s() if self._busy_s is not None else None
        if busy_s is None or self._busy_s is None:
            return
        own_s = sum(cpu_s - self._stages[pid] for pid, cpu_s in stages.items() if pid in self._stages)
        # Both are counted in ticks, not at the same moment: the next look makes up for a difference.
        self._beside_s += (busy_s - self._busy_s - own_s) / self._others
        self._busy_s, self._stages = busy_s, dict(stages)
