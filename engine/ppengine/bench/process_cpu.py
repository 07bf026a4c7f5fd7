"""CPU time of an engine's processes."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from pathlib import Path

_MODULE = re.compile(rb"ppengine\.(\w+)")


def cpu_by_module(supervisor: int) -> dict[str, float]:
    """Return the CPU seconds of a supervisor's processes by package: `stage`, `core`, `http`, and `other`."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()
            title = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1]), title
    totals: dict[str, float] = defaultdict(float)
    for pid, (_, title) in parents.items():
        if _descends(pid, supervisor, parents):
            found = _MODULE.search(title)
            totals[found[1].decode() if found else "other"] += _cpu_of(pid)
    return totals


def _descends(pid: int, ancestor: int, parents: dict[int, tuple[int, bytes]]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid][0]
    return pid == ancestor


def _cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process by its clock, in nanoseconds and not in ticks; see clock_getcpuclockid(3)."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0
