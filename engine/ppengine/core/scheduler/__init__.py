"""The central scheduler: which request gets which tokens and blocks in which step. No torch, no I/O.

A request passes through `intake` (can it ever fit), `queues` (where it stands), `batch` (rows of a step), `kv` (its
blocks), `pipeline` (numbers, slots, what each unretired step holds) and `returns` (tokens, ends). `acts` is what an
operator does to it, `fences` makes that wait for what is in flight, `resize` changes the number of blocks, `why` says
what a request waits for, `view` counts and checks.
"""

from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.results import (
    DoesNotFit,
    Effect,
    Note,
    PreemptMode,
    Refused,
    ResizePlan,
    ResizeReport,
    Retirement,
)
from ppengine.core.scheduler.scheduler import Scheduler

__all__ = [
    "DoesNotFit",
    "Effect",
    "Note",
    "PreemptMode",
    "Refused",
    "Request",
    "ResizePlan",
    "ResizeReport",
    "Retirement",
    "Scheduler",
]
