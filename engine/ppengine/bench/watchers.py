"""What watching costs: throughput and CPU seconds with a real console on a pseudo-terminal, and without."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
SETTLE_S, SETTLED_S = 20.0, 0.5
"""How long a console may take to come up, and how long it must have been calm."""


class AttachedConsole:
    """A console of this engine on a terminal of 160 x 48, drawing once a second, while the block lasts.

    `cores`: those that it may use; None: all.
    """

    def __init__(self, engine_id: str, cores: set[int] | None = None) -> None:
        self._engine_id, self._cores = engine_id, cores

    def __enter__(self) -> AttachedConsole:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "48"}
        command = [sys.executable, "-m", "ppconsole", "attach", self._engine_id, "--read-only"]
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        # A process of its own: threads of this one would take turns with the client of the engine.
        self._terminal = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(ours)
        if self._cores is not None:
            for process in (self._process, self._terminal):
                os.sched_setaffinity(process.pid, self._cores)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._terminal.terminate()
        self._terminal.wait()

    def settle(self) -> None:
        """Wait until the console has loaded and drawn, so that its start is not taken for its watching."""
        used, until = cpu_seconds(self.pid), time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            time.sleep(SETTLED_S)
            before, used = used, cpu_seconds(self.pid)
            if before and used - before < SETTLED_S / 5:
                return

    @property
    def pid(self) -> int:
        """Process id of the console."""
        return self._process.pid


def keep_apart(pids: list[int]) -> set[int]:
    """Keep all threads of `pids` to the lower half of the cores that this process may use; return the upper half."""
    cores = sorted(os.sched_getaffinity(0))
    lower, upper = set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 :])
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), lower)
    return upper


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process so far; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def roles_of(supervisor: int) -> dict[str, list[int]]:
    """Return the pids of an engine's processes by what they are: `engine` (core, stages) and `watchers`."""
    roles: dict[str, list[int]] = {"engine": [], "watchers": []}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            words = path.with_name("cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) != supervisor:
            continue
        module = next((word.decode() for word in words if word.startswith(b"ppengine.")), "")
        kind = "watchers" if module.startswith("ppengine.gateway") else "engine"
        roles[kind].append(int(path.parent.name))
    return roles
