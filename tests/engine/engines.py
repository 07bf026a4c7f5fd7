"""A running engine as a test sees it: its supervisor's lines, its processes, and all that it must not leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

from ppengine.common import lifeline

HERE = Path(__file__).parent
STEP_VARIABLE = "PPCONSOLE_TEST_STEP_S"
"""Variable with the seconds that each step takes longer in an engine that `end_to_end/preloaded.py` forks."""


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
    """Return the first true answer of `condition`; fail with `what` after `timeout` seconds.

    It looks less and less often: many conditions read all of /proc, and what is waited for needs the core more.
    """
    deadline, pause = time.monotonic() + timeout, 0.005
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)
    return answer


class Running(Protocol):
    """The part of `subprocess.Popen` that tests use."""

    pid: int
    stdout: TextIO

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[list[str], dict[str, str], TextIO, int], Running]
"""Starts a module: words of its command line, environment, stderr, and a descriptor that it inherits by number."""


def run_module(words: list[str], env: dict[str, str], errors: TextIO, line: int) -> Running:
    """Start `python -m` with these words, as users do."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=env,
        pass_fds=(line,),
        start_new_session=True,
        text=True,
    )


class Engine:
    """A supervisor under test, in a session of its own, in the runtime folder `runtime`.

    It ends with the tests' process, however that ends.
    """

    def __init__(
        self, runtime: Path, command: list[str], env: dict[str, str] | None = None, launch: Launch = run_module
    ) -> None:
        self.runtime = runtime
        runtime.mkdir(exist_ok=True)
        self.errors = runtime / f"errors.{time.monotonic_ns()}"
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        read_end, write_end = lifeline.open_pipe()
        self._lifeline: int | None = write_end
        with self.errors.open("w") as errors, os.fdopen(read_end):
            environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": path, **(env or {})}
            self.process = launch([*command, "--lifeline", str(read_end)], environment, errors, read_end)
        self.event = self.read()
        self.pids: dict[str, int] = {}

    def read(self) -> dict[str, Any]:
        """Return the next JSON line of the supervisor's stdout; {} at its end."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    @property
    def run_dir(self) -> Path:
        return Path(self.event["run_dir"])

    @property
    def ring_dir(self) -> Path:
        return Path("/dev/shm") / f"ppconsole-{os.getuid()}-{self.event['id']}"

    def find_processes(self, count: int) -> dict[str, int]:
        """Wait for `count` children of the supervisor; return their pids by role: `core`, `stage0`, `stage0.1`, ..."""
        self.pids = wait_until(lambda: self._children(count), f"{count} children; {self.errors.read_text()}", 60.0)
        return self.pids

    def _children(self, count: int) -> dict[str, int] | None:
        found = {}
        for pid in _children(self.process.pid):
            words = _cmdline(pid).decode().replace("\0", " ").split()
            if "--engine" in words:
                stage = words[words.index("--stage") + 1] if "--stage" in words else ""
                if "--rank" in words and (rank := words[words.index("--rank") + 1]) != "0":
                    stage = f"{stage}.{rank}"
                module = words[words.index("-m") + 1].removesuffix(".__main__").rpartition(".")[2]
                # HTTP processes have their roles in their words.
                role = words[words.index("--role") + 1] if "--role" in words else module
                found["stage" + stage if stage else role] = pid
        return found if len(found) == count else None

    def wait(self, timeout: float = 60.0) -> int:
        """Return the supervisor's exit code."""
        return self.process.wait(timeout)

    def nothing_left(self) -> bool:
        """Tell whether all processes, sockets, folders and rings are gone."""
        return not self.leftovers()

    def leftovers(self) -> list[str]:
        """Return what is still there."""
        left = [f"pid {pid}" for pid in self.pids.values() if alive(pid)]
        left += [str(path) for path in (self.runtime / "ppconsole").glob("*")]
        if "id" in self.event:
            left += [str(path) for path in self.ring_dir.parent.glob(f"{self.ring_dir.name}*")]
            mine, needle = set(self.pids.values()), self.event["id"].encode()
            left += [
                f"pid {pid} of the engine"
                for pid, fields in _processes()
                if int(fields[3]) in mine or needle in _cmdline(pid)
            ]
        return left

    def end(self) -> None:
        """Kill what a failed test may have left."""
        mine = {self.process.pid, *self.pids.values()}
        for pid, fields in _processes():
            if pid in mine or int(fields[3]) in mine:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(20)
        self.process.stdout.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process, without a look at all of /proc, which takes 10 ms."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(word) for word in path.read_text().split()]
    return found


def _processes() -> list[tuple[int, list[str]]]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(path.name), (path / "stat").read_text(errors="replace").rpartition(")")[2].split()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [(pid, fields) for pid, fields in found if fields[0] != "Z"]


def alive(pid: int) -> bool:
    """Tell whether there is such a process, zombies not counted."""
    return any(pid == other for other, _ in _processes())


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
