"""The tour on the real engine, in a terminal: each step has its effect, and nothing is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

STEPS = ["attach", "submit", "load", "break", "diagnose", "mend", "recovered", "halve", "undo", "end"]


class Tour:
    """A tour in a pseudo terminal, with temporary and audit folders of its own."""

    def __init__(self, folder: Path, *arguments: str, size: tuple[int, int] = (120, 36)) -> None:
        self.temporary, self.audits = folder / "t", folder / "audit"
        self.temporary.mkdir()
        self.audits.mkdir(mode=0o700)
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ |= {
                "TMPDIR": str(self.temporary), "PPCONSOLE_AUDIT_DIR": str(self.audits), "TERM": "xterm-256color",
                "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            os.execv(sys.executable, [sys.executable, "-m", "ppconsole", "tour", *arguments])
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        os.set_blocking(self._terminal, False)

    def read(self) -> None:
        """Take what is there."""
        try:
            self.text += os.read(self._terminal, 1 << 20).decode("utf-8", "replace")
        except (BlockingIOError, OSError):
            time.sleep(0.05)

    def until(self, ready: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, f"{what}; the end of its output: {self.text[-3000:]}"
            self.read()

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def ended(self) -> bool:
        """Whether the tour has ended; its exit code is then `code`."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
            for _ in range(5):
                self.read()
        return bool(pid)

    def left(self) -> list[str]:
        """Files of the tour, and processes with the mark of its folder."""
        found = list(map(str, self.temporary.iterdir()))
        mark = f"TMPDIR={self.temporary}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes():
                    found.append(str(path))
            except OSError:
                continue  # it ended meanwhile, or is not ours
        return found


def audited(folder: Path) -> list[str]:
    """Verbs that had their effect, by the audit logs."""
    lines = [json.loads(line) for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line["verb"] for line in lines if line["outcome"] == "applied" and not line["dry_run"]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder with a short path: sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp") as name:
        yield Path(name)


def test_each_step_of_the_tour_happens_in_the_engine(folder: Path) -> None:
    tour = Tour(folder, "--auto", "--speed", "20", "--json", size=(80, 24))
    tour.until(tour.ended, "its end", 240.0)
    assert tour.code == 0, tour.text[-3000:]
    report = json.loads(tour.text[tour.text.index('{"steps"') :].splitlines()[0])
    assert [step["name"] for step in report["steps"]] == STEPS and report["failure"] == ""
    facts = {step["name"]: step["fact"] for step in report["steps"]}
    assert re.match(r"stopped stage 1 with [1-9]\d* running: ", facts["break"]), "output that stops"
    assert "continue 1" in facts["diagnose"]
    assert "0.9 to 0.45" in facts["halve"] and "0.45 to 0.9" in facts["undo"]
    placed = re.sub(r"\x1b\[\d+;\d+H", "\n", tour.text)  # Else the end of a row meets the begin of another.
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", placed)
    # At 80 cells their number is cut off once that of the step is long: `consoles:1` may show for a moment, or never.
    assert set(re.findall(r"consoles:(\d+)", plain)) in ({"0"}, {"1"}, {"0", "1"})
    assert "…━" not in plain, "each caption fits 80 cells"
    verbs = [verb for verb in audited(tour.audits) if verb != "submit"]
    assert verbs == ["fault", "continue", "set-memory", "set-memory"], "by the engine's own log"
    tour.until(lambda: not tour.left(), f"nothing is left, but {tour.left()}", 20.0)


# `q` ends it by the same line as Ctrl-C, which must not become a signal here.
@pytest.mark.parametrize("end", ["\x03", signal.SIGTERM])
def test_a_tour_that_is_left_halfway_leaves_nothing(folder: Path, end: str | signal.Signals) -> None:
    tour = Tour(folder, size=(80, 24))
    tour.until(lambda: "tour 2 of 10" in tour.text, "the first step")
    if isinstance(end, str):
        tour.press(end)
    else:
        os.kill(tour.pid, end)
    tour.until(tour.ended, "its end", 60.0)
    tour.until(lambda: not tour.left(), f"nothing is left, but {tour.left()}", 20.0)
