"""A GPU's cache over a driver of host memory: what its mapping thread does beside the steps, and records of it."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ppengine.common.ring import Kind, RingReader
from ppengine.drills.fault_points import Fault, Points, StandIn
from ppengine.drills.registry import find
from ppengine.drills.stage_faults import StageFaults
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cuda import elastic_kv_cache
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.streams import Order
from ppengine.stage.rank_group import LoneRank
from ppengine.stage.recorder import Recorder
from stage_helpers import until

SHAPE = KvShape(layers=2, block_size=16, kv_heads=2, head_dim=32, dtype=torch.float32)
QUANTUM, HANDLE = 8192, 64 * 2**20
"""Blocks of 8 KiB in a handle."""
RESERVED = 8 * QUANTUM
NO_RESERVE = 0x4000


class HostDriver:
    """Addresses of this process, with counts instead of memory behind them; `gate` holds up whoever maps or unmaps."""

    device = torch.device("cpu")
    granularity = 2 * 2**20

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.free = 2**40
        self.failing = False
        self.zeroed: list[int] = []

    def enter(self) -> None:
        """It is any thread's."""

    def free_bytes(self) -> int:
        return self.free

    def reserve(self, size: int) -> int:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def free_addresses(self, address: int, size: int) -> None:
        """They go with the process."""

    def create(self, size: int) -> object:
        assert self.gate.wait(20)
        if self.failing:
            raise DriverError("cuMemCreate", "CUDA_ERROR_UNKNOWN")
        return size

    def release(self, handle: object) -> None:
        """There is nothing behind it."""

    def map(self, address: int, size: int, handle: object) -> None:
        """Nothing to do."""

    def set_access(self, address: int, size: int) -> None:
        """Nothing to do."""

    def unmap(self, address: int, size: int) -> None:
        assert self.gate.wait(20)

    def zero(self, address: int, size: int, stream: int) -> None:
        self.zeroed.append(size)


class LateStream:
    """A stream whose work is done when the test says so."""

    def __init__(self, name: str, device: torch.device | None = None, **_: Any) -> None:
        self.name, self.handle, self.order = name, 0, Order()
        self.idle = threading.Event()
        self.idle.set()
        self.waited: list[str] = []

    def record(self, name: str) -> Any:
        return SimpleNamespace(name=name, synchronize=self.synchronize)

    def wait(self, event: Any) -> None:
        self.waited.append(event.name)

    def synchronize(self) -> None:
        assert self.idle.wait(20)

    def use(self) -> Any:
        return nullcontext()

    def doing(self, what: str) -> Any:
        return nullcontext()


