"""Limits of the cgroups of a process: a CPU quota, a freezer, a memory limit; of its own group and of those above it.

Versions 1 and 2, also side by side. `groups` is always the text of /proc/<pid>/cgroup. A file that cannot be read is as
no limit.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
_MOST_BYTES = 16_384
_NO_LIMIT = 1 << 62
"""Version 1 writes a number above this for no memory limit."""


class Quota(NamedTuple):
    """A CPU quota and the counts of its group so far. `file` sets it, `none` is the text that lifts it."""

    file: Path
    none: str
    cores: float
    nr_throttled: int
    throttled_us: int


class MemoryLimit(NamedTuple):
    """A memory limit in bytes, and the bytes that are left below it without cache that can be dropped."""

    file: Path
    limit: int
    left: int


def quotas(groups: str, root: Path | None = None) -> list[Quota]:
    """Return the quotas in force, the process's own group first."""
    found = []
    folders, unified = _own_folders(groups, "cpu", root)
    for folder in folders:
        if unified:
            file, none = folder / "cpu.max", "max"
            quota, _, period = _text(file).partition(" ")
        else:
            file, none = folder / "cpu.cfs_quota_us", "-1"
            quota, period = _text(file), _text(folder / "cpu.cfs_period_us")
        if not (quota.isdecimal() and period.isdecimal() and int(period)):
            continue
        counts = _counts(folder / "cpu.stat")
        us = counts.get("throttled_usec", counts.get("throttled_time", 0) // 1000)
        found.append(Quota(file, none, int(quota) / int(period), counts.get("nr_throttled", 0), us))
    return found


def frozen_by(groups: str, root: Path | None = None) -> Path | None:
    """Return the file of the group by which the process is frozen, its own or one above; None: it is not frozen."""
    first, second = _hierarchies(groups, "freezer", root or ROOT)
    for folder in first:
        if _text(folder / "freezer.self_freezing") == "1":
            return folder / "freezer.state"
        # Of a group that one above freezes, its own file says nothing.
        if _text(folder / "freezer.state") not in ("FROZEN", "FREEZING"):
            break
    for folder in second:
        if _text(folder / "cgroup.freeze") == "1":
            return folder / "cgroup.freeze"
        if _counts(folder / "cgroup.events").get("frozen") != 1:
            break
    return None


def memory_limits(groups: str, root: Path | None = None) -> list[MemoryLimit]:
    """Return the memory limits in force, the process's own group first."""
    found = []
    folders, unified = _own_folders(groups, "memory", root)
    for folder in folders:
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = _text(folder / names[0]), _text(folder / names[1])
        if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT:
            counts = _counts(folder / "memory.stat")
            cache = counts.get("inactive_file" if unified else "total_inactive_file", 0)
            found.append(MemoryLimit(folder / names[0], int(limit), max(0, int(limit) - int(used) + cache)))
    return found


def _own_folders(groups: str, controller: str, root: Path | None) -> tuple[list[Path], bool]:
    """Return the group that has a controller and those above it, and whether they are of version 2."""
    first, second = _hierarchies(groups, controller, root or ROOT)
    return (first, False) if first else (second, True)


@functools.lru_cache(maxsize=256)
def _hierarchies(groups: str, controller: str, root: Path) -> tuple[list[Path], list[Path]]:
    """Return the group of the process and those above it, of version 1 with `controller` and of version 2."""
    first, second = list[Path](), list[Path]()
    for line in groups.splitlines():
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            first = _upwards(root / names, path)
        elif number == "0":
            hybrid = root / "unified"
            second = _upwards(hybrid if hybrid.is_dir() else root, path)
    return first, second


def _upwards(top: Path, path: str) -> list[Path]:
    folder = top / path.lstrip("/")
    return [folder, *(each for each in folder.parents if each == top or top in each.parents)]


def _text(file: Path) -> str:
    try:
        # Several times a second per stage: a file object would cost four times as much.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _MOST_BYTES).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
    except OSError:
        return ""


def _counts(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
