"""The central scheduler: it chooses the tokens and blocks of each step. No torch, no I/O.

A request passes through these parts of `Scheduler`:

- `admission` refuses a request that can never fit
- `queues` keep its place: waiting, swapped, held or running
- `batcher` chooses the rows of a step; `masks` come with it or behind it
- `blocks` assign device and host blocks; `blocks.copies` fill the host cache and load from it
- `steps` number the steps and keep the draft and the unretired ones
- `retirement` takes sampled tokens and ends requests
- `actions` are an operator's verbs
- `fences` delay them until the steps in flight have retired
- `resize` changes the number of device blocks

`wait_reasons.why` is a function of a whole scheduler.
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
