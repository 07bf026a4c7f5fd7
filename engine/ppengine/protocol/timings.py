"""Times of a request that has ended, for traces: seconds of the clock that all processes of a host share."""

from __future__ import annotations

from typing import Literal

import msgspec

PhaseKind = Literal["swap-out", "swap-in", "restart"]


class Phase(msgspec.Struct, array_like=True):
    """A time in which a request made no progress: a copy of its blocks, or a restart of stages or core."""

    kind: PhaseKind
    begin: float
    end: float | None = None
    """None: it has not ended."""
    text: str = ""
    """Its cause, in one line."""


class Timings(msgspec.Struct, array_like=True):
    """One sample of a request."""

    arrival: float
    """Its arrival at the first process of the engine."""
    admitted: float | None
    """Its first blocks; None: it never had any."""
    first_token: float | None
    ended: float
    phases: list[Phase]
    """In order of their beginnings; the oldest are dropped first."""
    preemptions: int
    queued: float
    """Its arrival in the queue of the core."""
