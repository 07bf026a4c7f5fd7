"""One turn of a backend's thread: the work, and its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ppengine.store.backend import Backend
from ppengine.store.bounce import Bounce

Kind = Literal["find", "read", "write", "delete", "care"]
"""`care`: of an operator, or the question for the usage."""
ORDER: tuple[Kind, ...] = ("find", "read", "care", "delete", "write")
"""Tasks that are taken first: a request waits for finds and reads, and nothing waits for writes."""


Side = Literal["read", "write"]
SIDES: dict[Kind, Side] = {"find": "read", "read": "read", "write": "write"}
"""The breaker that guards a call, and that its end moves. A full disk deletes and reads, so those say nothing of it."""


@dataclass(frozen=True)
class Outcome:
    """The end of a task: bytes moved, or an error in one line."""

    moved: int = 0
    error: str = ""
    corrupt: bool = False
    missing: bool = False
    """It is not there."""
    failed: bool = False
    """The backend failed, so that a breaker counts it. A missing or corrupt object is no failure of that kind."""
    skipped: bool = False
    """The backend was not called, or for nothing."""


class UnwantedError(Exception):
    """A task finds in the middle that its job has ended."""


@dataclass(eq=False)
class Task:
    """Calls of a backend on one of its threads."""

    kind: Kind
    work: Callable[[Backend, Bounce], int]
    """Returns the bytes that it moved. Runs on a thread of the lane."""
    end: Callable[[Outcome], None]
    """Called once, on the loop."""
    wanted: Callable[[], bool] = lambda: True
    """Asked on the thread, before the work."""
    limit_s: float | None = None
    """Seconds that it may take; None: those of a call."""
    counts: bool = True
    """The figures count how it ends."""
    tests: bool = False
    """It reads and writes: a good end closes both breakers."""
    begun: float = 0.0
    over: bool = False
    """`end` has been called. Belongs to the loop."""
