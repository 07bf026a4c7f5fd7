"""What others than an engine's stages have computed on their host.

Two processors of a machine may be threads of one core, and share caches and memory in any case: who works beside a
stage makes it slower, though it waits for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ppengine.common import procfs


class Neighbours:
    """Sums up what the other processors of this host had to do for others. `look` as often as stages are looked at."""

    def __init__(self) -> None:
        # A neighbour on the only processor is waited for, which is counted as such.
        self._others = (os.cpu_count() or 1) - 1
        """Processors beside the one that a stage is on."""
        self._busy_s = procfs.busy_s() if self._others else None
        self._stages: dict[int, float] = {}
        self._beside_s = 0.0

    @property
    def beside_ns(self) -> int | None:
        """So far, on each of the other processors, on an average; None: not readable, or there is no other."""
        return None if self._busy_s is None else int(self._beside_s * 1e9)

    def look(self, stages: Mapping[int, float]) -> None:
        """Take in what is counted now. `stages`: CPU seconds of each of their processes so far, by pid."""
        busy_s = procfs.busy_s() if self._busy_s is not None else None
        if busy_s is None or self._busy_s is None:
            return
        own_s = sum(cpu_s - self._stages[pid] for pid, cpu_s in stages.items() if pid in self._stages)
        # Both are counted in ticks, not at the same moment: what is too little comes back at the next look.
        self._beside_s += (busy_s - self._busy_s - own_s) / self._others
        self._busy_s, self._stages = busy_s, dict(stages)
