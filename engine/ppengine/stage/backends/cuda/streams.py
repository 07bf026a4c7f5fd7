"""CUDA streams and events with names, always passed on and never found as "the current one"."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

import torch

from ppengine.stage.ledger.actors import Buffer, Mark
from ppengine.stage.ledger.ledger import Ledger

GLANCE_S = 2e-5
"""Between two looks at a device that works."""
_BRIEF = 10
"""Looks before a wait counts as one that is worth a record."""


class Waitable(Protocol):
    """A point in a stream's order."""

    def done(self) -> bool:
        """Return whether everything before it is done; does not wait."""

    def synchronize(self) -> None:
        """Wait in the calling thread."""


class Ordered(Protocol):
    """What ordering work on streams needs of one."""

    name: str

    def record(self, name: str) -> Waitable:
        """Return the point behind everything launched so far."""

    def wait(self, event: Waitable) -> None:
        """Let what is launched from here on wait for `event`."""


_UNTOLD = nullcontext()
Seen = Callable[[], AbstractContextManager[None]]
"""Returns a block in which a wait that is not brief is seen from outside."""


class Order:
    """What the streams of one stage have in common: the ledger that they declare to, and how strict order waits.

    That looks, and never waits in a call of the driver: a stream may wait for a neighbour that is gone.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.step = 0
        """What is launched now is of this step; 0: of none."""
        self.look: Callable[[], None] = _nothing
        """Called between two looks; what it raises ends the wait."""
        self.seen: Seen = nullcontext

    def wait(self, done: Callable[[], bool], seen: Seen | None = None) -> None:
        """Wait in the calling thread until `done()`; `seen` in place of its own. Raises what `look` raises."""
        for _ in range(_BRIEF):
            if done():
                return
            time.sleep(GLANCE_S)
        with (seen or self.seen)():
            while not done():
                self.look()
                time.sleep(GLANCE_S)


def _nothing() -> None:
    pass


class Event:
    """A point in the order of a stream of this device. `mark` is what the ledger knows it by, where that was on."""

    def __init__(self, name: str, event: torch.cuda.Event, ledger: Ledger, mark: Mark | None = None) -> None:
        self.name = name
        self.raw = event
        self.mark = mark
        self._ledger = ledger
        self._told = 0
        """The thread that has declared that it knows this to be done."""

    def done(self) -> bool:
        """Return whether everything before it is done; does not wait."""
        done = bool(self.raw.query())  # type: ignore[no-untyped-call]
        if done:
            self._passed()
        return done

    def synchronize(self) -> None:
        """Wait in the calling thread."""
        self.raw.synchronize()
        self._passed()

    def _passed(self) -> None:
        if self._ledger.on and self.mark is not None and self._told != threading.get_ident():
            self._told = threading.get_ident()
            self._ledger.sync(self.mark)


class Stream:
    """One stream of a device. The thread that makes it launches on it, and no other.

    With the ledger on, every record and wait is declared here; what is launched, by `doing` and `declare`.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        *,
        purpose: str = "",
        order: Order | None = None,
    ) -> None:
        """Take over `stream`, or make a new one. Without `order` it has one of its own, which nobody switches."""
        self.name = name
        self.device = str(device)
        self.order = order or Order()
        self.actor = self.order.ledger.stream(name, purpose, self.device, depth=1)
        self._settling = _Settling(self)
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.raw: torch.cuda.Stream = stream
        self.progress: AbstractContextManager[None] | None = None
        """Writes down on the device what is launched; see `ppengine.stage.backends.cuda.stream_progress`."""

    @property
    def handle(self) -> int:
        """The driver's."""
        return int(self.raw.cuda_stream)

    def record(self, name: str, event: torch.cuda.Event | None = None) -> Event:
        """Return the point behind everything launched so far, by `event` if that is given."""
        ledger = self.order.ledger
        mark = ledger.record(self.actor, name) if ledger.on else None
        return Event(name, self._point(event), ledger, mark)

    def wait(self, event: Waitable) -> None:
        """Let what is launched from here on wait for `event`. Raises TypeError for one that is not of a device."""
        if not isinstance(event, Event):
            raise TypeError(f"stream {self.name} cannot wait for {event!r}, only for an event of a device")
        if self.order.ledger.on:
            self.order.ledger.wait(self.actor, event.mark)
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        """Wait in the calling thread for everything launched so far."""
        self.record("synchronize").synchronize()

    def buffer(self, name: str, size: int = 0) -> Buffer:
        """Return memory of this stream's device, or of another that it reaches, as the ledger knows it."""
        return self.order.ledger.buffer(name, self.device, size)

    def declare(self, what: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = (), depth: int = 0) -> None:
        """Tell the ledger, where it is on, what is about to be launched; a graph is one launch."""
        order = self.order
        if order.ledger.on:
            named = f"{what} of m{order.step}" if order.step else what
            order.ledger.launch(self.actor, named, reads, writes, depth + 1)

    def doing(
        self, what: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = (), depth: int = 0
    ) -> AbstractContextManager[None]:
        """Return a block whose launches are one operation, declared here.

        In strict order it ends when the device has done it.
        """
        self.declare(what, reads, writes, depth + 1)
        return self._settling if self.order.ledger.strict else _UNTOLD

    def settle(self, seen: Seen | None = None) -> None:
        """Wait for everything launched so far, in strict order alone; see `Order.wait`.

        It is declared to nobody, so that the ledger finds a missing wait all the same.
        """
        if self.order.ledger.strict:
            point = self._point()
            self.order.wait(lambda: bool(point.query()), seen)  # type: ignore[no-untyped-call]

    def _point(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return event

    def working(self) -> AbstractContextManager[None]:
        """Return a block whose launches are one piece of work, to be told from outside. What it waits for is before."""
        return self.progress or _UNTOLD

    def use(self) -> AbstractContextManager[object]:
        """Return a block in which torch's operations go to this stream."""
        return torch.cuda.stream(self.raw)


class _Settling:
    """What an exception ends is not waited for."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._stream.settle()
