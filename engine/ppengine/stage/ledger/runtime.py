"""What the incidents run on: streams, events and a pool of memory, faked (`fakes`) or of a GPU (`cuda.rehearsal`).

All of it declares to a ledger what is done, before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ppengine.stage.ledger.actors import Actor, Buffer
from ppengine.stage.ledger.ledger import Ledger


class StreamError(RuntimeError):
    """What a call returned instead of doing its work."""


class Memory(Protocol):
    """A few numbers on a device. All but the last two are work for a stream."""

    buffer: Buffer

    def set(self, values: Sequence[float]) -> None:
        """Write numbers."""

    def double(self, source: Any) -> None:
        """Write twice what is in `source`."""

    def read(self, into: list[float]) -> None:
        """Append what is here to `into`, which has it once the stream is waited for."""

    def preset(self, values: Sequence[float]) -> None:
        """Have numbers lie here from before."""

    def values(self) -> list[float]:
        """Return what is here now."""


class Point(Protocol):
    """A point in a stream's order."""

    def synchronize(self) -> None:
        """Wait in the calling thread."""


class PlayStream(Protocol):
    """One stream."""

    actor: Actor

    def launch(
        self, what: str, work: Callable[[], None], reads: Sequence[Any] = (), writes: Sequence[Any] = (), depth: int = 0
    ) -> None:
        """Put `work`, calls of `Memory`, on the stream. Raises StreamError."""

    def record(self, name: str) -> Any:
        """Return the point behind everything launched so far."""

    def wait(self, event: Any) -> None:
        """Let what is launched from here on wait for a point."""

    def synchronize(self) -> None:
        """Wait in the calling thread for everything launched so far."""


class Pool(Protocol):
    """Memory of one device: what came back last is handed out next, with what lies in it."""

    def take(self, size: int, name: str = "", order: Any = None) -> Any:
        """Return `Memory` of `size` numbers, used from here on in the order of a stream."""

    def give(self, memory: Any, order: Any = None) -> None:
        """Take memory back in the order of a stream: what other streams do with it is not waited for."""


class Runtime(Protocol):
    """Devices as a process sees them."""

    ledger: Ledger

    def enter(self) -> None:
        """Make the stage's device the calling thread's current one."""

    def stray(self) -> None:
        """Leave the calling thread with another device, as one that was told of none."""

    def stream(self, name: str, purpose: str, *, lag: bool = False) -> Any:
        """Return a new `PlayStream` on the thread's current device; one that lags is as late as a stream may be."""

    def pool(self) -> Pool:
        """Return a pool of the stage's device."""

    def close(self) -> None:
        """Let every stream finish and destroy it; call it in the thread that made this."""
