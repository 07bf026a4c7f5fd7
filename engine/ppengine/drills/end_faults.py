"""Stages that end, or are brought to a stop."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ppengine.common import procfs
from ppengine.drills import cgroups
from ppengine.drills.fault_points import Fault, Go
from ppengine.drills.registry import Undo, outside, strike
from ppengine.drills.target import Target, pause
from ppengine.drills.tracer import Tracer

_MIB = 2**20
_ROOM = 64 * _MIB
_WANTED = 1024 * _MIB
_SEEN_S = 0.3
_ALARM_S = 0.05


class InjectedError(Exception):
    """The exception of the fault `exception`."""


@outside("death", "dead")
def sigkill(target: Target) -> None:
    """The stage gets SIGKILL.

    Verdict: stage K was killed by SIGKILL, and no cgroup ran out of memory.
    """
    os.kill(target.pid, signal.SIGKILL)


@outside("death", "dead", held_out=True)
def sigterm(target: Target) -> None:
    """The stage gets SIGTERM, as from an operator's kill or a machine that goes down.

    Verdict: stage K was killed by SIGTERM.
    """
    os.kill(target.pid, signal.SIGTERM)


@outside("death", "dead")
def sigusr1(target: Target) -> None:
    """The stage gets SIGUSR1, for which it has no handler.

    Verdict: stage K was killed by SIGUSR1, which any process of its user or of root can send.
    """
    os.kill(target.pid, signal.SIGUSR1)


def _limit_cpu(target: Target) -> None:
    pid = target.pid
    stat = procfs.read_stat(pid)
    _, hard = resource.prlimit(pid, resource.RLIMIT_CPU)
    resource.prlimit(pid, resource.RLIMIT_CPU, (int(stat.cpu_s if stat else 0.0) + 1, hard))


@strike("forward", "death", "dead", before=_limit_cpu)
def rlimit_cpu(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage gets a limit of CPU time, less than a second away, and a forward computes until it is there.

    Verdict: stage K was killed by SIGXCPU: by the kernel, at its limit of CPU time.
    """
    while True:
        hashlib.pbkdf2_hmac("sha256", b"ppconsole", b"salt", 100_000)


@strike("forward", "death", "dead", held_out=True)
def own_alarm(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage sets itself a timer, whose signal has no handler.

    Verdict: stage K was killed by SIGALRM.
    """
    if fault.first():  # each forward would put it off
        signal.setitimer(signal.ITIMER_REAL, _ALARM_S)
    return go(*args)


@strike("forward", "death", "crashed")
def sigsegv(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage reads an address without memory, inside a forward.

    Verdict: stage K crashed by SIGSEGV in a forward.
    """
    return ctypes.string_at(1)


@strike("forward", "death", "crashed")
def sigabrt(fault: Fault, go: Go, *args: Any) -> Any:
    """C code aborts inside a forward.

    Verdict: stage K crashed by SIGABRT in a forward.
    """
    os.abort()


@strike("forward", "death", "crashed", held_out=True)
def sigbus(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage reads shared memory whose file was cut short behind it, inside a forward.

    Verdict: stage K crashed by SIGBUS in a forward.
    """
    descriptor = os.memfd_create("cut")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    shared = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.ftruncate(descriptor, 0)
    return shared[0]


@strike("forward", "death", "crashed")
def exception(fault: Fault, go: Go, *args: Any) -> Any:
    """A step raises an unexpected exception. The process stays, and does nothing more.

    Verdict: stage K crashed in step n: InjectedError.
    """
    raise InjectedError(f"fault on demand at {fault.parts.name}")


@strike("step", "death", "crashed", "dead")
def sys_exit(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop calls sys.exit(3).

    Verdict: stage K ended with exit code 3 although it was not stopped.
    """
    sys.exit(3)


@strike("step", "death", "dead", "crashed", held_out=True)
def quiet_exit(fault: Fault, go: Go, *args: Any) -> Any:
    """The process ends with exit code 0 in the middle of a step, without a log line.

    Verdict: stage K ended with exit code 0 although it was not stopped.
    """
    os._exit(0)


@strike("forward", "death", "out_of_memory")
def memory_error(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage allocates 1 GiB while its address space is limited to 64 MiB more than it uses.

    Verdict: stage K ran out of memory in step n.
    """
    have = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + _ROOM, resource.RLIM_INFINITY))
    args[0].new_ones(_WANTED // args[0].itemsize)
    return go(*args)


def _limit(target: Target) -> Undo:
    return cgroups.limit_memory(target.pid, _ROOM)


@strike("forward", "death", "killed_oom", before=_limit)
def oom_kill(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage gets a memory cgroup of 64 MiB and, a moment later, writes to 1 GiB: the kernel's OOM killer ends it.

    Verdict: stage K was killed by the OOM killer of its cgroup (oom_kill +1).
    """
    # A real process is in its group long before: the agent samples a few times a second.
    time.sleep(_SEEN_S)
    bytearray(_WANTED)[:: resource.getpagesize()] = b"x" * (_WANTED // resource.getpagesize())
    return go(*args)


@outside("hang", "stopped", clears=True)
def sigstop(target: Target) -> Undo:
    """The stage gets SIGSTOP.

    Verdict: stage K is stopped by a signal (state T); SIGCONT continues it.
    """
    return pause(target.pid)


@outside("hang", "stopped", clears=True)
def traced(target: Target) -> Undo:
    """A debugger attaches to the stage's main thread and leaves it stopped.

    Verdict: stage K is stopped by a tracer (state t), with the tracer's pid.
    """
    return Tracer(target.pid).detach


@outside("hang", "stopped", "self_stuck", clears=True, held_out=True)
def frozen(target: Target) -> Undo:
    """The stage is frozen by the cgroup freezer, which shows in no signal and no state T.

    Verdict: stage K is stopped: its cgroup is frozen.
    """
    return cgroups.freeze(target.pid)
