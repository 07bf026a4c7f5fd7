"""Constrained rows that are scheduled before their masks have come, in the scheduler and in real stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint
from ppengine.common.ring import Kind, RingReader
from ppengine.protocol.steps import LateMasks, Mask
from ppengine.protocol.token_mask import TokenMask
from scheduler_world import CONSTRAINED, World
from stage_core import FakeCore, Sequence

PROMPT = [7, 99, 3, 45, 12, 80, 33]
OTHER = [100, 2, 77, 31, 8, 54, 23]
BLOCKS = [3, 1, 9, 4]
SEED = 1
"""With it, no output ends by itself."""


# --- the scheduler ----------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    """One stage that is scheduled ahead, whose two constrained requests have their first token in flight."""
    world = World(stages=1, schedule_ahead=True, num_blocks=40)
    for _ in range(2):
        (request,) = world.add(PROMPT, structured_outputs=CONSTRAINED, seed=SEED, max_tokens=12)
        world.mask(request, 0)
        request.ahead = True
    assert [len(step.rows) for step in iter(world.schedule, None)] == [2, 2]
    return world


def drain(world: World) -> None:
    """Execute and retire what can be."""
    world.pass_masks()
    world.model.drain()
    while world.retire() is not None:
        world.model.drain()


def requests(world: World) -> list:
    return list(world.all.values())


def test_a_row_is_computed_while_its_mask_is_missing(world: World) -> None:
    first, second = requests(world)
    assert world.model.steps[1].late == [first.slot, second.slot] and not world.model.steps[1].masks
    drain(world)
    assert [request.output_ids for request in (first, second)] == [world.expected(first)[:1]] * 2
    world.mask(first, 0)
    drain(world)
    assert len(first.output_ids) == 1, "the step waits for both"
    world.mask(second, 0)
    drain(world)
    assert len(first.output_ids) == len(second.output_ids) == 2


def test_the_next_step_waits_for_the_masks_of_the_oldest_one(world: World) -> None:
    first, second = requests(world)
    drain(world)
    world.mask(first, 0)
    assert world.schedule() is None, "it would leave the other one behind"
    world.mask(second, 0)
    step = world.schedule()
    assert step is not None and len(step.rows) == 2


def test_a_row_whose_token_is_forced_samples_for_nothing(world: World) -> None:
    first, second = requests(world)
    drain(world)
    world.mask(first, 3)
    world.mask(second, 0)
    assert len(first.output_ids) == 4 and not first.pending
    drain(world)
    assert (len(first.output_ids), len(second.output_ids)) == (4, 2)
    step = world.schedule()
    assert step is not None and [row.count for row in step.rows] == [3, 1], "the forced run, and its own mask"


@pytest.mark.parametrize("verb", ["abort", "finish"])
def test_a_request_that_ends_keeps_no_step_waiting(world: World, verb: str) -> None:
    first, second = requests(world)
    if verb == "abort":
        world.act("abort", first.id)
    else:
        world.scheduler.retirement.finish(first.id, "stopped by text")
    drain(world)
    world.mask(second, 0)
    drain(world)
    assert len(second.output_ids) == 2 and first.finished
    world.run()
    world.verify_end()


def test_a_mask_that_is_given_up_costs_a_token_that_is_computed_again(world: World) -> None:
    first, second = requests(world)
    drain(world)
    world.mask(second, 0)
    world.give_up(first)
    assert not first.ahead and first.late_step
    drain(world)
    assert (len(first.output_ids), len(second.output_ids), first.num_computed) == (1, 2, len(PROMPT))
    step = world.schedule()
    assert step is not None and [row.slot for row in step.rows] == [second.slot], "it waits for its mask from now on"
    world.mask(first, 0)
    drain(world)
    world.mask(second, 0)
    step = world.schedule()
    assert step is not None and [row.start for row in step.rows if row.slot == first.slot] == [len(PROMPT)]
    world.run()
    world.verify_end()


# --- real stages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCore]:
    """Two stages with two requests whose prompts are computed."""
    with FakeCore(make_checkpoint(tmp_path_factory.mktemp("late") / "llama", "llama", dtype="float64")) as core:
        core.serve()
        yield core


def mask(*tokens: int) -> TokenMask:
    """Return a mask of 128 tokens."""
    bits = np.zeros(128, np.uint8)
    bits[list(tokens)] = 1
    return TokenMask(np.packbits(bits, bitorder="little").tobytes())


def waits_for_masks(core: FakeCore) -> bool:
    """Return whether the last stage waits for masks."""
    record = RingReader(Path(core.config.ring_dir) / "s1.0.main.ring").latest(1)[0]
    return Kind(record.kind) is Kind.MASK and not record.done_ns


def test_the_last_stage_samples_when_the_masks_are_there(served: FakeCore) -> None:
    core, free, bound = served, Sequence(served, 0, PROMPT, BLOCKS), Sequence(served, 1, OTHER, [2, 5, 7, 8])
    free.prefill(16)
    bound.prefill(16)
    undisturbed = core.run(rows=[free.row(), bound.row()])
    before = core.send(rows=[])
    late = core.send(rows=[free.row(), bound.row()], late=[bound.slot])
    core.until(lambda: waits_for_masks(core), "the last stage waits")
    core.until(lambda: 0 in core.retired.get(late, {}), "the first stage has its part")
    assert len(core.retired[before]) == 2, "steps before it are acknowledged"
    core.masks(LateMasks(core.generation, late, [Mask([bound.slot], mask(11, 12))]))
    sampled = core.result(late)
    assert sampled[0].token == undisturbed[0].token and sampled[1].token in (11, 12)
    early = core.number + 1
    core.masks(LateMasks(core.generation, early, [Mask([bound.slot], mask(13))]))
    assert core.run(rows=[bound.row()], late=[bound.slot])[0].token == 13, "masks may come before their step"
    dropped = core.send(rows=[bound.row()], late=[bound.slot])
    core.masks(LateMasks(core.generation, dropped, []))
    assert core.result(dropped)[0].token == undisturbed[1].token, "without a mask it is free, and the core drops it"
    core.release()


def test_a_stage_that_waits_for_masks_leaves_with_its_generation(served: FakeCore) -> None:
    core, bound = served, Sequence(served, 0, PROMPT, BLOCKS)
    bound.prefill(16)
    core.send(rows=[bound.row()], late=[bound.slot])
    core.until(lambda: waits_for_masks(core), "the last stage waits")
    pid = core.children[1].pid
    core.restart(0)
    assert core.children[1].pid == pid
    core.map(64)
    again = Sequence(core, 0, PROMPT, BLOCKS)
    again.prefill(16)
    number = core.number + 1
    core.masks(LateMasks(core.generation - 1, number, [Mask([0], mask(3))]))
    core.send(rows=[again.row()], late=[0])
    core.until(lambda: waits_for_masks(core), "masks of another generation are none")
    core.masks(LateMasks(core.generation, number, [Mask([0], mask(9))]))
    assert core.result(number)[0].token == 9
    core.release()
