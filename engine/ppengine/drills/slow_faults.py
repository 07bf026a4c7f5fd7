"""Stages that make progress, but slowly."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ppengine.drills import cgroups
from ppengine.drills.fault_points import Fault, Go, StageParts
from ppengine.drills.hang_faults import crowded
from ppengine.drills.registry import Undo, arm, outside, strike
from ppengine.drills.target import Target

_FACTOR = 4.0
"""Added time of a slow forward, in multiples of its own work."""
_LEAST_S = 0.005
_SEND_S = 0.05
_WIDTH = 384
_FREE_S, _HELD_US = 0.05, 50_000
_SHARE = 0.1
_CORE_SHARE = 0.001
_OBJECTS = 1_000_000
_LOWEST = 19
_HOG = "import select, sys\nwhile not select.select([sys.stdin], [], [], 0)[0]:\n    sum(range(100_000))"


@strike("forward", "slow", "straggler", clears=True)
def slow_sleep(fault: Fault, go: Go, *args: Any) -> Any:
    """Every forward takes five times as long, asleep.

    Verdict: stage K is a straggler: its forwards take 5 times its own baseline.
    """
    begun = time.monotonic()
    answer = go(*args)
    fault.over.wait(max(_LEAST_S, _FACTOR * (time.monotonic() - begun)))
    return answer


@strike("forward", "slow", "straggler", clears=True, held_out=True)
def slow_matmul(fault: Fault, go: Go, *args: Any) -> Any:
    """Every forward takes five times as long, in useless matrix products.

    Verdict: stage K is a straggler: its forwards take 5 times its own baseline.
    """
    begun = time.monotonic()
    answer = go(*args)
    until = time.monotonic() + max(_LEAST_S, _FACTOR * (time.monotonic() - begun))
    matrix = args[0].new_ones(_WIDTH, _WIDTH)
    while time.monotonic() < until:
        matrix @ matrix
    return answer


@strike("forward", "slow", "straggler", clears=True)
def slow_fits(fault: Fault, go: Go, *args: Any) -> Any:
    """In every second second, forwards take nine times as long, asleep.

    Verdict: stage K is a straggler: its forwards take a multiple of its own baseline.
    """
    begun = time.monotonic()
    answer = go(*args)
    if int(begun - fault.since) % 2 == 0:
        fault.over.wait(max(_LEAST_S, 2 * _FACTOR * (time.monotonic() - begun)))
    return answer


@arm("slow", "straggler", clears=True)
def starved(parts: StageParts) -> Undo:
    """All threads of the stage are bound to one core, at the lowest priority, with a process that computes beside them.

    Verdict: stage K is a straggler: it waits for a core.
    """
    cores, before = os.sched_getaffinity(os.getpid()), os.getpriority(os.PRIO_PROCESS, os.getpid())
    core = {min(cores)}
    # A child of the stage: the kernel may weigh priorities within a session alone (autogroup), and each stage has its
    # own. It reads from a pipe of the stage, and ends with it.
    hog = subprocess.Popen([sys.executable, "-c", _HOG], stdin=subprocess.PIPE)
    os.sched_setaffinity(hog.pid, core)
    _bind(core, _LOWEST)

    def undo() -> None:
        hog.kill()
        hog.wait()
        _bind(cores, before)

    return undo


def _bind(cores: set[int], priority: int) -> None:
    """Bind all threads of this process to `cores`, at `priority`."""
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a user may not raise a priority
            os.sched_setaffinity(int(path.name), cores)
            os.setpriority(os.PRIO_PROCESS, int(path.name), priority)


@outside("slow", "straggler", clears=True)
def cpu_throttle(target: Target) -> Undo:
    """The stage gets a tenth of a processor from its cgroup.

    Verdict: stage K is a straggler: throttled by its cgroup.
    """
    return cgroups.throttle(target.pid, _SHARE)


@arm("slow", "gil_held", clears=True)
def gil_half(parts: StageParts) -> Undo:
    """A thread sleeps 50 ms with the GIL in C code, then 50 ms without it, over and over.

    Verdict: stage K's GIL is held half of the time, with the stack of the thread that holds it.
    """
    over, libc = threading.Event(), ctypes.PyDLL(None)

    def hold() -> None:
        while not over.wait(_FREE_S):
            libc.usleep(_HELD_US)

    threading.Thread(target=hold, name="gil-half", daemon=True).start()
    return over.set


@arm("slow", "gil_held", clears=True)
def gil_turns(parts: StageParts) -> Undo:
    """A thread computes in Python without end, and takes each turn that Python grants it.

    Verdict: stage K's GIL is held in turns, with the stack of the thread that holds it.
    """
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    threading.Thread(target=spin, name="gil-turns", daemon=True).start()
    return over.set


def _fill(parts: StageParts) -> list[list[int]]:
    return [[] for _ in range(_OBJECTS)]


@strike("forward", "slow", "gil_held", "straggler", clears=True, prepare=_fill)
def gc_storm(fault: Fault, go: Go, *args: Any) -> Any:
    """Every forward begins with a full garbage collection, and a library keeps a million objects.

    Verdict: stage K's GIL is held by its main thread in a garbage collection, or stage K is a straggler.
    """
    gc.collect()
    return go(*args)


@strike("send", "slow", "link", "straggler", clears=True)
def slow_send(fault: Fault, go: Go, *args: Any) -> Any:
    """Every message to the next stage waits for 50 ms before it is sent.

    Verdict: the link behind stage K is slow.
    """
    fault.over.wait(_SEND_S)
    return go(*args)


@arm("slow", "link", "straggler", clears=True)
def slow_send_thread(parts: StageParts) -> Undo:
    """Messages go by the send thread, as big ones do, and it sleeps 50 ms before each.

    Verdict: the link behind stage K is slow.
    """
    sender, over = crowded(parts, "slow-send-thread"), threading.Event()
    deliver = sender._deliver

    def late(parcel: Any) -> None:
        over.wait(_SEND_S)
        deliver(parcel)

    sender._deliver = late

    def undo() -> None:
        del sender._deliver
        over.set()
        sender._count(-1)

    return undo


@outside("slow", "core", clears=True, on="core", held_out=True)
def core_throttle(target: Target) -> Undo:
    """The engine core gets a thousandth of a processor from its cgroup.

    Verdict: the engine core is slow: the stages wait for steps that it does not send.
    """
    return cgroups.throttle(target.role("core"), _CORE_SHARE)
