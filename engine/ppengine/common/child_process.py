"""How the processes of an engine are started: a fresh interpreter, a log file, a session of its own, a lifeline.

Stages are forked instead (`supervisor/launch/forkserver`), and are children like the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ppengine.common import lifeline, logs
from ppengine.common.call_page import take_calls
from ppengine.common.oom_kills import OomWatch
from ppengine.protocol.backend_calls import BackendCall, while_text
from ppengine.protocol.reports import ProcessInfo

_TAIL_BYTES = 16 * 1024
_LINE_CHARACTERS = 500
_THROWN = "what():"
CRASHED = 70
"""Exit code of a process that ends by an unexpected error; others are its own decision."""


class Process(Protocol):
    """The part of `subprocess.Popen` that `Child` uses."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""

    def terminate(self) -> None:
        """Send SIGTERM."""


class Child:
    """One started process. Its parent holds the lifeline until `close`, or until it dies itself."""

    def __init__(self, process: Process, log: Path | None, line: int, words_from: int = 0) -> None:
        self.log = log
        self._process = process
        self._line: int | None = line
        self._words_from = words_from
        """Offset of its own lines in the log: a restarted stage appends to the log of its predecessor."""
        self._end: str | None = None
        self._calls: list[BackendCall] = []
        """Calls of backends in which it has ended."""
        self._memory = OomWatch(process.pid)

    @property
    def pid(self) -> int:
        """Process id, and id of its session and group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal), None while it runs."""
        code = self._process.poll()
        if code is None:
            self._memory.look()
        return code

    def wait(self, timeout: float) -> int | None:
        """Wait up to `timeout` seconds for its end and return the exit code, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it and what it started, also when it is stopped. Does nothing once it has ended."""
        if self._process.poll() is not None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not begun its session yet
            kill_all([self.pid])

    def close(self) -> None:
        """Let go of the lifeline: a child that still runs leaves."""
        if self._line is not None:
            os.close(self._line)
            self._line = None

    def info(self, role: str, stage: int | None = None, rank: int | None = None) -> ProcessInfo:
        """Return what a report says of it."""
        code = self.poll()
        if code is not None and self._end is None:
            self._end = describe_exit(code, self.log, self._words_from)
            if code == -signal.SIGKILL and (why := self._memory.words()):
                self._end += f": {why}"
            if self.log is not None and (calls := take_calls(self.log, code)):
                self._calls, self._end = calls, (self._end or f"exit code {code}") + while_text(calls)
        return ProcessInfo(
            role=role, stage=stage, rank=rank, pid=self.pid, exit_code=code, detail=self._end or "", calls=self._calls
        )


def spawn(
    module: str,
    args: Sequence[str],
    *,
    log: Path | None,
    env: Mapping[str, str] | None = None,
    hand_over: tuple[int, ...] = (),
) -> Child:
    """Start `python -m module *args --lifeline FD` and return it.

    stdin is empty; stdout and stderr are appended to `log` (None: inherited). `env` is added to this process's
    environment; `hand_over`: descriptors that it inherits. It gets a session of its own, so that a terminal's Ctrl-C
    reaches only the foreground process. Start from the main thread where you can: see `lifeline`.
    """
    read_end, write_end = lifeline.open_pipe()
    output = None
    try:
        output = None if log is None else open_log(log)
        words_from = 0 if output is None else os.fstat(output).st_size
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args, "--lifeline", str(read_end)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            pass_fds=(read_end, *hand_over),
            start_new_session=True,
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
        if output is not None:
            os.close(output)
    return Child(process, log, write_end, words_from)


def open_log(path: Path) -> int:
    """Open a log file to append to it, and return its descriptor. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def session(leader: int) -> list[int]:
    """Return the processes of the session that `leader` began, itself first; zombies are not counted."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != b"Z":
            found.append(int(path.name))
    return sorted(found, key=lambda pid: (pid != leader, pid))


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes; those that are gone are fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def describe_exit(code: int, log: Path | None, start: int = 0) -> str:
    """Return one line about an end: the signal, or the last words of the log from byte `start` on; empty for 0.

    C++ code that aborts over an exception, as torch's does when memory is freed behind a CUDA error, has said which.
    """
    if code == 0:
        return ""
    if code < 0:
        how = f"killed by {signal_name(-code)}"
        thrown = thrown_words(log, start) if log is not None and code == -signal.SIGABRT else ""
        return f"{how}: {thrown}" if thrown else how
    return (last_words(log, start) if log is not None else "") or f"exit code {code}"


def is_unclean(code: int | None) -> bool:
    """Return whether a process ended by a signal or an unexpected error, so that another one may do better."""
    return code is not None and (code < 0 or code == CRASHED)


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and so on; `signal N` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(log: Path, start: int = 0) -> str:
    """Return the last line that begins with `error:`, without that word; else the last line that is not routine."""
    lines = [line.strip() for line in tail(log, 200, start) if line.strip() and not logs.is_routine(line)]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1][:_LINE_CHARACTERS]


def thrown_words(log: Path, start: int = 0) -> str:
    """Return what the C++ runtime has written of the exception that ended a process; empty where it has not."""
    found = [line.strip() for line in tail(log, 200, start) if line.strip().startswith(_THROWN)]
    return found[-1].removeprefix(_THROWN).strip()[:_LINE_CHARACTERS] if found else ""


def tail(log: Path, count: int, start: int = 0) -> list[str]:
    """Return up to `count` last lines of `log` from byte `start` on; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


def until(condition: Callable[[], bool], timeout: float, interval: float = 0.01) -> bool:
    """Ask `condition` every `interval` seconds for up to `timeout` seconds; return its last answer."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True
