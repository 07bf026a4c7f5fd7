"""Messages from the gateway's fault desk to a stage's fault thread, and its answers."""

from __future__ import annotations

import msgspec

from ppengine.protocol.place import Place


class Inject(msgspec.Struct, tag="inject", array_like=True):
    """Begin the fault `kind`, aimed at `stage`: the receiver, or its neighbour; -1: the core."""

    id: str
    kind: str
    stage: int


class Lift(msgspec.Struct, tag="lift", array_like=True):
    """End every fault that can be ended; with `of`, that of this `Inject` alone, which may not have been read yet."""

    id: str
    of: str = ""


class Done(msgspec.Struct, tag="done", array_like=True):
    """The stage's answer; `error` has the reason of a failure."""

    id: str
    stage: int
    text: str = ""
    error: str = ""
    rank: int = 0


ToFaults = Inject | Lift
FromFaults = Done


CORE = Place(-1, 0)
"""The core's place among fault threads."""


def identity(place: Place) -> bytes:
    """Return the name of a fault thread on the socket `faults`."""
    return b"f%d" % place.stage if not place.rank else b"f%d.%d" % place
