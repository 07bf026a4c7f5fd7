"""CUDA streams and events with names, always passed on and never found as "the current one"."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ppengine.stage.ledger.actors import Buffer, Mark
from ppengine.stage.ledger.ledger import Ledger

GLANCE_S = 2e-5
"""Between two looks at a device that works."""
_BRIEF = 10
"""Looks before a wait counts as one that is worth a record."""
_DRAIN_S, _RELEASE_S = 5.0, 1e-3
"""Longest time that a released stream works on, more than a survivor has to leave its generation; between releases."""


_NO_BLOCK = nullcontext()
RecordWait = Callable[[], AbstractContextManager[None]]
"""Returns a block that records a wait that is not brief."""


class Order:
    """The common part of one stage's streams: the ledger that they declare to, and how strict order waits.

    It looks, and never waits in a call of the driver: a stream may wait for a neighbour that is
    gone.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.step = 0
        """The step that launches belong to; 0: none."""
        self._look: Callable[[], None] = _nothing
        self._record: RecordWait = nullcontext

    def watch_waits(self, look: Callable[[], None], record: RecordWait) -> None:
        """Have `look` called between two looks of a wait, which its exception ends, and a long wait in `record()`."""
        self._look, self._record = look, record

    def wait(self, done: Callable[[], bool], record: RecordWait | None = None) -> None:
        """Wait in the calling thread until `done()`, recorded by `record` if given. Raises errors of `look`."""
        for _ in range(_BRIEF):
            if done():
                return
            time.sleep(GLANCE_S)
        with (record or self._record)():
            while not done():
                self._look()
                time.sleep(GLANCE_S)


def _nothing() -> None:
    pass


class Event:
    """A point in the order of a stream of this device. `mark` is its name in the ledger, if that was on."""

    def __init__(self, name: str, event: torch.cuda.Event, ledger: Ledger, mark: Mark | None = None) -> None:
        self.name = name
        self.raw = event
        self.mark = mark
        self._ledger = ledger
        self._declared_by = 0
        """The thread that has declared this point done."""

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
        if self._ledger.on and self.mark is not None and self._declared_by != threading.get_ident():
            self._declared_by = threading.get_ident()
            self._ledger.sync(self.mark)


class Stream:
    """One stream of a device. The thread that makes it launches on it, and no other.

    With the ledger on, every record and wait is declared here; launches are, by `doing` and
    `declare`.
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
        """Take over `stream`, or make a new one. Without `order` it has its own, with a ledger that stays off."""
        self.name = name
        self.device = str(device)
        self.order = order or Order()
        self.actor = self.order.ledger.stream(name, purpose, self.device, depth=1)
        self._settling = _Settling(self)
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.raw: torch.cuda.Stream = stream
        self.progress: AbstractContextManager[None] | None = None
        """Has the device write when launched work begins and ends; see `stream_progress`."""

    @property
    def handle(self) -> int:
        """The driver's."""
        return int(self.raw.cuda_stream)

    def record(self, name: str, event: torch.cuda.Event | None = None) -> Event:
        """Return the point behind everything launched so far, by `event` if that is given."""
        ledger = self.order.ledger
        mark = ledger.record(self.actor, name) if ledger.on else None
        return Event(name, self._point(event), ledger, mark)

    def wait(self, event: Event) -> None:
        """Let all later launches wait for `event`."""
        if self.order.ledger.on:
            self.order.ledger.wait(self.actor, event.mark)
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        """Wait in the calling thread for everything launched so far."""
        self.record("synchronize").synchronize()

    def drain(self, releases: Sequence[Callable[[], None]]) -> None:
        """Wait in the calling thread for everything launched so far, though it may wait for a process that is gone.

        `releases` let such waits end. They are called again and again: the device of a neighbour that still runs
        overwrites released flags. Raises TimeoutError.
        """
        left, deadline = self.record("left"), time.monotonic() + _DRAIN_S
        while not left.done():
            for release in releases:
                release()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device did not end its work within {_DRAIN_S:g} s")
            time.sleep(_RELEASE_S)

    def buffer(self, name: str, size: int = 0) -> Buffer:
        """Return memory of this stream's device, or of another that it reaches, as the ledger knows it."""
        return self.order.ledger.buffer(name, self.device, size)

    def declare(self, what: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = (), depth: int = 0) -> None:
        """Declare a launch that follows, if the ledger is on; a graph is one launch."""
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
        return self._settling if self.order.ledger.strict else _NO_BLOCK

    def settle(self, record: RecordWait | None = None) -> None:
        """Wait for everything launched so far, in strict order alone; see `Order.wait`.

        It is not declared, so that the ledger finds a missing wait all the same.
        """
        if self.order.ledger.strict:
            point = self._point()
            self.order.wait(lambda: bool(point.query()), record)  # type: ignore[no-untyped-call]

    def _point(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return event

    def working(self) -> AbstractContextManager[None]:
        """Return a block whose launches are one piece of work for the progress page; its waits are outside."""
        return self.progress or _NO_BLOCK

    def use(self) -> AbstractContextManager[object]:
        """Return a block in which torch's operations go to this stream."""
        return torch.cuda.stream(self.raw)


class _Settling:
    """Waits for the launches of a block, except for one that an exception ends."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._stream.settle()
