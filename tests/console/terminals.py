"""Programs on pseudo-terminals: their CPU time, their memory, the bytes they write, and how soon a key shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")
START_S, SETTLE_S, CALM_SHARE = 12.0, 60.0, 0.2
"""Least and longest time of a start, and the share of a core below which it is over: a console reads its history."""
_CONTROLS = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_=>]")

_CPU_CLOCK = 2
"""The lowest bits of the number of another process's CPU clock: all of its threads, in nanoseconds."""

Shows = Callable[[str], bool]
"""Whether the text that a program wrote shows what is waited for."""


class Answer(NamedTuple):
    """Seconds from a key to its visible effect, and the CPU seconds of the program meanwhile."""

    wall_s: float
    cpu_s: float


class Unanswered(Exception):
    """A key had no visible effect in time."""


class Terminal:
    """A program on a terminal of `columns` x `lines`, while the block lasts."""

    def __init__(self, command: list[str], columns: int, lines: int, **environment: str) -> None:
        self._command, self._size = command, (columns, lines)
        self._environment = {
            **os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(columns),
            "LINES": str(lines), **environment,
        }  # fmt: skip
        self.written = 0
        """Bytes that the program has written."""
        self._since = bytearray()
        self._at = 0.0
        self._fresh = threading.Condition()

    def __enter__(self) -> Terminal:
        self._ours, theirs = pty.openpty()
        columns, lines = self._size
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._process = subprocess.Popen(
            self._command, stdin=theirs, stdout=theirs, stderr=theirs, env=self._environment, start_new_session=True
        )
        os.close(theirs)
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # the program has closed its side
                return
            now = time.perf_counter()
            with self._fresh:
                self.written += len(data)
                self._since += data
                self._at = now
                self._fresh.notify_all()

    # --- figures ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the program has not ended."""
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Return user and system time of the program so far in seconds, all of its threads included."""
        return time.clock_gettime(~self._process.pid << 3 | _CPU_CLOCK)

    def rss_mib(self) -> float:
        """Return its resident memory in MiB."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE / 2**20

    def settle(self) -> float:
        """Wait until the program has started and is calm; return the CPU seconds of its start."""
        time.sleep(START_S)
        until = time.monotonic() + SETTLE_S - START_S
        while self.running:
            used = self.cpu_s()
            time.sleep(1.0)
            if self.cpu_s() - used < CALM_SHARE or time.monotonic() > until:
                return used
        raise SystemExit(f"{self._command[0]} ended with {self._process.returncode}: {self.text()[-300:]}")

    # --- keys ---------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the text written since the last key, without control sequences."""
        with self._fresh:
            return _CONTROLS.sub(b"", bytes(self._since)).decode(errors="replace")

    def press(self, keys: str, shows: Shows, timeout: float = 5.0) -> Answer:
        """Write `keys` and return the time until the output shows their effect. Raises Unanswered."""
        with self._fresh:
            self._since.clear()
        used, begun = self.cpu_s(), time.perf_counter()
        os.write(self._ours, keys.encode())
        seen = 0
        while True:
            with self._fresh:
                while len(self._since) == seen:
                    left = begun + timeout - time.perf_counter()
                    if left <= 0 or not self._fresh.wait(left):
                        raise Unanswered(f"{keys!r} shows nothing within {timeout:g} s: {self.text()[-160:]!r}")
                seen, at = len(self._since), self._at
            by_now = self.cpu_s()
            if shows(self.text()):
                return Answer(at - begun, by_now - used)
