"""The ledger's record of streams, threads and buffers: small objects of integers.

An actor does things one after the other: a stream or a thread. Its clock says how far it has seen
every other actor; an access is ordered before an actor exactly when that actor's clock has reached
the access's tick.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ppengine.stage.ledger.call_sites import CallSite

HOST = "cpu"
"""Device of memory and streams of the host."""
OPEN_MOST = 1024
"""Operations of a stream that are remembered as open; more are under way only if no thread ever waits."""


class Actor:
    """A stream (`owner` is the thread that may launch on it) or a thread (`owner` None)."""

    __slots__ = (
        "alive", "clock", "created", "current", "current_at", "device", "done", "id", "name", "open", "owner",
        "purpose", "tick",
    )  # fmt: skip

    def __init__(
        self, number: int, name: str, purpose: str, device: str, owner: Actor | None, created: CallSite
    ) -> None:
        self.id = number
        self.name = name
        self.purpose = purpose
        self.device = device
        self.owner = owner
        self.created = created
        self.alive = True
        self.current: Actor | None = None
        """Thread: the stream it has made its current one."""
        self.current_at: tuple[Actor, CallSite] | None = None
        """Stream: the thread that made it a current stream last, and where."""
        self.reset()

    def reset(self) -> None:
        """Forget all order."""
        self.tick = 1
        self.clock: dict[int, int] = {}
        self.done = 0
        """Stream: tick up to which everything is known to be done."""
        self.open: deque[tuple[int, CallSite, str, int]] = deque(maxlen=OPEN_MOST)
        """Stream: tick, call site, name and time of launches that are not known to be done, oldest first."""

    @property
    def is_stream(self) -> bool:
        """Whether this is a stream."""
        return self.owner is not None

    def join(self, other: Actor, tick: int, clock: dict[int, int]) -> None:
        """Order everything that `other` had done and seen at `tick` before this actor's next operation."""
        mine = self.clock
        if other is self or mine.get(other.id, 0) >= tick:
            return  # The clock of that tick is known: ticks grow whenever a clock has grown and travels.
        for actor, seen in clock.items():
            if seen > mine.get(actor, 0):
                mine[actor] = seen
        mine[other.id] = tick

    def has_seen(self, access: Access) -> bool:
        """Return whether `access` is ordered before this actor's next operation."""
        return access.actor is self or self.clock.get(access.actor.id, 0) >= access.tick

    def reached(self, tick: int) -> None:
        """Note that everything up to `tick` is done."""
        self.done = max(self.done, tick)
        while self.open and self.open[0][0] <= tick:
            self.open.popleft()

    def is_done(self, access: Access) -> bool:
        """Return whether an access of this actor is known to be over; a thread's own is when it is declared."""
        return not self.is_stream or access.tick <= self.done

    def text(self) -> str:
        """Return `stream metadata (cuda:0, owner main)`, `thread main` or `stage 1`."""
        if self.owner is None:
            return self.name if self.purpose == "stage" else f"thread {self.name}"
        return f"stream {self.name} ({self.device}, owner {self.owner.name}, for {self.purpose})"


class Access(NamedTuple):
    """One read or write of a buffer: its actor, tick, operation and call site."""

    actor: Actor
    tick: int
    what: str
    site: CallSite


class Mark(NamedTuple):
    """A point in an actor's order that others can wait for: an event, or a message from thread to thread."""

    session: int
    """Number of the ledger's session; a mark from before it was switched on orders nothing."""
    actor: Actor
    tick: int
    clock: dict[int, int]
    via: str


class Buffer:
    """Memory that streams, threads or stages hand to each other. `generation` counts its contents."""

    __slots__ = ("device", "freed", "generation", "issuer", "name", "readers", "size", "writer")

    def __init__(self, name: str, device: str, size: int = 0) -> None:
        self.name = name
        self.device = device
        self.size = size
        self.generation = 0
        self.writer: Access | None = None
        self.readers: dict[int, Access] = {}
        """Newest read of this generation, by actor."""
        self.freed: tuple[Access, Mark] | None = None
        self.issuer: Actor | None = None
        """The actor that got it from its pool."""

    def forget(self) -> None:
        """Forget its readers and writer."""
        self.writer = self.freed = self.issuer = None
        self.readers.clear()

    def text(self) -> str:
        """Return `seqstart generation 7`."""
        return f"{self.name} generation {self.generation}"
