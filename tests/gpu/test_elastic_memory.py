"""The elastic cache on a GPU: contents, memory that really comes back, refusals, and kernels beside a change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from real import needs_gpu

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")
import pynvml
from ppengine.common.sizes import size_text
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.streams import Stream

pytestmark = needs_gpu
GIB = 2**30
SHAPE = KvShape(layers=8, block_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 64 KiB a block and layer
QUANTUM = 1024
"""Blocks in handles of 64 MiB; 512 MiB in all layers."""

TAKE = """
import sys
from cuda.bindings import driver as d
d.cuInit(0)
d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
print(int(d.cuMemAlloc(int(sys.argv[1]))[0]))
"""


class FailingDriver(Driver):
    """Refuses the map call number `fail_at`, with real memory behind all others."""

    fail_at = -1
    calls = 0

    def map(self, address: int, size: int, handle: object) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise DriverError("cuMemMap", "CUDA_ERROR_UNKNOWN")
        super().map(address, size, handle)


@pytest.fixture
def driver() -> FailingDriver:
    return FailingDriver(0)


@pytest.fixture
def cache(driver: FailingDriver) -> Iterator[CudaKvCache]:
    made = CudaKvCache(SHAPE, 290 * QUANTUM, driver, Stream("compute", driver.device))
    yield made
    torch.cuda.synchronize()
    made.close()


def used() -> int:
    """Return what NVML says of the device, without what torch keeps of tensors that are gone."""
    torch.cuda.empty_cache()
    pynvml.nvmlInit()
    index = torch.cuda.get_device_properties(0).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{index}")
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def another_can_take(size: int) -> bool:
    out = subprocess.run([sys.executable, "-c", TAKE, str(size)], capture_output=True, text=True, check=True)
    return out.stdout.strip() == "0"


def test_contents_views_and_what_nvml_says(cache: CudaKvCache) -> None:
    assert cache.quantum_blocks == QUANTUM and cache.mapped == 1 and cache.mapped_bytes == 8 * 64 * 2**20
    before = used()
    assert cache.map_blocks(4 * QUANTUM) == ""
    assert used() - before == 3 * QUANTUM * SHAPE.block_bytes
    assert [tuple(layer.shape) for layer in cache.layers] == [(4 * QUANTUM, 2, 16, 8, 128)] * 8
    for number, layer in enumerate(cache.layers):
        assert not layer.any()
        layer.fill_(number + 1)
    for number, layer in enumerate(cache.layers):
        assert bool((layer == number + 1).all()), "layers overlap"
    assert cache.map_blocks(QUANTUM + 5) == ""
    assert cache.map_blocks(4 * QUANTUM) == ""
    for number, layer in enumerate(cache.layers):
        assert bool((layer[: QUANTUM + 5] == number + 1).all()) and not layer[QUANTUM + 5 :].any()
    # Once more, now that all kernels are loaded, which takes memory too: to the byte.
    assert cache.map_blocks(QUANTUM) == ""
    settled = used()
    assert cache.map_blocks(4 * QUANTUM) == "" and used() - settled == 3 * QUANTUM * SHAPE.block_bytes
    assert cache.map_blocks(QUANTUM) == "" and used() == settled
    with pytest.raises(IndexError):
        cache.layers[0][QUANTUM]


def test_what_is_given_back_another_process_can_take(cache: CudaKvCache, driver: FailingDriver) -> None:
    most = (driver.free_bytes() - 6 * GIB) // (QUANTUM * SHAPE.block_bytes) * QUANTUM
    assert cache.map_blocks(most) == ""
    freed = 16 * GIB
    assert not another_can_take(freed), "there was as much room before"
    assert cache.map_blocks(most - freed // SHAPE.block_bytes) == ""
    assert another_can_take(freed)


def test_a_refusal_names_the_numbers_and_changes_nothing(cache: CudaKvCache, driver: FailingDriver) -> None:
    cache.map_blocks(QUANTUM)
    before, free = used(), driver.free_bytes()
    blocks = free // SHAPE.block_bytes // QUANTUM * QUANTUM + 3 * QUANTUM
    more = blocks - QUANTUM
    assert cache.map_blocks(blocks) == (
        f"cannot map {blocks} blocks: {more} more need {size_text(more * SHAPE.block_bytes)}, "
        f"the device has {size_text(free)} free"
    )
    assert cache.mapped == QUANTUM == len(cache.layers[3]) and used() == before
    assert cache.map_blocks(0) == f"cannot map 0 blocks: addresses are reserved for 1 to {cache.reserved}"


@pytest.mark.parametrize("at", [1, 8, 24])
def test_a_failure_in_the_middle_is_rolled_back(cache: CudaKvCache, driver: FailingDriver, at: int) -> None:
    before = used()
    driver.calls, driver.fail_at = 0, at
    assert cache.map_blocks(4 * QUANTUM) == (
        f"cannot map {4 * QUANTUM} blocks: cuMemMap: CUDA_ERROR_UNKNOWN; 1 stay mapped"
    )
    assert cache.mapped == 1 and used() == before
    driver.fail_at = -1
    assert cache.map_blocks(4 * QUANTUM) == "" and not cache.layers[7].any()


def test_graph_replays_on_the_head_do_not_notice(cache: CudaKvCache) -> None:
    cache.map_blocks(2 * QUANTUM)
    for layer in cache.layers:
        layer.fill_(1.0)
    stream, total = torch.cuda.Stream(), torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        total.copy_(sum(layer.sum(dtype=torch.float32) for layer in cache.layers))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        total.copy_(sum(layer.sum(dtype=torch.float32) for layer in cache.layers))
    expected = 2 * QUANTUM * SHAPE.block_bytes / 2
    for round_ in range(20):
        count = 22 * QUANTUM if round_ % 2 == 0 else 2 * QUANTUM
        cache.prepare(count)
        replays = 0
        while not cache.prepared(count) or replays < 3:
            with torch.cuda.stream(stream):
                total.zero_()
                graph.replay()
            stream.synchronize()
            assert total.item() == pytest.approx(expected, rel=1e-6)
            replays += 1
        assert cache.map_blocks(count) == "" and cache.mapped == count
