"""Stacks of a live process from outside: py-spy first, the process's own faulthandler if py-spy fails."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from ppengine.common import debug_attach
from ppengine.common.procfs import catches, read_stat
from ppengine.protocol.inspection import MAIN_THREAD, StageStacks, ThreadStack

NATIVE_S, PLAIN_S, FALLBACK_S = 2.5, 1.5, 0.8
"""Time limits of the three ways in seconds: less, together, than the five in which a verdict gets its stacks."""
SELF_TEST_S = 10.0
"""Time limit in seconds: nothing waits for the test, and a machine that is busy at a start must pass it."""
_MAX_CHARACTERS = 200_000
_FAULT_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FAULT_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class Ability(NamedTuple):
    """The stacks that this machine allows. `text` is one line for users, with the reason if some are missing."""

    spy: bool
    native: bool
    text: str


class _Frame(msgspec.Struct):
    name: str
    short_filename: str | None = None
    filename: str = ""
    line: int = 0


class _Thread(msgspec.Struct):
    frames: list[_Frame]
    thread_name: str | None = None
    os_thread_id: int | None = None
    owns_gil: bool = False


def self_test() -> Ability:
    """Try py-spy on this very process, which allows it as the stages do."""
    debug_attach.allow()
    threads, why = spy(os.getpid(), native=True, timeout=SELF_TEST_S)
    if threads:
        return Ability(True, True, "py-spy sees Python and native frames")
    threads, plain = spy(os.getpid(), timeout=SELF_TEST_S)
    if threads:
        return Ability(True, False, f"py-spy sees Python frames alone; native ones not: {why}")
    return Ability(False, False, f"stacks come from faulthandler alone: {plain}")


def take(stage: int | None, pid: int | None, stack_file: Path, native: bool = False) -> StageStacks:
    """Return the stacks of `pid`, a stage's or (None) the core's; without any, `error` has the reason."""
    stat = None if pid is None else read_stat(pid)
    if pid is None or stat is None or stat.state == "Z":
        return StageStacks(stage=stage, pid=pid, error="there is no such process any more")
    stopped = stat.state in "Tt"
    threads, error = spy(pid, native=True, timeout=NATIVE_S) if native and not stopped else ([], "")
    native = bool(threads)
    if not threads:
        threads, error = spy(pid, stopped=stopped, timeout=PLAIN_S)
    if threads:
        return StageStacks(stage=stage, pid=pid, text=render(threads), threads=threads, native=native)
    text, second = _ask_process(pid, stopped=stopped, stack_file=stack_file)
    error = f"{error}; {second}" if second else f"{error}; taken by faulthandler instead"
    return StageStacks(stage=stage, pid=pid, text=text[:_MAX_CHARACTERS], threads=parse_faulthandler(text), error=error)


def spy(
    pid: int, *, native: bool = False, stopped: bool = False, timeout: float = PLAIN_S
) -> tuple[list[ThreadStack], str]:
    """Return (threads, error) of py-spy. A stopped process is read without a pause."""
    program = _find()
    if program is None:
        return [], "py-spy is not installed: pip install py-spy"
    how = ["--native"] if native else ["--nonblocking"] if stopped else []
    command = [program, "dump", "--json", *how, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return [], f"py-spy gave no answer in {timeout:g} s"
    except OSError as error:
        return [], f"py-spy: {error.strerror}"
    if done.returncode != 0:
        return [], f"py-spy: {_reason(done.stderr.decode('utf-8', 'replace'))}"
    try:
        found = msgspec.json.decode(done.stdout, type=list[_Thread])
    except msgspec.MsgspecError as error:
        return [], f"py-spy's answer is not understood: {error}"
    threads = [
        ThreadStack(
            name=thread.thread_name or f"thread {thread.os_thread_id}",
            os_id=thread.os_thread_id,
            owns_gil=thread.owns_gil,
            frames=[_frame_text(frame) for frame in thread.frames],
        )
        for thread in found
    ]
    return sorted(threads, key=lambda thread: (thread.name != MAIN_THREAD, thread.name)), ""


def render(threads: list[ThreadStack]) -> str:
    """Return stacks as text, the main thread first, newest frames first."""
    lines: list[str] = []
    for thread in threads:
        lines.append(thread.name + (" (holds the GIL)" if thread.owns_gil else ""))
        lines += [f"    {frame}" for frame in thread.frames]
    return "\n".join(lines)[:_MAX_CHARACTERS]


def parse_faulthandler(text: str) -> list[ThreadStack]:
    """Return the threads in the text of a faulthandler; the one that took the signal is the main one."""
    threads: list[ThreadStack] = []
    for line in text.splitlines():
        if head := _FAULT_THREAD.match(line):
            name = MAIN_THREAD if head[1] == "Current thread" else head[3] or f"thread 0x{head[2].lstrip('0')}"
            threads.append(ThreadStack(name=name))
        elif threads and (frame := _FAULT_FRAME.match(line)):
            threads[-1].frames.append(f"{frame[3]} {Path(frame[1]).name}:{frame[2]}")
    return sorted(threads, key=lambda thread: (thread.name != MAIN_THREAD, thread.name))


def _frame_text(frame: _Frame) -> str:
    file = frame.short_filename or frame.filename
    # An address without a symbol differs in every process and means nothing to a reader.
    name = "?" if frame.name.startswith("0x") else frame.name
    return f"{name} {file}:{frame.line}" if frame.line else f"{name} ({file})"


def _find() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _reason(text: str) -> str:
    """Return the message and its causes in one line, without py-spy's own backtrace."""
    head = text.partition("Stack backtrace")[0]
    return " ".join(head.split())[:300] or "no message"


def _ask_process(pid: int, *, stopped: bool, stack_file: Path) -> tuple[str, str]:
    """Return (text, error) of the faulthandler that core and stages register for SIGUSR2."""
    if stopped:
        return "", "a stopped process takes no signal"
    if not catches(pid, signal.SIGUSR2):
        return "", "the process has no handler for SIGUSR2"
    before = stack_file.stat().st_size if stack_file.is_file() else 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + FALLBACK_S
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
    return text, "" if text else f"nothing came within {FALLBACK_S:g} s at {stack_file.name}"
