"""What /proc and the cgroup say of one process. Every answer may be None: unknown, or the process is gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_CGROUPS = Path("/sys/fs/cgroup")


class Stat(NamedTuple):
    """Of /proc/<pid>/stat: state letter (R, S, D, T, Z, ...), start in clock ticks since boot, CPU seconds."""

    state: str
    start: int
    cpu_s: float


def read_stat(pid: int) -> Stat | None:
    """Return the state of process `pid`, None if there is no such process."""
    try:
        # Ten times a second for every stage: a file object would cost four times as much.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    # The name in parentheses may hold anything, also spaces and parentheses.
    fields = text.rpartition(b")")[2].split()
    return Stat(fields[0].decode(), int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS)


def resident(pid: int, base: int, length: int) -> int | None:
    """Return the resident bytes of the mappings of `pid` that lie in `[base, base + length)`.

    The kernel has no shorter way than all of smaps: milliseconds for a process that has loaded torch.
    """
    total, overlap, end = 0, 0, base + length
    try:
        with Path(f"/proc/{pid}/smaps").open("rb") as file:
            for line in file:
                if line.startswith(b"Rss:"):
                    # A mapping may be merged with a neighbour: no more than what lies in the range counts.
                    total += min(int(line.split()[1]) * 1024, overlap) if overlap else 0
                    overlap = 0
                elif line[:1] in b"0123456789abcdef":
                    low, high = (int(text, 16) for text in line.split(maxsplit=1)[0].split(b"-"))
                    if low >= end:
                        break
                    overlap = max(0, min(high, end) - max(low, base))
    except OSError:
        return None
    return total


def oom_file(pid: int) -> Path | None:
    """Return the file that counts out-of-memory kills of the cgroup of `pid`: version 2, else version 1."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            candidate = _CGROUPS / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            candidate = _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        if candidate.is_file():
            return candidate
    return None


def oom_kills(file: Path) -> int | None:
    """Return the `oom_kill` count in a file that `oom_file` found."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    counts = (line.split() for line in lines)
    return next((int(fields[1]) for fields in counts if fields[:1] == ["oom_kill"]), None)


def catches(pid: int, signal_number: int) -> bool:
    """Return whether process `pid` has a handler for the signal, so that sending it does not end the process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(mask >> (signal_number - 1) & 1)
