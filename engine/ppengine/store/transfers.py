"""Jobs that move shards between slots and a backend."""

from __future__ import annotations

from functools import partial

from typing_extensions import override

from ppengine.protocol.store_messages import Fetch, Fetched, Put, Stored
from ppengine.store.backend import Backend
from ppengine.store.bounce import Bounce
from ppengine.store.job import Home, Job
from ppengine.store.lane import Lane
from ppengine.store.lane_task import Outcome, Task, UnwantedError
from ppengine.store.shard import HEADER_BYTES, ShardLabel, check, seal
from ppengine.store.slot_pool import SlotPool

AHEAD = 2
"""Chunks of a job that are queued for each thread of the backend."""


class FetchJob(Job):
    """Reads chunks into slots. Several are read at once; those behind the first failure do not count."""

    def __init__(self, home: Home, lane: Lane, pool: SlotPool, namespace: bytes, message: Fetch) -> None:
        super().__init__(home, message.job, message.deadline_ms / 1000, uses_pool=True)
        self._lane, self._pool, self._namespace, self._message = lane, pool, namespace, message
        shards = zip(message.keys, message.sums, strict=True)
        self._names = [home.shard_key(namespace, key, checksum) for key, checksum in shards]
        for key, name in zip(message.keys, self._names, strict=True):
            home.names.note(message.backend, key, name)
        self._next = 0
        self._open = 0
        self._whole: set[int] = set()
        self._good = 0
        self._end_at = len(message.keys)
        """The first chunk that failed; without one their number."""
        self._failure = Outcome()

    def start(self) -> None:
        """Queue the first chunks."""
        self._advance()

    @override
    def answer(self) -> Fetched:
        place = self._home.place
        return Fetched(*place, self.number, self._good, self.ms, self.error, self.corrupt, self.missing)

    def _advance(self) -> None:
        if not self.wanted():
            return
        while self._good in self._whole:
            self._good += 1
        if self._good >= self._end_at:
            self.end(self._failure.error, corrupt=self._failure.corrupt, missing=self._failure.missing)
            return
        while self._next < self._end_at and self._open < AHEAD * self._lane.width:
            index = self._next
            self._next += 1
            self._open += 1
            task = Task("read", partial(self._read, index), partial(self._ended, index), partial(self._wants, index))
            self._lane.submit(task)

    def _wants(self, index: int) -> bool:
        return self.wanted() and index < self._end_at

    def _read(self, index: int, backend: Backend, bounce: Bounce) -> int:
        key, slots = self._message.keys[index], self._message.slots[index]
        label = ShardLabel(self._namespace, key, self._home.place, len(slots), self._pool.slot_bytes)
        view = bounce.view(label.object_bytes)
        length = backend.read(self._names[index], view)
        check(view, length, label, self._message.sums[index])
        with self.copying() as held:
            if not held:
                raise UnwantedError
            self._pool.fill(slots, view[HEADER_BYTES : HEADER_BYTES + label.payload_bytes])
        return label.object_bytes

    def _ended(self, index: int, outcome: Outcome) -> None:
        self._open -= 1
        if not outcome.error:
            self._whole.add(index)
        elif index < self._end_at:
            self._end_at, self._failure = index, outcome
        self._advance()


class PutJob(Job):
    """Writes one chunk from its slots, which are copied first."""

    def __init__(self, home: Home, lane: Lane, pool: SlotPool, namespace: bytes, message: Put) -> None:
        super().__init__(home, message.job, message.deadline_ms / 1000, uses_pool=True)
        self._lane, self._pool, self._namespace, self._message = lane, pool, namespace, message
        self._stored = 0, b""

    def start(self) -> None:
        """Queue it."""
        self._lane.submit(Task("write", self._write, lambda outcome: self.end(outcome.error), self.wanted))

    @override
    def answer(self) -> Stored:
        length, checksum = (0, b"") if self.error else self._stored
        return Stored(*self._home.place, self.number, length, checksum, self.ms, self.error)

    def _write(self, backend: Backend, bounce: Bounce) -> int:
        key, slots = self._message.key, self._message.slots
        label = ShardLabel(self._namespace, key, self._home.place, len(slots), self._pool.slot_bytes)
        view = bounce.view(label.object_bytes)
        with self.copying() as held:
            if not held:
                raise UnwantedError
            self._pool.take(slots, view[HEADER_BYTES:])
        checksum = seal(view, label)
        name = self._home.shard_key(self._namespace, key, checksum)
        self._home.names.note(self._message.backend, key, name)
        backend.write(name, view)
        self._stored = label.object_bytes, checksum
        return label.object_bytes
