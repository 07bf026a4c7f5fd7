"""The central scheduler: it chooses the tokens and blocks of each request for each step. No torch, no I/O.

A request passes through `admission` (can it ever fit), `queues` (its place), `batcher` (rows of a step), `blocks` (its
block table), `steps` (the draft and the unretired steps) and `retirement` (sampled tokens, ends). An operator's verbs
are `actions`; `fences` delay them until the steps in flight have retired; `resize` changes the number of blocks.
`wait_reasons.why` and `invariants.check` read a whole scheduler.
"""

from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.results import (
    ActionResult,
    DoesNotFit,
    Note,
    PreemptMode,
    Refused,
    ResizePlan,
    ResizeReport,
)
from ppengine.core.scheduler.retirement import Retirement
from ppengine.core.scheduler.scheduler import Scheduler

__all__ = [
    "ActionResult",
    "DoesNotFit",
    "Note",
    "PreemptMode",
    "Refused",
    "Request",
    "ResizePlan",
    "ResizeReport",
    "Retirement",
    "Scheduler",
]
