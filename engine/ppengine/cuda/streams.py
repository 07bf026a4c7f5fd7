"""CUDA streams and events with names, always passed on and never found as "the current one"."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


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


class Event:
    """A point in the order of a stream of this device."""

    def __init__(self, name: str, event: torch.cuda.Event) -> None:
        self.name = name
        self.raw = event

    def done(self) -> bool:
        """Return whether everything before it is done; does not wait."""
        return bool(self.raw.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait in the calling thread."""
        self.raw.synchronize()


class Stream:
    """One stream of a device. One thread launches on it."""

    def __init__(self, name: str, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Take over `stream`, or make a new one."""
        self.name = name
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.raw: torch.cuda.Stream = stream
        self.progress: AbstractContextManager[None] | None = None
        """Writes down on the device what is launched; see `ppengine.cuda.progress`."""

    @property
    def handle(self) -> int:
        """The driver's."""
        return int(self.raw.cuda_stream)

    def record(self, name: str) -> Event:
        """Return the point behind everything launched so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.raw)
        return Event(name, event)

    def wait(self, event: Waitable) -> None:
        """Let what is launched from here on wait for `event`. Raises TypeError for one that is not of a device."""
        if not isinstance(event, Event):
            raise TypeError(f"stream {self.name} cannot wait for {event!r}, only for an event of a device")
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        """Wait in the calling thread for everything launched so far."""
        self.raw.synchronize()

    def working(self) -> AbstractContextManager[None]:
        """Return a block whose launches are one piece of work, to be told from outside. What it waits for is before."""
        return self.progress or _UNTOLD

    def use(self) -> AbstractContextManager[object]:
        """Return a block in which torch's operations go to this stream."""
        return torch.cuda.stream(self.raw)
