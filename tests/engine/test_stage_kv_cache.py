"""The elastic cache: views, memory that really comes back, zeros after growing again, page arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from ppengine.common.config import ConfigError
from ppengine.common.system_memory import SystemMemory
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cpu import cpu_hardware, kv_cache
from ppengine.stage.backends.cpu.kv_cache import CpuKvCache, CpuSwapSpace
from stage_helpers import resident

SHAPE = KvShape(layers=3, block_size=16, kv_heads=2, head_dim=32, dtype=torch.float32)
MIB = 2**20


def test_block_arithmetic() -> None:
    assert SHAPE.layer_block_bytes == 2 * 16 * 2 * 32 * 4 == 8192
    assert SHAPE.block_bytes == 3 * 8192
    assert SHAPE.quantum_blocks() == 1
    # 2 * 8 * 1 * 12 * 2 = 384 bytes a block and layer: 32 of them are 3 pages.
    odd = KvShape(layers=1, block_size=8, kv_heads=1, head_dim=12, dtype=torch.bfloat16)
    assert odd.layer_block_bytes == 384
    assert odd.quantum_blocks() == 32


def test_only_mapped_blocks_can_be_reached() -> None:
    cache = CpuKvCache(SHAPE, 64)
    assert cache.mapped == 1  # the null block
    assert cache.map_blocks(10) == ""
    assert [tuple(layer.shape) for layer in cache.layers] == [(10, 2, 2, 16, 32)] * 3
    with pytest.raises(IndexError):
        cache.layers[0][10]
    with pytest.raises(IndexError):
        cache.layers[2].index_select(0, torch.tensor([10]))


def test_layers_do_not_overlap() -> None:
    cache = CpuKvCache(SHAPE, 8)
    cache.map_blocks(8)
    for value, layer in enumerate(cache.layers):
        layer.fill_(value + 1)
    for value, layer in enumerate(cache.layers):
        assert bool((layer == value + 1).all())


def test_shrink_gives_memory_back_and_growing_again_gives_zeros() -> None:
    blocks = 1024
    cache = CpuKvCache(SHAPE, blocks)
    assert cache.map_blocks(blocks) == ""
    for layer in cache.layers:
        layer.fill_(1.0)
    full = blocks * SHAPE.block_bytes
    assert full <= resident(cache.base, cache.length) <= full + MIB
    assert cache.map_blocks(blocks // 4) == ""
    assert full // 4 <= resident(cache.base, cache.length) <= full // 4 + MIB
    assert cache.map_blocks(blocks) == ""
    for layer in cache.layers:
        assert bool((layer[: blocks // 4] == 1.0).all())
        assert not bool(layer[blocks // 4 :].any())


def test_blocks_that_share_a_page_regrow_as_zeros() -> None:
    odd = KvShape(layers=2, block_size=8, kv_heads=1, head_dim=12, dtype=torch.bfloat16)
    cache = CpuKvCache(odd, 100)
    cache.map_blocks(100)
    for layer in cache.layers:
        layer.fill_(3.0)
    cache.map_blocks(33)
    cache.map_blocks(100)
    for layer in cache.layers:
        assert bool((layer[:33] == 3.0).all())
        assert not bool(layer[33:].any())


def test_host_pool_is_a_mapping_apart() -> None:
    cache = CpuKvCache(SHAPE, 256)
    host = CpuSwapSpace(SHAPE, 256)
    cache.map_blocks(256)
    for layer in host.layers:
        layer.fill_(1.0)
    assert resident(cache.base, cache.length) < MIB


@pytest.mark.parametrize("shared", [False, True])
def test_a_slot_is_one_run_of_memory_and_is_forgotten(shared: bool) -> None:
    host = CpuSwapSpace(SHAPE, 64, shared=shared)
    for number, layer in enumerate(host.layers):
        layer[7].fill_(number + 1.0)
    slots = torch.frombuffer(host._map, dtype=torch.float32).view(64, 3, -1)
    assert slots[7].unique(dim=1).flatten().tolist() == [1.0, 2.0, 3.0]
    assert not bool(slots[6].any() or slots[8].any())
    host.forget()
    assert not bool(slots.any())


def test_a_shared_slot_is_seen_by_a_process_that_opens_it() -> None:
    host = CpuSwapSpace(SHAPE, 8, shared=True)
    script = (
        f"import mmap, os; fd = os.open('/proc/{os.getpid()}/fd/{host.fd}', os.O_RDWR); size = {SHAPE.block_bytes}; "
        "slots = mmap.mmap(fd, 0); assert not any(slots[:size]); slots[size : 2 * size] = bytes([1]) * size"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    for layer in host.layers:
        assert bool((layer[1].view(torch.uint8) == 1).all()) and not bool(layer[0].any() or layer[2].any())
    assert CpuSwapSpace(SHAPE, 8).fd == -1


def test_refusals_name_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CpuKvCache(SHAPE, 64)
    cache.map_blocks(4)
    assert cache.map_blocks(65) == "cannot map 65 blocks: addresses are reserved for 1 to 64"
    assert cache.map_blocks(0) == "cannot map 0 blocks: addresses are reserved for 1 to 64"
    monkeypatch.setattr(kv_cache, "system_memory", lambda: SystemMemory(MIB, MIB))
    assert cache.map_blocks(64) == "cannot map 64 blocks: 60 more need 1.4 MiB, the system has 1.0 MiB available"
    assert cache.mapped == 4 and len(cache.layers[0]) == 4


def test_reserving_costs_nothing() -> None:
    cache = CpuKvCache(SHAPE, 200_000)  # 4.6 GiB
    assert cache.length == 200_000 * SHAPE.block_bytes
    assert resident(cache.base, cache.length) < MIB


def test_a_host_pool_that_cannot_be_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_hardware, "system_memory", lambda: SystemMemory(total=8 * 2**30, available=6 * 2**30))
    stage = cpu_hardware.CpuHardware.__new__(cpu_hardware.CpuHardware)
    stage._places = 2
    with pytest.raises(ConfigError) as refused:
        stage.swap_space(SHAPE, 2**50 // SHAPE.block_bytes)  # more than there are addresses
    text = str(refused.value)
    assert text.startswith("1048576.0 GiB of host memory for 45812984490 swapped blocks cannot be reserved: Cannot ")
    assert "the host has 8.0 GiB, 6.0 GiB of it available, for 2 stages" in text
    assert text.endswith("memory.swap_space_gib of at most 2.7 would fit")
