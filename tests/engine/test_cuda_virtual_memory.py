"""Segments over a driver that keeps books: whatever call fails, nothing is lost and nothing is left behind."""

from __future__ import annotations

import ctypes
import itertools
import math
import random

import pytest
import torch
from ppengine.stage.backends.cuda.dlpack import tensor_over
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.virtual_memory import Segments, handle_bytes

MIB = 2**20
HANDLE = 2 * MIB


class BookDriver:
    """Refuses what the real one refuses, and the call number `fail_at`."""

    def __init__(self) -> None:
        self.calls = 0
        self.fail_at: int | None = None
        self.capacity = 1000
        self.live: dict[int, int] = {}
        """Handles that are held, and their size."""
        self.mapped: dict[int, tuple[int, int]] = {}
        """Address to (handle, size)."""
        self.accessible: set[int] = set()
        self._numbers = itertools.count(1)

    def _call(self, name: str) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise DriverError(name, "CUDA_ERROR_UNKNOWN")

    def memory(self) -> int:
        return sum({**self.live, **dict(self.mapped.values())}.values())

    def reserve(self, size: int) -> int:
        self._call("reserve")
        return 1 << 40

    def free_addresses(self, address: int, size: int) -> None:
        assert not self.mapped, "addresses are freed with memory behind them"

    def create(self, size: int) -> int:
        self._call("create")
        if self.memory() + size > self.capacity * HANDLE:
            raise DriverError("create", "CUDA_ERROR_OUT_OF_MEMORY")
        handle = next(self._numbers)
        self.live[handle] = size
        return handle

    def release(self, handle: int) -> None:
        del self.live[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("map")
        assert self.live[handle] == size and address % HANDLE == 0
        assert address not in self.mapped and handle not in {h for h, _ in self.mapped.values()}
        self.mapped[address] = handle, size

    def set_access(self, address: int, size: int) -> None:
        self._call("set_access")
        run = range(address, address + size, HANDLE)
        assert all(start in self.mapped for start in run)
        self.accessible.update(run)

    def unmap(self, address: int, size: int) -> None:
        self._call("unmap")
        for start in range(address, address + size, HANDLE):
            del self.mapped[start]
            self.accessible.discard(start)


def backed(driver: BookDriver, segments: Segments) -> list[int]:
    """Return the usable handles at the start of every segment; nothing may lie behind a gap."""
    counts = []
    for segment in range(len(segments.mapped)):
        start = segments.base + segment * segments.stride
        inside = [a for a in driver.mapped if start <= a < start + segments.stride]
        counts.append(len(inside))
        assert sorted(inside) == [start + index * HANDLE for index in range(len(inside))]
    assert driver.accessible == set(driver.mapped)
    return counts


def test_a_handle_holds_whole_blocks() -> None:
    # OPT-6.7B and Llama-8B (256 and 64 KiB a block and layer) on four stages and on one: 512 MiB and 1 GiB of a stage.
    assert handle_bytes(256 * 1024, 8, HANDLE) == handle_bytes(64 * 1024, 8, HANDLE) == 64 * MIB
    assert handle_bytes(256 * 1024, 32, HANDLE) == handle_bytes(64 * 1024, 32, HANDLE) == 32 * MIB
    # 32 heads of 80 values in half precision: 160 KiB, five times a power of two, so 10 MiB is the least.
    assert handle_bytes(160 * 1024, 8, HANDLE) == 40 * MIB
    assert handle_bytes(384, 2000, HANDLE) == 6 * MIB
    assert handle_bytes(128 * MIB, 8, HANDLE) == 128 * MIB


@pytest.mark.parametrize("block", [384, 40 * 1024, 64 * 1024, 160 * 1024, 3 * MIB])
def test_quanta_of_stages_divide_each_other(block: int) -> None:
    sizes = [handle_bytes(block, layers, HANDLE) for layers in range(1, 81)]
    for size in sizes:
        assert size % block == 0 and size % HANDLE == 0
    assert math.lcm(*sizes) == max(sizes)


def test_growing_and_shrinking_keep_the_books() -> None:
    driver = BookDriver()
    segments = Segments(driver, 3, 8, HANDLE)
    assert segments.stride == 8 * HANDLE and segments.length == 24 * HANDLE
    assert segments.missing(2) == 6 * HANDLE
    new = segments.grow(2)
    assert new == [(segments.base + k * segments.stride, 2 * HANDLE) for k in range(3)]
    assert segments.grow(5) == [(segments.base + k * segments.stride + 2 * HANDLE, 3 * HANDLE) for k in range(3)]
    assert backed(driver, segments) == [5, 5, 5] == segments.mapped
    assert not driver.live, "mapped memory needs no handle"
    segments.shrink(1)
    assert backed(driver, segments) == [1, 1, 1] and driver.memory() == segments.mapped_bytes == 3 * HANDLE
    assert segments.grow(1) == []
    segments.close()
    assert driver.memory() == 0


@pytest.mark.parametrize("start", [0, 1, 3])
def test_growing_is_all_or_nothing_whatever_fails(start: int) -> None:
    # 3 segments to 4 handles each: create, map, one access a segment.
    steps = 2 * 3 * (4 - start) + 3
    for fail_at in range(1, steps + 1):
        driver = BookDriver()
        segments = Segments(driver, 3, 8, HANDLE)
        segments.grow(start)
        before = dict(driver.mapped)
        driver.calls, driver.fail_at = 0, fail_at
        with pytest.raises(DriverError):
            segments.grow(4)
        driver.fail_at = None
        assert driver.mapped == before and not driver.live and segments.mapped == [start] * 3
        segments.grow(4)
        assert backed(driver, segments) == [4, 4, 4]
    driver = BookDriver()
    segments = Segments(driver, 3, 8, HANDLE)
    segments.grow(start)
    driver.calls, driver.fail_at = 0, steps + 1
    segments.grow(4)


def test_too_little_memory_is_found_before_anything_is_mapped() -> None:
    driver = BookDriver()
    driver.capacity = 10
    segments = Segments(driver, 3, 8, HANDLE)
    segments.grow(2)
    with pytest.raises(DriverError) as caught:
        segments.grow(4)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
    assert backed(driver, segments) == [2, 2, 2] and driver.memory() == 6 * HANDLE
    segments.grow(3)


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_shrink_that_fails_goes_on_from_where_it_stopped(fail_at: int) -> None:
    driver = BookDriver()
    segments = Segments(driver, 3, 8, HANDLE)
    segments.grow(6)
    driver.calls, driver.fail_at = 0, fail_at
    with pytest.raises(DriverError):
        segments.shrink(2)
    driver.fail_at = None
    assert segments.mapped == [2] * (fail_at - 1) + [6] * (4 - fail_at) == backed(driver, segments)
    grown = segments.grow(5)
    assert len(grown) == fail_at - 1, "what is still there is not mapped again"
    segments.shrink(2)
    assert backed(driver, segments) == [2, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_any_history_with_failures(seed: int) -> None:
    generator = random.Random(seed)
    driver = BookDriver()
    driver.capacity = 12
    segments = Segments(driver, 2, 8, HANDLE)
    for _ in range(40):
        driver.calls, driver.fail_at = 0, generator.choice([None, generator.randrange(1, 20)])
        wanted = generator.randrange(9)
        try:
            segments.shrink(wanted)
            segments.grow(wanted)
        except DriverError:
            pass
        else:
            assert segments.mapped == [wanted] * 2
        driver.fail_at = None
        assert backed(driver, segments) == segments.mapped and not driver.live
        assert driver.memory() == segments.mapped_bytes
    segments.shrink(0)
    assert driver.memory() == 0


def test_a_tensor_over_foreign_memory() -> None:
    memory = (ctypes.c_uint8 * 64)(*range(64))
    tensor = tensor_over(ctypes.addressof(memory), 64, torch.device("cpu"))
    assert tensor.dtype == torch.uint8 and tensor.tolist() == list(range(64))
    tensor.view(torch.int64)[1] = -1
    assert list(memory)[8:17] == [255] * 8 + [16]
    views = [tensor[:8], tensor.view(torch.int16)]
    del tensor
    assert views[1].shape == (32,) and views[0].tolist() == list(range(8))
