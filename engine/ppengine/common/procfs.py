"""Reads /proc and the cgroup of one process. Every answer may be None: unknown, or the process is gone."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PF_EXITING = 4
_NAME_MOST = 40
"""Characters of a program's name."""
_FILE_BYTES = 1 << 14
"""Bytes of a file of one process: cgroups of nested containers, or the groups of a user, take more than a page."""
_EVERY_PROCESSOR = 1 << 18
"""Bytes of /proc/stat for thousands of processors."""
_CGROUPS = Path("/sys/fs/cgroup")


def _content(path: str, most: int) -> bytes:
    """Return a small file. Raises OSError. A file object would cost four times as much, many times a second."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


class _Spare:
    """A descriptor for a process that has no other left: one that cannot look would report the living as gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, path: str, most: int) -> bytes | None:
        """Read a small file by the spare descriptor; None: it is not readable."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            try:
                return _content(path, most)
            except OSError:
                return None
            finally:
                try:
                    self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    self._descriptor = -1


_spare = _Spare()


class Stat(NamedTuple):
    """Fields of a stat file: state letter (R, S, D, T, Z, ...), start in clock ticks since boot, CPU seconds.

    `exiting`: the process is ending, which takes longer the more memory it has; it may not be Z yet.
    """

    state: str
    start: int
    user_s: float
    system_s: float
    exiting: bool = False

    @property
    def cpu_s(self) -> float:
        """User and system time in seconds."""
        return self.user_s + self.system_s


def read_stat(pid: int, thread: int | None = None) -> Stat | None:
    """Return the state of process `pid`, or of one of its threads; None if there is none."""
    text = _read(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    if text is None:
        return None
    # The name in parentheses may hold anything, also spaces and parentheses.
    fields = text.rpartition(b")")[2].split()
    exiting = bool(int(fields[6]) & _PF_EXITING)
    return Stat(fields[0].decode(), int(fields[19]), int(fields[11]) / _TICKS, int(fields[12]) / _TICKS, exiting)


def wchan(pid: int) -> str | None:
    """Return the kernel function in which the main thread of `pid` sleeps, empty if it runs; None: not readable."""
    text = _read(f"/proc/{pid}/wchan")
    return None if text is None else text.decode().strip().removeprefix("0")


def tracer(pid: int) -> str | None:
    """Return name and pid of the process that traces `pid`; None: not traced, or not readable."""
    thread = _number(f"/proc/{pid}/status", b"TracerPid")
    process = _number(f"/proc/{thread}/status", b"Tgid") if thread else None
    if not process:
        return None
    name = (_read(f"/proc/{process}/comm") or b"").decode(errors="replace").strip()
    return f"{name} (pid {process})"


def parent(pid: int) -> int | None:
    """Return the pid of the parent of `pid`; None: there is no such process."""
    return _number(f"/proc/{pid}/status", b"PPid")


def program(pid: int) -> str:
    """Return the name of a program, with the script or module of a Python; empty: no such process is visible."""
    comm = (_read(f"/proc/{pid}/comm") or b"").decode(errors="replace").strip()
    # A process that has set its title has all of it in one word.
    words = (_read(f"/proc/{pid}/cmdline") or b"").decode(errors="replace").replace("\0", " ").split()
    name = words[0].rpartition("/")[2] if words else comm
    if name.startswith("python"):
        script = [word for word in words[1:3] if not word.startswith("-")]
        name = " ".join([name, *(word.rpartition("/")[2] for word in script[:1])])
    return "".join(letter for letter in name if letter.isprintable())[:_NAME_MOST]


def _number(path: str, name: bytes) -> int | None:
    found = re.search(rb"^%s:\s*(\d+)" % name, _read(path) or b"", re.MULTILINE)
    return None if found is None else int(found[1])


def waited_ns(thread: int, pid: int | None = None) -> int | None:
    """Return the nanoseconds in which a runnable thread had no core, the main thread if `pid` is None.

    None: the kernel does not count them.
    """
    text = _read(f"/proc/{thread if pid is None else pid}/task/{thread}/schedstat")
    fields = text.split() if text else []
    return int(fields[1]) if len(fields) > 1 else None


def threads_waited_ns(pid: int) -> int | None:
    """Return `waited_ns` summed over all threads: work shared by threads ends with the last of them."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  paths of them would cost more than reading them
    except OSError:
        return None
    found = [ns for thread in threads if (ns := waited_ns(int(thread), pid)) is not None]
    return sum(found) if found else None


def cpu_limits_s(pid: int) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of CPU time in seconds; None: unlimited, or not readable."""
    found = re.search(rb"^Max cpu time\s+(\S+)\s+(\S+)", _read(f"/proc/{pid}/limits") or b"", re.MULTILINE)
    soft, hard = (int(text) if text.isdigit() else None for text in (found.groups() if found else (b"", b"")))
    return soft, hard


def busy_s() -> float | None:
    """Return the seconds in which this machine's processors were busy or stolen, in all; None: not readable."""
    found = re.match(rb"cpu +(\d+) (\d+) (\d+) \d+ \d+ (\d+) (\d+) (\d+)", _read("/proc/stat") or b"")
    return None if found is None else sum(map(int, found.groups())) / _TICKS


