"""Kills for memory: whether the kernel's out-of-memory killer ended a child, and at which limit."""

from __future__ import annotations

import time

from ppengine.common import cgroup_limits, procfs
from ppengine.common.sizes import size_text

LOOK_S = 0.25
"""Seconds between two looks at a live process."""
OOM_KILLER = "the out-of-memory killer"
"""These words are in the exit detail of a process that it ended."""


class OomWatch:
    """Watches one process: the kills in its cgroup, and what it has resident."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._due = 0.0
        self._groups = ""
        """Its cgroups; empty: they are not known."""
        self._kills: int | None = None
        """Kills in its cgroup at the newest look; None: not readable."""
        self._before: int | None = None
        """The same one look earlier: the newest may have been between the kill and its end, which takes a while."""
        self._resident = 0

    def look(self) -> None:
        """Look again if it is time: a dead process no longer names its cgroup."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LOOK_S
        groups, resident = procfs.cgroups(self._pid), procfs.resident_bytes(self._pid)
        if groups and resident:  # A process that ends has none any more, and can still be read.
            kills = _kills(groups)
            self._before = self._kills if groups == self._groups else kills
            self._groups, self._kills, self._resident = groups, kills, resident

    def words(self) -> str:
        """Return how the process was killed for memory, with figure and limit; empty if that is not known."""
        after = _kills(self._groups) if self._groups else None
        if after is None or self._before is None or after <= self._before:
            return ""
        limits = cgroup_limits.memory_limits(self._groups)
        if not limits:
            return f"{OOM_KILLER} of the host, {size_text(self._resident)} resident"
        limit = min(limits, key=lambda one: one.left)
        had = f"{size_text(self._resident)} resident a moment before"
        return f"{OOM_KILLER}, at the limit of {size_text(limit.limit)} of its cgroup ({limit.file}), {had}"


def _kills(groups: str) -> int | None:
    """Return the number of processes that the killer has ended in a cgroup, on a host without cgroups in all."""
    count = procfs.oom_kills(procfs.oom_kill_files(groups))
    return procfs.host_oom_kills() if count is None else count
