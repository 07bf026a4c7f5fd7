"""One question of the core. It is answered once, as soon as nothing copies to or from its slots."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from ppengine.protocol.place import Place
from ppengine.store.backend import Layout
from ppengine.store.shard_names import ShardNames

MARKERS = "marker"
"""First component of the keys of markers."""


@dataclass(frozen=True)
class Home:
    """The place of a store, and the means of its jobs."""

    place: Place
    places: int
    clock: Callable[[], float]
    post: Callable[[Callable[[], None]], None]
    """Hands a function over to the loop, from any thread."""
    done: Callable[[Job], None]
    """Takes a job that can be answered, on the loop."""
    names: ShardNames = field(default_factory=ShardNames)

    @property
    def leads(self) -> bool:
        """Whether this is place (0, 0), which has the markers."""
        return self.place == (0, 0)

    @property
    def part(self) -> str:
        """First component of the keys of shards."""
        return f"{self.place.stage}.{self.place.rank}"

    @property
    def layout(self) -> Layout:
        """The keys that this store writes."""
        return Layout((self.part, MARKERS) if self.leads else (self.part,))

    def shard_key(self, namespace: bytes, key: bytes, checksum: bytes) -> str:
        """Return the name of this place's shard of a chunk.

        Engines that compute the same tokens may differ in low bits. Each has shards of its own by the checksum, and
        the marker is about those of one engine.
        """
        return f"{self.part}/{namespace.hex()}/{key.hex()}-{checksum.hex()}"


def marker_key(namespace: bytes, key: bytes) -> str:
    """Return the name of a chunk's marker."""
    return f"{MARKERS}/{namespace.hex()}/{key.hex()}"


class Job(ABC):
    """Belongs to the loop, except `wanted` and `copying`."""

    def __init__(self, home: Home, number: int, limit_s: float, uses_pool: bool = False) -> None:
        self.number, self.uses_pool = number, uses_pool
        self._home = home
        self.begun = home.clock()
        self.due = self.begun + limit_s
        self.limit_s = limit_s
        self.error = ""
        self.corrupt = self.missing = False
        self._lock = threading.Lock()
        self._closed = False
        self._copies = 0

    @abstractmethod
    def answer(self) -> msgspec.Struct:
        """Return the answer, after `end`."""

    @property
    def ms(self) -> float:
        """Milliseconds since its begin."""
        return (self._home.clock() - self.begun) * 1000

    def late_text(self) -> str:
        """Return why it ends at its deadline, in one line."""
        return f"its deadline of {self.limit_s * 1000:.0f} ms is over"

    def wanted(self) -> bool:
        """Return whether it has not ended."""
        return not self._closed

    def end(self, error: str = "", *, corrupt: bool = False, missing: bool = False) -> None:
        """End it. Only the first call counts; the answer follows when no copy is under way."""
        with self._lock:
            if self._closed:
                return
            self._closed, self.error, self.corrupt, self.missing = True, error, corrupt, missing
            free = not self._copies
        if free:
            self._home.done(self)

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """Hold the slots of the job; False if it has ended, so that they are not its own any more."""
        with self._lock:
            held = not self._closed
            self._copies += held
        try:
            yield held
        finally:
            with self._lock:
                self._copies -= held
                last = held and self._closed and not self._copies
            if last:
                self._home.post(lambda: self._home.done(self))