class World:
    """One cache, its driver, its compute stream and the ring of its mapping thread."""

    def __init__(self, folder: Path) -> None:
        path = folder / "s0.0.map.ring"
        self.driver, self.compute = HostDriver(), LateStream("compute")
        self.cache = CudaKvCache(SHAPE, RESERVED, self.driver, self.compute, Recorder(path, "map", 0, 0))  # type: ignore[arg-type]
        self._reader = RingReader(path)
        assert self.cache.map_blocks(2 * QUANTUM) == ""
        self.compute.waited.clear()

    def prepared(self, count: int) -> None:
        until(lambda: self.cache.prepared(count), f"{count} blocks are prepared")

    def newest(self) -> tuple[Kind, int, bool]:
        """Return what the mapping thread did last: kind, blocks, whether it has ended."""
        record = self._reader.latest(1)[0]
        return Kind(record.kind), record.size, bool(record.done_ns)

    def begins(self, kind: Kind) -> None:
        until(lambda: self.newest()[0] is kind and not self.newest()[2], f"the mapping thread is at {kind.name}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(elastic_kv_cache, "Stream", LateStream)
    made = World(tmp_path)
    yield made
    made.driver.gate.set()
    made.compute.idle.set()
    made.cache.close()


def test_a_grow_is_prepared_beside_and_seen_once_it_is_ended(world: World) -> None:
    cache, driver = world.cache, world.driver
    assert cache.quantum_blocks == QUANTUM
    driver.gate.clear()
    cache.prepare(4 * QUANTUM)
    world.begins(Kind.MAP)
    assert world.newest() == (Kind.MAP, 4 * QUANTUM, False)
    assert not cache.prepared(4 * QUANTUM) and cache.mapped == 2 * QUANTUM == len(cache.layers[0])
    cache._filler.idle.clear()  # type: ignore[attr-defined]
    driver.gate.set()
    until(lambda: driver.zeroed, "new blocks are zeroed")
    assert not cache.prepared(4 * QUANTUM), "a step would wait for that"
    cache._filler.idle.set()  # type: ignore[attr-defined]
    world.prepared(4 * QUANTUM)
    assert cache.mapped == 2 * QUANTUM, "what is prepared cannot be used yet"
    assert cache.map_blocks(4 * QUANTUM) == ""
    assert cache.mapped == 4 * QUANTUM == len(cache.layers[1]) == len(cache.blocks)
    assert not world.compute.waited and world.newest() == (Kind.MAP, 4 * QUANTUM, True)


def test_what_a_shrink_takes_is_out_of_reach_at_once_and_goes_when_the_device_is_quiet(world: World) -> None:
    cache = world.cache
    world.compute.idle.clear()
    cache.prepare(QUANTUM)
    assert cache.mapped == QUANTUM == len(cache.layers[0])
    world.begins(Kind.DEVICE)
    assert not cache.prepared(QUANTUM) and cache.mapped_bytes == 4 * HANDLE, "a device that works is no mapping"
    world.compute.idle.set()
    world.prepared(QUANTUM)
    assert cache.map_blocks(QUANTUM) == "" and cache.mapped_bytes == 2 * HANDLE


def test_what_was_refused_to_an_older_change_is_no_answer_to_a_newer_one(world: World) -> None:
    cache, driver = world.cache, world.driver
    driver.gate.clear()
    cache.prepare(4 * QUANTUM)
    world.begins(Kind.MAP)
    cache.prepare(6 * QUANTUM)
    assert not cache.prepared(4 * QUANTUM) and not cache.prepared(6 * QUANTUM)
    driver.free = HANDLE
    cache.prepare(3 * QUANTUM)
    driver.gate.set()
    world.prepared(3 * QUANTUM)
    assert not cache.prepared(4 * QUANTUM) and not cache.prepared(6 * QUANTUM)
    assert cache.map_blocks(3 * QUANTUM) == "" and cache.mapped == 3 * QUANTUM
    assert cache.mapped_bytes == 6 * HANDLE, "what the older ones mapped is gone"


def test_what_cannot_be_is_told_without_a_wait(world: World) -> None:
    cache, driver = world.cache, world.driver
    driver.failing = True
    cache.prepare(4 * QUANTUM)
    world.prepared(4 * QUANTUM)
    text = f"cannot map {4 * QUANTUM} blocks: cuMemCreate: CUDA_ERROR_UNKNOWN; {2 * QUANTUM} stay mapped"
    assert cache.map_blocks(4 * QUANTUM) == text and cache.mapped == 2 * QUANTUM
    driver.failing = False
    driver.gate.clear()
    cache.prepare(4 * QUANTUM)
    cache.prepare(RESERVED + 1)
    assert cache.prepared(RESERVED + 1), "there is nothing to wait for"
    assert cache.map_blocks(RESERVED + 1).startswith(f"cannot map {RESERVED + 1} blocks: addresses are reserved for")


def test_the_fault_of_a_mapping_holds_the_thread_that_maps_and_no_step(world: World) -> None:
    parts = dict.fromkeys(("_receiver", "outgoing", "_model", "_swap", "buffers"))
    arms = SimpleNamespace(_points=Points(), _parts=SimpleNamespace(), _thread=SimpleNamespace(ident=1))
    for _ in range(2):
        runner = SimpleNamespace(cache=world.cache, _group=LoneRank(), **parts)
        StageFaults.runner(arms, runner)  # type: ignore[arg-type]
        assert runner.cache is world.cache
    segments: Any = world.cache._segments
    assert isinstance(segments, StandIn) and not isinstance(segments._part, StandIn), "once, for life"
    fault = Fault(find("map-hang"), arms._parts, 0)  # type: ignore[arg-type]
    arms._points.add(fault, "map")
    world.cache.prepare(4 * QUANTUM)
    world.begins(Kind.MAP)
    assert not world.cache.prepared(4 * QUANTUM)
    arms._points.lift(fault)
    world.prepared(4 * QUANTUM)
    assert world.cache.map_blocks(4 * QUANTUM) == ""
