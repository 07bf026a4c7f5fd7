"""What others than an engine's stages have computed on their host.

Two processors of a machine may be threads of one core, and share caches and memory in any case: who works beside a
stage makes it slower, though it waits for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ppengine.monitor import proc


class Neighbours:
    """Sums up what the other processors of this host had to do for others. `look` as often as stages are looked at."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[int, float]] | None = None
        self._others = max(1, (os.cpu_count() or 1) - 1)
        """Processors beside the one that a stage is on."""
        self._beside_s = 0.0

    @property
    def beside_ns(self) -> int | None:
        """So far, on each of the other processors, on an average; None: not readable."""
        return None if self._before is None else int(self._beside_s * 1e9)

    def look(self, stages: Mapping[int, float]) -> None:
        """Take in what is counted now. `stages`: CPU seconds of each of their processes so far, by pid."""
        busy_s = proc.busy_s()
        if busy_s is None:
            return
        if self._before is not None:
            then_s, then = self._before
            own_s = sum(cpu_s - then[pid] for pid, cpu_s in stages.items() if pid in then)
            # Both are counted in ticks, not at the same moment: what is too little comes back at the next look.
            self._beside_s += (busy_s - then_s - own_s) / self._others
        self._before = busy_s, dict(stages)
