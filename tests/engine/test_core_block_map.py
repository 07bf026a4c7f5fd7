"""The KV map of the core: every block in a cell, the selected request's cells, one fold for all who ask."""

from __future__ import annotations

import pytest
from core_world import CoreWorld
from ppengine.core import block_map
from ppengine.core.scheduler.block_pool import STATES
from ppengine.protocol.control import Inspect, Inspected
from ppengine.protocol.frames import decode_as
from ppengine.protocol.inspection import BlocksDetail


@pytest.fixture
def world() -> CoreWorld:
    world = CoreWorld(stages=2)
    for index in range(3):
        world.submit([1 + index] * 20, name=f"r{index}", max_tokens=12)
    world.run(4)
    return world


def folded(world: CoreWorld, cells: int, name: str | None) -> BlocksDetail:
    return block_map.BlockMap(lambda: world.now).answer(world.engine.health.require(), cells, name)


def expanded(detail: BlocksDetail) -> list[str]:
    return [state for count, state in detail.runs for _ in range(count)]


@pytest.mark.parametrize("cells", [1, 7, 64, 10_000])
def test_a_cell_is_what_its_fullest_block_is(world: CoreWorld, cells: int) -> None:
    detail = folded(world, cells, "r1")
    mapped, found = detail.mapped, expanded(detail)
    assert mapped == world.memory.mapped_blocks and len(found) <= cells and len(found) * detail.size >= mapped
    states = world.scheduler.blocks.device.states
    assert len(states) == mapped
    for cell, state in enumerate(found):
        assert state == STATES[max(states[cell * detail.size : (cell + 1) * detail.size])]
    blocks = world.scheduler.queues.requests["r1"].blocks
    assert blocks and detail.mine == sorted({block // detail.size for block in blocks})


def test_who_asks_for_nobody_or_for_who_is_gone_gets_the_map(world: CoreWorld) -> None:
    for name in (None, "nobody"):
        detail = folded(world, 64, name)
        assert (detail.request, detail.mine) == (name, []) and detail.runs


def test_samples_of_one_prompt_light_their_own_blocks() -> None:
    world = CoreWorld(stages=2)
    world.submit([1] * 20, name="r", max_tokens=12, n=3)
    world.run(6)
    requests = world.scheduler.queues.requests
    for name in ("r", "r.1"):
        assert folded(world, 10_000, name).mine == sorted(set(requests[name].blocks))


@pytest.mark.parametrize("cells", [-1, 0, 10**18])
def test_an_absurd_number_of_cells_is_no_matter(world: CoreWorld, cells: int) -> None:
    assert 0 < len(expanded(folded(world, cells, None))) <= block_map.CELLS_MOST


def test_one_fold_serves_all_who_ask_within_a_moment(world: CoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    made, serving, folds = block_map.BlockMap(lambda: world.now), world.engine.health.require(), []
    real = made._fold
    monkeypatch.setattr(made, "_fold", lambda scheduler, size: (folds.append(size), real(scheduler, size))[1])
    first = made.answer(serving, 64, "r0")
    assert made.answer(serving, 64, "r1").runs == first.runs and len(folds) == 1
    made.answer(serving, 7, None)
    assert len(folds) == 2
    world.now += block_map.FRESH_S
    made.answer(serving, 64, None)
    assert len(folds) == 3


def test_an_inspection_says_how_many_cells(world: CoreWorld) -> None:
    told = world.engine.details.answer(Inspect(nonce=1, what="blocks", cells=16, request="r2"))
    assert isinstance(told, Inspected)
    detail = decode_as(BlocksDetail, bytes(told.data))
    assert len(expanded(detail)) <= 16 and detail.request == "r2" and detail.mine
