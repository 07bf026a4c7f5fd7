"""A store without socket and threads: its lanes work when a test says so, on a clock that the test moves."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from ppengine.common.call_page import CallPage
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import (
    BackendSpec,
    Fetch,
    Marker,
    OpenPool,
    Put,
    Stored,
    StoreFigures,
    UseBackends,
    UseNamespace,
)
from ppengine.store.backend import Backend, BackendOptions, Layout, Usage
from ppengine.store.backends.memory_backend import MemoryBackend
from ppengine.store.bounce import Bounce
from ppengine.store.job import Home
from ppengine.store.lane import Lane
from ppengine.store.store import Store

NAMESPACE = b"n" * 16
SLOT_BYTES = 8192
FIRST = Place(0, 0)
KEY, OTHER = b"k" * 16, b"o" * 16


def spec(name: str = "m", **changes: object) -> BackendSpec:
    """Return a backend of 1 GiB."""
    base = BackendSpec(name=name, kind="memory", url="", quota_bytes=2**30, timeout_ms=1000)
    return msgspec.structs.replace(base, **changes)


class Pool:
    """Host slots as a stage has them."""

    def __init__(self, slots: int = 16, slot_bytes: int = SLOT_BYTES) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self.fd = os.memfd_create("slots")
        os.ftruncate(self.fd, slots * slot_bytes)

    def message(self, generation: int = 1) -> OpenPool:
        return OpenPool(generation, os.getpid(), self.fd, self.slots, self.slot_bytes)

    def read(self, slot: int) -> bytes:
        return os.pread(self.fd, self.slot_bytes, slot * self.slot_bytes)

    def write(self, slot: int, data: bytes) -> None:
        assert os.pwrite(self.fd, data, slot * self.slot_bytes) == self.slot_bytes

    def close(self) -> None:
        os.close(self.fd)


class World:
    """One store, of place (0, 0) in an engine of two stages unless a test says otherwise."""

    def __init__(self, make: Callable[[str], Backend] = lambda kind: MemoryBackend(), place: Place = FIRST):
        self.now = 100.0
        self.sent: list[msgspec.Struct] = []
        self.posted: deque[Callable[[], None]] = deque()
        self.lanes: list[Lane] = []
        self.calls = CallPage()
        self._make, self._bounce = make, Bounce()
        self.store = Store(place, 2, self.sent.append, self.posted.append, lambda: self.now, self._lane)
        self.pool = Pool()

    def _lane(self, spec: BackendSpec, home: Home) -> Lane:
        lane = Lane(spec, home.layout, lambda: self._make(spec.kind), self.posted.append, lambda: self.now, self.calls)
        self.lanes.append(lane)
        lane.open_once()
        return lane

    def ready(self, *specs: BackendSpec) -> World:
        """Give it a pool, a namespace and backends."""
        for message in (self.pool.message(), UseNamespace(NAMESPACE), UseBackends(list(specs) or [spec()])):
            self.store.take(message)
        return self

    def ask(self, message: msgspec.Struct) -> msgspec.Struct:
        """Send a job, let the lanes work, and return its one answer."""
        before = len(self.sent)
        self.store.take(message)
        self.work()
        (answer,) = (each for each in self.sent[before:] if not isinstance(each, StoreFigures))
        return answer

    def work(self) -> None:
        """Work until nothing is left."""
        while self.step() or self.run_posted():
            pass

    def step(self) -> bool:
        """Let each lane do one task; the loop does not hear of it before `run_posted`."""
        return sum(lane.work_once(self._bounce, wait=False) for lane in self.lanes) > 0

    def run_posted(self) -> bool:
        """Let the loop hear what threads have handed over."""
        some = bool(self.posted)
        for _ in range(len(self.posted)):
            self.posted.popleft()()
        return some

    def pass_s(self, seconds: float) -> None:
        """Let time go on, and look at the deadlines."""
        self.now += seconds
        self.store.tick()

    def close(self) -> None:
        self.store.close()
        self.work()
        self.pool.close()


class FakeBackend(Backend):
    """A dictionary whose calls do what a test says: `fault` runs at the begin of each call with its name."""

    threads = 2

    def __init__(self, fault: Callable[[str], None] = lambda call: None) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault = fault
        self.opened = self.closed = 0

    def open(self, config: BackendOptions, layout: Layout) -> None:
        self.opened += 1
        self.fault("open")

    def find(self, keys: Sequence[str]) -> list[bool]:
        self.fault("find")
        return [key in self.objects for key in keys]

    def read(self, key: str, into: memoryview) -> int:
        self.fault("read")
        data = self.objects[key]
        into[: len(data)] = data[: len(into)]
        return len(data)

    def write(self, key: str, data: memoryview) -> None:
        self.fault("write")
        self.objects[key] = bytes(data)

    def delete(self, keys: Sequence[str]) -> None:
        self.fault("delete")
        for key in keys:
            for each in [one for one in self.objects if one == key or (key.endswith("/") and one.startswith(key))]:
                del self.objects[each]

    def usage(self) -> Usage:
        return Usage(sum(map(len, self.objects.values())))

    def close(self) -> None:
        self.closed += 1


def marker(sums: Sequence[bytes] = (b"a" * 16, b"b" * 16), blocks: int = 2) -> Marker:
    """Return a marker of an engine of two places."""
    return Marker([4096] * len(sums), list(sums), blocks)


def put(world: World, key: bytes = KEY, slots: tuple[int, ...] = (0, 1), job: int = 1) -> Stored:
    """Write random slots as a chunk."""
    for slot in slots:
        world.pool.write(slot, os.urandom(SLOT_BYTES))
    answer = world.ask(Put(job, 1, "m", key, list(slots), 1000))
    assert isinstance(answer, Stored)
    return answer


def fetch(job: int, keys: list[bytes], slots: list[list[int]], sums: list[bytes], generation: int = 1) -> Fetch:
    """Return a job for chunks of the backend `m`."""
    return Fetch(job, generation, "m", keys, slots, sums, 1000)
