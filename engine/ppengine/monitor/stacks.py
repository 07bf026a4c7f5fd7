"""Stacks of a live process from outside: py-spy first, the process's own faulthandler where py-spy fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from ppengine.monitor.proc import catches, read_stat
from ppengine.protocol.control import StageStacks

TIMEOUT_S = 5.0
"""For py-spy; a plain dump takes 10 to 40 ms."""
_FALLBACK_S = 1.0
_MAX_CHARACTERS = 200_000


def take(stage: int, pid: int | None, stack_file: Path, timeout: float = TIMEOUT_S) -> StageStacks:
    """Return the stacks of `pid`; where there are none, `error` says why and what would help."""
    stat = None if pid is None else read_stat(pid)
    if pid is None or stat is None or stat.state == "Z":
        return StageStacks(stage=stage, pid=pid, error="there is no such process any more")
    text, error = spy(pid, stopped=stat.state in "Tt", timeout=timeout)
    if not text:
        text, second = _ask_process(pid, stopped=stat.state == "T", stack_file=stack_file)
        error = f"{error}; {second}" if second else f"{error}; taken by faulthandler instead"
    return StageStacks(stage=stage, pid=pid, text=text[:_MAX_CHARACTERS], error=error)


def spy(pid: int, *, stopped: bool, timeout: float) -> tuple[str, str]:
    """Return (text, error) of py-spy. A stopped process cannot be paused again: it is read as it stands."""
    program = _find()
    if program is None:
        return "", "py-spy is not installed: pip install py-spy"
    command = [program, "dump", *(["--nonblocking"] if stopped else []), "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return "", f"py-spy gave no answer in {timeout:g} s"
    except OSError as error:
        return "", f"py-spy: {error.strerror}"
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "replace"), ""
    return "", f"py-spy: {_reason(done.stderr.decode('utf-8', 'replace'))}"


def _find() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _reason(text: str) -> str:
    """Return the message and its causes in one line, without py-spy's own backtrace."""
    head = text.partition("Stack backtrace")[0]
    return " ".join(head.split())[:300] or "no message"


def _ask_process(pid: int, *, stopped: bool, stack_file: Path) -> tuple[str, str]:
    """Return (text, error) of the faulthandler that a stage registers for SIGUSR2."""
    if stopped:
        return "", "a stopped process takes no signal"
    if not catches(pid, signal.SIGUSR2):
        return "", "the process has no handler for SIGUSR2"
    before = stack_file.stat().st_size if stack_file.is_file() else 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _FALLBACK_S
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if stack_file.is_file() and stack_file.stat().st_size > before:
            with stack_file.open("rb") as file:
                file.seek(before)
                fresh = file.read(_MAX_CHARACTERS).decode("utf-8", "replace")
            if fresh == text:
                return text, ""
            text = fresh
    return text, "" if text else f"nothing came within {_FALLBACK_S:g} s at {stack_file.name}"
