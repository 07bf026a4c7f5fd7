"""A cgroup of its own for one process, below its present one: in cgroup v1 or v2, by the controller.

The new group is a child of the process's own, so that all limits of the process stay in force.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ppengine.drills.registry import FaultError

ROOT = Path("/sys/fs/cgroup")
_LEAST_US, _PERIOD_US, _LONGEST_US = 1000, 100_000, 1_000_000


class Group:
    """The child group of one process for one controller. Raises FaultError if it may not be made."""

    def __init__(self, pid: int, controller: str) -> None:
        self._pid = pid
        self._parent, self.unified = _group_of(pid, controller)
        self.folder = self._parent / f"ppfault-{pid}-{controller}"
        try:
            if self.unified and controller != "freezer":
                (self._parent / "cgroup.subtree_control").write_text(f"+{controller}")
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise FaultError(f"no {controller} cgroup can be made below {self._parent}: {error.strerror}") from None

    def write(self, name: str, value: object) -> None:
        """Set one limit. Raises FaultError."""
        try:
            (self.folder / name).write_text(f"{value}")
        except OSError as error:
            self.leave()
            raise FaultError(f"{self.folder / name} does not take {value}: {error.strerror}") from None

    def enter(self) -> Callable[[], None]:
        """Move the process in; return the function that moves it back and removes the group. Raises FaultError."""
        self.write("cgroup.procs", self._pid)
        return self.leave

    def leave(self) -> None:
        """Move back the processes of the group, and remove it; ignore errors."""
        with contextlib.suppress(OSError):
            for line in (self.folder / "cgroup.procs").read_text().split():
                (self._parent / "cgroup.procs").write_text(line)
            self.folder.rmdir()


def throttle(pid: int, share: float) -> Callable[[], None]:
    """Give process `pid` at most `share` of one processor; return the undoing. Raises FaultError."""
    group = Group(pid, "cpu")
    # The kernel takes no quota below 1 ms: a small share needs the longest period.
    period_us = _PERIOD_US if share * _PERIOD_US >= _LEAST_US else _LONGEST_US
    quota = max(_LEAST_US, int(share * period_us))
    if group.unified:
        group.write("cpu.max", f"{quota} {period_us}")
    else:
        group.write("cpu.cfs_period_us", period_us)
        group.write("cpu.cfs_quota_us", quota)
    return group.enter()


def freeze(pid: int) -> Callable[[], None]:
    """Freeze process `pid`; return the thawing. Raises FaultError."""
    group = Group(pid, "freezer")
    leave = group.enter()
    name, frozen, thawed = ("cgroup.freeze", "1", "0") if group.unified else ("freezer.state", "FROZEN", "THAWED")
    group.write(name, frozen)

    def thaw() -> None:
        group.write(name, thawed)
        leave()

    return thaw


def limit_memory(pid: int, size: int) -> Callable[[], None]:
    """Let process `pid` charge at most `size` further bytes; return the undoing. Raises FaultError."""
    group = Group(pid, "memory")
    group.write("memory.max" if group.unified else "memory.limit_in_bytes", size)
    return group.enter()


def _group_of(pid: int, controller: str) -> tuple[Path, bool]:
    """Return the folder of the group of `pid` that has `controller`, and whether it is a v2 one."""
    unified = None
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            return ROOT / names.removeprefix("name=") / path.lstrip("/"), False
        if number == "0":
            unified = path.lstrip("/")
    if unified is None:
        raise FaultError(f"pid {pid} is in no cgroup with the controller {controller}")
    hybrid = ROOT / "unified"
    folder = (hybrid if hybrid.is_dir() else ROOT) / unified
    has = controller == "freezer" or controller in _read(folder / "cgroup.controllers").split()
    if not has or not os.access(folder, os.W_OK):
        raise FaultError(f"the cgroup of pid {pid} ({folder}) has no controller {controller} that may be used here")
    return folder, True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
