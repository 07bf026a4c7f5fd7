"""Memory of a stage's process: the resident part of its KV cache, and growth of all that is neither cache nor swap."""

from __future__ import annotations

import time

from ppengine.agent.growth_watch import HASTY_BYTES, SHARED_WINDOWS_S, GrowthWatch
from ppengine.common import cgroup_limits, procfs
from ppengine.common.ring import Gauge, RingReader
from ppengine.common.system_memory import host_available
from ppengine.protocol.stage_samples import GrowthSample

_SMAPS_SHARE, _SMAPS_MOST_S = 1000, 5.0
"""Reading smaps costs milliseconds: it may take 1/1000 of a core, but is read every 5 s and after each mapping."""
_MOVED_BYTES = 1 << 20
"""Change of the process's own memory after which smaps is read again."""


class MemoryWatch:
    """Watches one process. Call `look` about once a second."""

    def __init__(self) -> None:
        self.resident: int | None = None
        """Resident bytes of the KV mapping; None: not known, or it is on a device."""
        self.growth: GrowthSample | None = None
        """Present growth without an end; None: there is none."""
        self._growth, self._shared = GrowthWatch(), GrowthWatch(SHARED_WINDOWS_S)
        self._pools = 0
        """Resident bytes of KV cache and swap space."""
        self._shared_slots = 0
        """Resident bytes of a swap space that a store maps, too."""
        self._ranges: tuple[tuple[int, int], ...] = ()
        self._mapped = 0
        self._read_size, self._last_size = 0, 0
        """Memory of the process that no file backs, when smaps was read, and at the newest look."""
        self._due = 0.0

    def look(self, pid: int, ring: RingReader, groups: str, *, serving: bool) -> None:
        """Read the memory of a live process. `groups`: its cgroups; `serving`: it has loaded, and knows its pools."""
        memory = procfs.unbacked(pid)
        if memory is None:
            return
        size = memory.total
        pools = (Gauge.KV_BASE, Gauge.KV_LENGTH), (Gauge.SWAP_BASE, Gauge.SWAP_LENGTH)
        ranges = tuple((ring.gauge(base), ring.gauge(length)) for base, length in pools)
        mapped = ring.gauge(Gauge.KV_MAPPED_BYTES)
        now, moved = time.monotonic(), abs(size - self._read_size) >= _MOVED_BYTES
        changed = (ranges, mapped) != (self._ranges, self._mapped)
        hasty = self._growth.hasty or size - self._last_size >= HASTY_BYTES
        self._last_size = size
        if changed or (moved and (hasty or now >= self._due)):
            self._ranges, self._mapped, self._read_size, moved = ranges, mapped, size, False
            self._read_pools(pid, now, shares=bool(ring.gauge(Gauge.SWAP_SHARED)))
        if not moved:
            activations = ring.gauge(Gauge.OTHER_BYTES)
            self._growth.look(now, size - self._pools, serving=serving, activations=activations)
            self._shared.look(now, memory.shared - self._shared_slots, serving=serving)
            grows = self._growth.grows or self._shared.grows
            limits, left = (cgroup_limits.memory_limits(groups), host_available()) if grows else ([], None)
            self.growth = self._growth.sample(limits, left) or self._shared.sample(limits, left)

    def _read_pools(self, pid: int, begun: float, *, shares: bool) -> None:
        sizes = procfs.resident_ranges(pid, self._ranges) if any(length for _, length in self._ranges) else None
        self._due = begun + min(_SMAPS_MOST_S, (time.monotonic() - begun) * _SMAPS_SHARE)
        self.resident = sizes[0] if sizes and self._ranges[0][1] else None
        self._pools = sum(sizes or ())
        self._shared_slots = sizes[1] if sizes and shares else 0
