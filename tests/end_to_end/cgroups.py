"""A cgroup of the test's own, of either version, where the machine lets us make one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def moved(pid: int, controller: str, **limits: int) -> Iterator[Path]:
    """Move `pid` into a new cgroup with limits: `memory` in bytes, `cpu` in percent of a core. Skips if not allowed."""
    unified = (ROOT / "cgroup.controllers").is_file()
    folder = (ROOT if unified else ROOT / controller) / f"pptest-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        if "memory" in limits:
            (folder / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limits["memory"]))
        if "cpu" in limits and unified:
            (folder / "cpu.max").write_text(f"{limits['cpu'] * 1000} 100000")
        elif "cpu" in limits:
            (folder / "cpu.cfs_period_us").write_text("100000")
            (folder / "cpu.cfs_quota_us").write_text(str(limits["cpu"] * 1000))
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup of our own: {error}")
    try:
        yield folder
    finally:
        home = folder.parent / "cgroup.procs"
        for line in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                home.write_text(line)
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)
