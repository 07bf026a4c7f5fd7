"""What the gateway's fault desk says to a stage's fault thread, and what comes back."""

from __future__ import annotations

import msgspec


class Inject(msgspec.Struct, tag="inject", array_like=True):
    """Begin the fault `kind`, aimed at `stage`: the one told, or its neighbour."""

    id: str
    kind: str
    stage: int


class Lift(msgspec.Struct, tag="lift", array_like=True):
    """End every fault that can be ended."""

    id: str


class Done(msgspec.Struct, tag="done", array_like=True):
    """What the stage did of it; `error` says why it did not."""

    id: str
    stage: int
    text: str = ""
    error: str = ""


ToFaults = Inject | Lift
FromFaults = Done
