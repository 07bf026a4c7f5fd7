"""The central scheduler: which request gets which tokens and blocks in which step. No torch, no I/O."""

from ppengine.request import Request
from ppengine.scheduler.results import (
    DoesNotFit,
    Effect,
    Note,
    PreemptMode,
    Refused,
    ResizePlan,
    ResizeReport,
    Retirement,
)
from ppengine.scheduler.scheduler import Scheduler

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
