"""Stages whose memory grows without end, or whose descriptors are used up."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
from typing import Any

from ppengine.drills.fault_points import Fault, Go, StageParts
from ppengine.drills.registry import Undo, arm, strike

_PIECE = 4 << 20
_PIECES_S = 0.1
_A_STEP = 128 << 10
_SPARE = 64


@arm("grow", "leak", clears=True)
def leak(parts: StageParts) -> Undo:
    """A thread of the stage keeps 40 MiB more each second, and never gives them back. Cleared: it does.

    Verdict: stage K leaks memory: MiB a second, and when the limit of its cgroup or host is met.
    """
    over, kept = threading.Event(), list[bytes]()

    def grow() -> None:
        while not over.wait(_PIECES_S):
            kept.append(b"x" * _PIECE)
        kept.clear()

    threading.Thread(target=grow, name="leak", daemon=True).start()
    return over.set


@strike("forward", "grow", "leak", clears=True, held_out=True)
def leak_in_forward(fault: Fault, go: Go, *args: Any) -> Any:
    """Every forward keeps 128 KiB, and never gives them back. Cleared: it does.

    Verdict: stage K leaks memory: MiB a second, and when the limit of its cgroup or host is met.
    """
    fault.tool = fault.tool or []
    fault.tool.append(args[0].new_ones(_A_STEP // args[0].itemsize))
    return go(*args)


@arm("grow", "leak", clears=True)
def leak_shared(parts: StageParts) -> Undo:
    """A thread of the stage writes 40 MiB more each second to memory that could be shared. Cleared: it gives them back.

    Verdict: stage K leaks memory: MiB a second, and when the limit of its cgroup or host is met.
    """
    over, shared = threading.Event(), os.memfd_create("leak")
    # Mapped as well, as a buffer that a library shares is: else no process would have these pages.
    kept = list[mmap.mmap]()

    def grow() -> None:
        while not over.wait(_PIECES_S):
            begin = len(kept) * _PIECE
            os.ftruncate(shared, begin + _PIECE)
            kept.append(mmap.mmap(shared, _PIECE, offset=begin))
            kept[-1].write(b"x" * _PIECE)
        for piece in kept:
            piece.close()
        os.close(shared)

    threading.Thread(target=grow, name="leak", daemon=True).start()
    return over.set


@arm("grow", "out_of_files", clears=True, held_out=True)
def leak_files(parts: StageParts) -> Undo:
    """The stage opens files until its limit of open files, which is lowered to 64 more than it has. Cleared: it closes
    them.

    Verdict: stage K has no descriptors left: N of N descriptors, RLIMIT_NOFILE.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + _SPARE, hard))
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)

    return close
