"""Stages whose memory grows without end."""

from __future__ import annotations

import threading
from typing import Any

from ppengine.drills.fault_points import Fault, Go, StageParts
from ppengine.drills.registry import Undo, arm, strike

_PIECE = 4 << 20
_PIECES_S = 0.1
_A_STEP = 128 << 10


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
