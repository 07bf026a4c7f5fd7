"""The supervisor's side of the nursery (`forkserver`): orders for stages, and the children they become."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ppengine.common import lifeline
from ppengine.common.child_process import Child, spawn
from ppengine.supervisor.launch.launcher import ExecutorError

_PR_SET_CHILD_SUBREAPER = 36
_ROOM = 1024
"""Characters that the arguments of a stage may have to be shown whole."""
_WAIT_S = 0.01
_PID_BYTES = 32


class Adopted:
    """A child that this process did not fork itself, seen like one that it did (`subprocess.Popen`)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal), None while it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored here, and the kernel has kept nothing
                pid, status = self.pid, 1 << 8
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a stage", timeout)
            time.sleep(_WAIT_S)
        return code

    def terminate(self) -> None:
        """Ask it to end (SIGTERM), unless it has."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class _Order(NamedTuple):
    log: Path
    line: int
    words_from: int


class Nursery:
    """A process that forks stages on order, in order, from the moment that it has loaded."""

    def __init__(self, module: str, folder: Path) -> None:
        """Start it; it loads `module`, and leaves its log in `folder`. Raises ExecutorError, OSError."""
        # An orphan falls to its nearest ancestor that has asked for it.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ExecutorError(f"this system does not let a process adopt orphans (PR_SET_CHILD_SUBREAPER): {reason}")
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        self._open: deque[_Order] = deque()
        with theirs:
            args = ["--module", module, "--orders", str(theirs.fileno()), "--run", str(folder), "--room", " " * _ROOM]
            try:
                self._process = spawn(
                    "ppengine.supervisor.launch.forkserver",
                    args,
                    log=folder / "nursery.log",
                    hand_over=(theirs.fileno(),),
                )
            except BaseException:
                self._orders.close()
                raise

    def order(self, module: str, args: Sequence[str], log: Path) -> None:
        """Ask for a stage: `main` of `module` with `args`, output to `log`. Raises OSError: nobody is there."""
        read_end, write_end = lifeline.open_pipe()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            words_from = os.fstat(output).st_size
            socket.send_fds(self._orders, [msgspec.json.encode([module, *args])], [output, read_end])
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
            os.close(output)
        self._open.append(_Order(log, write_end, words_from))

    def born(self) -> Child | None:
        """Return the stage of the oldest open order, None while it is not there."""
        try:
            pid = self._orders.recv(_PID_BYTES)
        except (BlockingIOError, ConnectionError):
            return None
        if not pid:
            return None
        order = self._open.popleft()
        return Child(Adopted(int(pid)), order.log, order.line, order.words_from)

    def lost(self) -> str:
        """Return how it ended, empty while it runs. What was ordered then will not come."""
        info = self._process.info("nursery")
        return "" if info.exit_code is None else info.detail or f"exit code {info.exit_code}"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """Kill it. Stages that are there go on."""
        self._process.kill()
        self._process.wait(1.0)
        self._process.close()
        self._orders.close()
        while self._open:
            os.close(self._open.popleft().line)