def idle_s(processors: Collection[int]) -> float | None:
    """Return the seconds in which these processors idled, summed; None: not readable."""
    rows = re.findall(rb"^cpu(\d+) \d+ \d+ \d+ (\d+) (\d+)", _read("/proc/stat", _EVERY_PROCESSOR) or b"", re.MULTILINE)
    found = [int(idle) + int(waits) for number, idle, waits in rows if int(number) in processors]
    return sum(found) / _TICKS if len(found) == len(processors) else None


def scheduling(pid: int) -> str:
    """Return the processors that the main thread of `pid` may use, and its nice value; empty: not readable."""
    allowed = re.search(rb"^Cpus_allowed_list:\s*(\S+)", _read(f"/proc/{pid}/status") or b"", re.MULTILINE)
    fields = (_read(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
    if allowed is None or len(fields) < 17:
        return ""
    return f"may use processors {allowed[1].decode()}, nice value {int(fields[16])}"


def _read(path: str, most: int = _FILE_BYTES) -> bytes | None:
    try:
        return _content(path, most)
    except OSError as error:
        return _spare.read(path, most) if error.errno in (errno.EMFILE, errno.ENFILE) else None


class Unbacked(NamedTuple):
    """Resident bytes of a process that no file backs. `shared`: the part in shared memory."""

    total: int
    shared: int


def unbacked(pid: int) -> Unbacked | None:
    """Return the resident memory of `pid` that no file backs, anonymous and shared; None: not readable."""
    found = dict(re.findall(rb"^Rss(Anon|Shmem):\s*(\d+) kB", _read(f"/proc/{pid}/status") or b"", re.MULTILINE))
    if len(found) != 2:
        return None
    shared = int(found[b"Shmem"]) << 10
    return Unbacked((int(found[b"Anon"]) << 10) + shared, shared)


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process in bytes; None: not readable."""
    words = (_read(f"/proc/{pid}/statm") or b"").split()
    return int(words[1]) * _PAGE if len(words) > 1 else None


def host_oom_kills() -> int | None:
    """Return the number of processes that the host's out-of-memory killer has ended; None: not readable."""
    found = re.search(rb"^oom_kill (\d+)", _read("/proc/vmstat") or b"", re.MULTILINE)
    return None if found is None else int(found[1])


def resident_ranges(pid: int, ranges: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return the resident bytes of each range of addresses, given as (base, length); None: not readable.

    The kernel has no shorter way than all of smaps: milliseconds for a process that has loaded torch.
    """
    totals, overlaps = [0] * len(ranges), [0] * len(ranges)
    end = max(base + length for base, length in ranges)
    try:
        with Path(f"/proc/{pid}/smaps").open("rb") as file:
            for line in file:
                if line.startswith(b"Rss:") and any(overlaps):
                    # A mapping may be merged with a neighbour: only the part in the range counts.
                    size = int(line.split()[1]) * 1024
                    totals = [total + min(size, overlap) for total, overlap in zip(totals, overlaps, strict=True)]
                    overlaps = [0] * len(ranges)
                elif line[:1] in b"0123456789abcdef":
                    low, high = (int(text, 16) for text in line.split(maxsplit=1)[0].split(b"-"))
                    if low >= end:
                        break
                    overlaps = [max(0, min(high, base + length) - max(low, base)) for base, length in ranges]
    except OSError:
        return None
    return totals


def cgroups(pid: int) -> str:
    """Return the cgroups of `pid` as /proc lists them, one line per hierarchy; empty: not readable."""
    return (_read(f"/proc/{pid}/cgroup") or b"").decode(errors="replace")


def oom_kill_files(groups: str) -> list[Path]:
    """Return the files with the out-of-memory kills of `groups`: version 2, then version 1."""
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(_CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return [file for file in found if file.is_file()]


def oom_kills(files: list[Path]) -> int | None:
    """Return the count in the last of `files` that has one; None: not readable."""
    texts = (_read(str(file)) or b"" for file in reversed(files))
    found = (re.search(rb"^oom_kill (\d+)$", text, re.MULTILINE) for text in texts)
    return next((int(match[1]) for match in found if match is not None), None)


def sibling(module: str) -> int | None:
    """Return the pid of this process's sibling that runs `module` (`python -m module`); None without one."""
    for children in _children_files(os.getppid()):
        for pid in (_read(str(children)) or b"").split():
            if module.encode() in (_read(f"/proc/{int(pid)}/cmdline") or b"").replace(b"\0", b" ").split():
                return int(pid)
    return None


def children(pids: Iterable[int]) -> dict[int, tuple[int, str]]:
    """Return the other children of `pids` that run a module of this package: their parents and the modules."""
    known, found = set(pids), dict[int, tuple[int, str]]()
    for parent in known:
        listed = (_read(str(file)) for file in _children_files(parent))
        for pid in {int(word) for text in listed for word in (text or b"").split()} - known:
            words = (_read(f"/proc/{pid}/cmdline") or b"").decode(errors="replace").replace("\0", " ").split()
            module = next((word for word in words[1:] if word.startswith("ppengine.")), "")
            if module:
                found[pid] = parent, module
    return found


def _children_files(pid: int) -> list[Path]:
    """Return the files that list the children of each thread; without a descriptor to look, that of the main thread."""
    try:
        return list(Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return [Path(f"/proc/{pid}/task/{pid}/children")]


def catches(pid: int, signal_number: int) -> bool:
    """Return whether process `pid` has a handler for the signal, so that sending it does not end the process."""
    found = re.search(rb"^SigCgt:\s*([0-9a-f]+)", _read(f"/proc/{pid}/status") or b"", re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (signal_number - 1) & 1)
