"""The memory that a CPU stage can count on: the machine's, or less if a cgroup (a container) limits it.

Also how its C library deals with freed memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""


class SystemMemory(NamedTuple):
    """Bytes. `available` can still be handed out: it is free, or page cache that can be dropped."""

    total: int
    available: int


def system_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> SystemMemory:
    """Return total and available memory under the tightest limit. Raises OSError without /proc/meminfo."""
    figures = _fields(proc / "meminfo")
    try:
        total, available = figures["MemTotal:"] * 1024, figures["MemAvailable:"] * 1024
    except KeyError as missing:
        raise OSError(f"{proc}/meminfo has no {missing.args[0]} line; Linux 3.14 or newer is needed") from None
    for folder in _own_cgroups(proc, cgroups):
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            used = int((folder / "memory.current").read_text())
            cache = _fields(folder / "memory.stat").get("inactive_file", 0)
            total = min(total, int(limit))
            available = min(available, max(0, int(limit) - used + cache))
    return SystemMemory(total, available)


def host_available() -> int | None:
    """Return the bytes that this host can still give, without the limits of cgroups; None: not readable."""
    try:
        return _fields(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return None


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory for the next step; another C library is left as it is.

    Otherwise a prefill's activations go back to the system behind every layer, and come from it
    again page by page. So do messages of megabytes: 4 MiB of masks took 1.6 ms to decode, and 0.1.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _own_cgroups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield this process's cgroup (version 2) and its parents, as far as they are visible and account memory."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return  # a kernel without cgroups
    own = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), None)
    if own is None:
        return
    folder = cgroups / own
    for candidate in (folder, *folder.parents):
        if (candidate / "memory.max").is_file():
            yield candidate
        if candidate == cgroups:
            return


def _fields(path: Path) -> dict[str, int]:
    """Return the first two words of each line."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
