"""CPU time of a host's other processes, which can slow down the stages of an engine, and memory that is left.

Two processors may be threads of one core, and they share caches and memory in any case. A busy process beside a stage
slows it down although it waits for nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from ppengine.common import procfs
from ppengine.common.system_memory import system_memory

_MEMORY_S = 1.0
"""Seconds between two readings of the memory: the kernel sums up a cgroup's figures for each."""
_IDLE_S = 0.4
"""Least seconds between two readings of every processor: some hosts have hundreds."""


class HostRoom:
    """Reads the memory that this host, and the cgroup of this process, can still give."""

    def __init__(self) -> None:
        self._available: int | None = None
        self._read_at = float("-inf")

    def look(self) -> tuple[int | None, float]:
        """Return the bytes and the age of the reading in milliseconds; None: not readable."""
        now = time.monotonic()
        if now - self._read_at >= _MEMORY_S:
            self._read_at = now
            try:
                self._available = system_memory().available
            except (OSError, ValueError):
                self._available = None
        return self._available, (now - self._read_at) * 1e3


class HostLoad:
    """Sums up the work of others on this host's other processors, and how full all are.

    Call `look_idle` with every sample of the stages, and `look` if they compute on processors.
    """

    def __init__(self) -> None:
        # On the only processor a stage waits for the others, which counts as a wait.
        self._others = (os.cpu_count() or 1) - 1
        """Number of processors beside the one of a stage."""
        self._busy_s = procfs.busy_s() if self._others else None
        self._stages: dict[int, float] = {}
        self._beside_s = 0.0
        self._usable = os.sched_getaffinity(0)
        """Processors that the processes of this engine may use, unless they are bound to fewer."""
        self._idle_s = procfs.idle_s(self._usable)
        self._looked_at = time.monotonic()
        self._full_s = 0.0

    @property
    def beside_ns(self) -> int | None:
        """Nanoseconds of such work so far, averaged over the other processors; None: not readable, or there is none."""
        return None if self._busy_s is None else int(self._beside_s * 1e9)

    @property
    def full_ns(self) -> int | None:
        """Nanoseconds so far in which no usable processor can have idled; None: not readable.

        It is the most that fits the counts: a processor that idles for a second leaves none in which all were busy.
        """
        return None if self._idle_s is None else int(self._full_s * 1e9)

    def look(self, stages: Mapping[int, float]) -> None:
        """Read the counters. `stages` holds the CPU seconds of their processes so far, by pid."""
        busy_s = procfs.busy_s() if self._busy_s is not None else None
        if busy_s is None or self._busy_s is None:
            return
        own_s = sum(cpu_s - self._stages[pid] for pid, cpu_s in stages.items() if pid in self._stages)
        # Both are counted in ticks, not at the same moment: the next look makes up for a difference.
        self._beside_s += (busy_s - self._busy_s - own_s) / self._others
        self._busy_s, self._stages = busy_s, dict(stages)

    def look_idle(self) -> None:
        """Read the counters of idle time."""
        now = time.monotonic()
        if self._idle_s is None or now - self._looked_at < _IDLE_S:
            return
        idle_s = procfs.idle_s(self._usable)
        if idle_s is None:
            return
        # Ticks, as above: a part of one look may come in the next one.
        self._full_s += now - self._looked_at - (idle_s - self._idle_s) / len(self._usable)
        self._idle_s, self._looked_at = idle_s, now
