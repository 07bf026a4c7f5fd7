"""The supervisor's side of the fork server: orders for stages, and the children that come back."""

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
from ppengine.common.child_process import Child, open_log, spawn
from ppengine.common.open_files import FILES_LEFT, open_files
from ppengine.protocol.reports import ProcessInfo
from ppengine.supervisor.launch.launcher import ExecutorError

_PR_SET_CHILD_SUBREAPER = 36
_WAIT_S = 0.01
_PID_BYTES = 32


class Adopted:
    """A child that another process forked, with the interface of `subprocess.Popen`."""

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
        """Send SIGTERM unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class _Order(NamedTuple):
    log: Path
    line: int
    words_from: int


class ForkServer:
    """A process that forks one stage per order, in order, once it has loaded."""

    def __init__(self, module: str, folder: Path) -> None:
        """Start the process, which loads `module` and logs to `folder`. Raises ExecutorError, OSError."""
        # The kernel gives an orphan to its nearest ancestor with this flag.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ExecutorError(f"this system does not let a process adopt orphans (PR_SET_CHILD_SUBREAPER): {reason}")
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        self._open: deque[_Order] = deque()
        with theirs:
            args = ["--module", module, "--orders", str(theirs.fileno()), "--run", str(folder)]
            try:
                self._process = spawn(
                    "ppengine.supervisor.launch.forkserver",
                    args,
                    log=folder / "forkserver.log",
                    hand_over=(theirs.fileno(),),
                )
            except BaseException:
                self._orders.close()
                raise

    def order(self, module: str, args: Sequence[str], log: Path) -> None:
        """Order a stage: `main` of `module` with `args`, output to `log`. Raises OSError if the fork server is gone."""
        read_end, write_end = lifeline.open_pipe()
        output = -1
        try:
            output = open_log(log)
            words_from = os.fstat(output).st_size
            socket.send_fds(self._orders, [msgspec.json.encode([module, *args])], [output, read_end])
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
            if output >= 0:
                os.close(output)
        self._open.append(_Order(log, write_end, words_from))

    def take(self) -> Child | None:
        """Return the stage of the oldest open order, None until it is forked."""
        try:
            pid = self._orders.recv(_PID_BYTES)
        except (BlockingIOError, ConnectionError):
            return None
        if not pid:
            return None
        order = self._open.popleft()
        return Child(Adopted(int(pid)), order.log, order.line, order.words_from)

    def exit_text(self) -> str:
        """Return how the process ended, empty while it runs. Open orders are lost with it."""
        info = self.info()
        return "" if info.exit_code is None else info.detail or f"exit code {info.exit_code}"

    def info(self) -> ProcessInfo:
        """Return what a report says of it."""
        return self._process.info("forkserver")

    @property
    def cramped(self) -> bool:
        """Whether it has no descriptors for another stage, or fewer than this process may have: stages inherit that."""
        theirs, ours = open_files(self.pid), open_files(os.getpid())
        if theirs is None or ours is None:
            return False
        return theirs.limit - theirs.used < FILES_LEFT or theirs.limit < ours.limit

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def close(self) -> None:
        """Kill the fork server. Forked stages keep running."""
        self._process.kill()
        self._process.wait(1.0)
        self._process.close()
        self._orders.close()
        while self._open:
            os.close(self._open.popleft().line)
