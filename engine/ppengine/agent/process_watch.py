"""The process of a stage observed from outside: /proc, its cgroups, its memory, its share of cores and of the GIL."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from ppengine.agent.core_watch import CoreWatch, Waits
from ppengine.agent.gil_watch import Counts, GilWatch
from ppengine.agent.memory_watch import MemoryWatch
from ppengine.agent.quota_watch import QuotaWatch
from ppengine.common import cgroup_limits, procfs
from ppengine.common.ring import Phase, RingReader, Word
from ppengine.protocol.stage_samples import CpuShares, GilSample, StarvedSample

SLOW_S = 1.0
"""Least seconds between two readings of cgroup and smaps; also the window of time shares."""
_GIL_WORDS = (
    Word.GIL_PROBES, Word.GIL_WAITS, Word.GIL_WAIT_NS, Word.GIL_HOLDS, Word.GIL_HOLD_NS, Word.GIL_SLEEP_NS,
)  # fmt: skip


class ProcessLook(NamedTuple):
    """State of the process at one look. `stat`, `thread`: of all threads, of the main one; None: it is gone."""

    stat: procfs.Stat | None
    thread: procfs.Stat | None
    alive: bool
    waited_ns: int | None
    """Time without a core of the main thread so far; None: not known."""
    groups: str
    """Its cgroups, as /proc lists them."""


class CpuClock:
    """Turns counted seconds of a process and its main thread into shares of the last second."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, tuple[float, ...]]] = deque()

    def shares(self, now_ns: int, process: procfs.Stat, main: procfs.Stat, waited_ns: int | None) -> CpuShares | None:
        """Return the shares; None at the first reading."""
        figures = (process.user_s, process.system_s, main.user_s, main.system_s, (waited_ns or 0) / 1e9)
        self._marks.append((now_ns, figures))
        while len(self._marks) > 2 and now_ns - self._marks[1][0] >= SLOW_S * 1e9:
            self._marks.popleft()
        then_ns, before = self._marks[0]
        if now_ns <= then_ns:
            return None
        grown = [round((now - old) * 1e9 / (now_ns - then_ns), 3) for now, old in zip(figures, before, strict=True)]
        return CpuShares(
            user=grown[0], system=grown[1], main_user=grown[2], main_system=grown[3],
            main_waited=None if waited_ns is None else grown[4],
        )  # fmt: skip


class OomKills:
    """Out-of-memory kills in the cgroup of a process, counted on when it comes into another one."""

    def __init__(self) -> None:
        self.groups = ""
        """The cgroups that are followed."""
        self._files: list[Path] = []
        self._count: int | None = None
        """The present cgroup's own count; None: not readable."""
        self._before = 0
        """Kills of the earlier cgroups, less those of the present one when the process came in."""

    @property
    def total(self) -> int | None:
        """A count that grows with that of the cgroup; None: not readable."""
        return None if self._count is None else self._count + self._before

    def follow(self, groups: str) -> None:
        """Switch to the process's present cgroup, at once: a dead process no longer names its own."""
        if not groups or groups == self.groups:
            return
        before, self.groups = self.total, groups
        self._files = procfs.oom_kill_files(groups)
        self._count = procfs.oom_kills(self._files)
        # Earlier kills in another group were none of this process's.
        self._before = 0 if before is None else before - (self._count or 0)

    def read(self) -> None:
        """Read the count again; the last one stays once the cgroup is gone."""
        count = procfs.oom_kills(self._files)
        self._count = self._count if count is None else count


class ProcessWatch:
    """Watches the process `pid`; a restarted stage has another one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.kills = OomKills()
        self.cpu, self.memory, self.quota = CpuClock(), MemoryWatch(), QuotaWatch()
        self.gil: GilSample | None = None
        self.starved: StarvedSample | None = None
        self.cpu_limits_s: tuple[int | None, int | None] = (None, None)
        self.waited_ns = 0
        """Time so far in which its main thread could run and had no core; 0: the kernel does not say."""
        self._cores, self._gil = CoreWatch(), GilWatch()
        self._slow_due = 0.0

    @property
    def throttled_us(self) -> int:
        """Microseconds so far in which a quota held it back; 0: there is none, or it is not readable."""
        return self.quota.throttled_us or 0

    def look(self) -> ProcessLook:
        """Read the state of the process, and follow it to another cgroup."""
        groups = procfs.cgroups(self.pid)
        stat, thread = procfs.read_stat(self.pid), procfs.read_stat(self.pid, self.pid)
        alive = stat is not None and stat.state not in ("Z", "X")
        if stat is not None and stat.exiting and alive:
            # Freeing much memory takes seconds, in which it seems to run.
            stat, alive = stat._replace(state="X"), False
        waited_ns = procfs.waited_ns(self.pid) if alive else None
        self.waited_ns = waited_ns or 0
        if stat is not None and not stat.exiting:  # In cgroup v1 an exiting process is listed in the root's.
            self.kills.follow(groups)
        return ProcessLook(stat, thread, alive, waited_ns, groups)

    def look_slowly(
        self, main: RingReader, control: RingReader | None, paused_ns: int, full_ns: int | None, *, alive: bool
    ) -> bool:
        """Read the expensive figures if it is time; return whether it was.

        `main`, `control`: rings of its threads. `paused_ns`: time so far in which a stage was paused for its stacks.
        `full_ns`: time so far in which the host was full (see `HostLoad`).
        """
        now = time.monotonic()
        due = now >= self._slow_due
        if due or not alive:
            # A dead process's cgroup may outlive it, and its last counts are the ones that matter.
            self.kills.read()
        if not due:
            return False
        self._slow_due = now + SLOW_S
        self.quota.look(time.monotonic_ns(), cgroup_limits.quotas(self.kills.groups))
        if not alive:
            return True
        if full_ns is not None:
            waits = Waits(self.waited_ns, self.throttled_us, full_ns)
            self.starved = self._cores.look(time.monotonic_ns(), waits, self.pid)
        self.cpu_limits_s = procfs.cpu_limits_s(self.pid)
        if control is not None:
            counts = Counts._make(control.word(word) for word in _GIL_WORDS)
            self.gil = self._gil.look(time.monotonic_ns(), counts, paused_ns)
        serving = main.word(Word.PHASE) == Phase.SERVING
        self.memory.look(self.pid, main, self.kills.groups, serving=serving)
        return True
