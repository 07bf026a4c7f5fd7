"""Blocks to the host and back, and within the cache, on a GPU: the same bytes in list order, past all borders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")
from ppengine.protocol.steps import MoveKind
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cuda import copy_lanes, pinned_swap_space
from ppengine.stage.backends.cuda.block_mover import BlockMover
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache, block_view
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedSwapSpace
from ppengine.stage.backends.cuda.streams import Event, Stream
from real import needs_gpu

pytestmark = needs_gpu

SHAPE = KvShape(layers=5, block_size=16, kv_heads=3, head_dim=80, dtype=torch.float16)
BLOCKS, SLOTS = 300, 200


class World(NamedTuple):
    cache: CudaKvCache
    host: PinnedSwapSpace
    mover: BlockMover
    compute: Stream
    lanes: dict[MoveKind, copy_lanes.DeviceLane | copy_lanes.SwapLane]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # Three blocks a half of the staging buffer, eleven slots a piece.
    monkeypatch.setattr(pinned_swap_space, "_PIECE", 11 * SHAPE.block_bytes)
    driver = Driver(0)
    compute = Stream("compute", driver.device)
    cache = CudaKvCache(SHAPE, 4096, driver, compute)
    assert cache.map_blocks(BLOCKS) == ""
    host = PinnedSwapSpace(SHAPE, SLOTS, block_view(SHAPE, driver.device), driver)
    with compute.use():
        for layer in cache.layers:
            layer.copy_(torch.randn(layer.shape, device="cuda"))
    lanes = copy_lanes.make_lanes(cache, host, driver, compute, 7 * SHAPE.block_bytes)
    yield World(cache, host, BlockMover(compute, lanes), compute, lanes)
    torch.cuda.synchronize()
    host.close()
    cache.close()


def device(world: World) -> torch.Tensor:
    """Return every block as [blocks, layers, ...] on the host."""
    world.compute.synchronize()
    return torch.stack([layer.cpu() for layer in world.cache.layers], 1)


def test_out_and_back_gives_the_same_bytes(world: World) -> None:
    before = device(world)
    generator = random.Random(1)
    blocks, slots = generator.sample(range(1, BLOCKS), 150), generator.sample(range(SLOTS), 150)
    out = world.mover.move(MoveKind.OUT, list(zip(blocks, slots, strict=True)))
    assert out is not None
    out.synchronize()
    kept = torch.stack(world.host.layers, 1)
    assert torch.equal(kept[slots], before[blocks])
    with world.compute.use():
        for layer in world.cache.layers:
            layer.fill_(float("nan"))
    back = generator.sample(range(BLOCKS), 150)
    world.mover.move(MoveKind.IN, list(zip(slots, back, strict=True)))
    # Only compute waits; no thread does.
    after = device(world)
    assert torch.equal(after[back], before[blocks])
    others = sorted(set(range(BLOCKS)) - set(back))
    assert bool(after[others].isnan().all()), "a block beside was written"


def test_a_swap_takes_what_compute_writes_last(world: World) -> None:
    with world.compute.use():
        torch.cuda._sleep(20_000_000)  # about 10 ms
        world.cache.layers[2][7].fill_(5.0)
    event = world.mover.move(MoveKind.OUT, [(7, 3)])
    assert event is not None and not event.done()
    event.synchronize()
    assert bool((world.host.layers[2][3] == 5.0).all())


def test_a_half_is_filled_again_when_its_copy_has_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = device(world)
    blocks, slots = list(range(1, 13)), list(range(20, 32))
    pairs = list(zip(blocks, slots, strict=True))
    # A first kernel may have to be loaded, which would take as long as the sleep.
    settle(world.mover.move(MoveKind.OUT, pairs))
    for layer in world.host.layers:
        layer.zero_()
    plain = Driver.to_host

    def late(driver: Driver, host: int, device: int, size: int, stream: int) -> None:
        torch.cuda._sleep(20_000_000)  # about 10 ms, on the lane's stream
        plain(driver, host, device, size, stream)

    monkeypatch.setattr(Driver, "to_host", late)
    settle(world.mover.move(MoveKind.OUT, pairs))
    assert torch.equal(torch.stack(world.host.layers, 1)[slots], before[blocks])


def test_a_half_is_filled_again_when_its_kernel_has_ended(world: World) -> None:
    before = device(world)
    blocks, slots, back = list(range(1, 13)), list(range(20, 32)), list(range(101, 113))
    settle(world.mover.move(MoveKind.OUT, list(zip(blocks, slots, strict=True))))
    settle(world.mover.move(MoveKind.IN, list(zip(slots, range(201, 213), strict=True))))
    lane = world.lanes[MoveKind.IN]
    assert isinstance(lane, copy_lanes.SwapLane)
    with lane._kernels.use():
        torch.cuda._sleep(100_000_000)  # about 50 ms: the copies could all be done before
    settle(world.mover.move(MoveKind.LOAD, list(zip(slots, back, strict=True))))
    assert torch.equal(device(world)[back], before[blocks])


def settle(event: Event | None) -> None:
    assert event is not None
    event.synchronize()


@pytest.mark.parametrize("seed", range(10))
def test_any_list_in_order(world: World, seed: int) -> None:
    generator = random.Random(seed)
    blocks, slots = device(world), torch.stack([layer.clone() for layer in world.host.layers], 1)
    for _ in range(12):
        kind = generator.choice(list(MoveKind))
        from_host, to_host = kind.from_host, kind.to_host
        count = generator.randrange(1, 40)
        sources = [generator.randrange(SLOTS if from_host else BLOCKS) for _ in range(count)]
        # Targets may come twice: the last one counts.
        targets = [generator.randrange(SLOTS if to_host else BLOCKS) for _ in range(count)]
        pairs = list(zip(sources, targets, strict=True))
        event = world.mover.move(kind, pairs)
        if to_host and event is not None and generator.random() < 0.5:
            event.synchronize()
        for source, target in pairs:
            (slots if to_host else blocks)[target] = (slots if from_host else blocks)[source]
    torch.cuda.synchronize()
    assert torch.equal(device(world), blocks)
    assert torch.equal(torch.stack(world.host.layers, 1), slots)


def test_blocks_move_within_the_cache_without_more_memory(world: World) -> None:
    blocks, half = device(world), BLOCKS // 2
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    world.mover.move(MoveKind.DEVICE, [(half + block, block) for block in range(half)])
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < SHAPE.block_bytes
    assert torch.equal(device(world)[:half], blocks[half : 2 * half])


@pytest.mark.parametrize(
    "kind, pair", [(MoveKind.OUT, (BLOCKS, 0)), (MoveKind.IN, (0, BLOCKS)), (MoveKind.OUT, (0, SLOTS))]
)
def test_a_block_outside_is_refused(world: World, kind: MoveKind, pair: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match="block copy"):
        world.mover.move(kind, [(0, 0), pair])
