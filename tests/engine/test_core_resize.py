"""Memory changed live in the core: what supersedes what, and what a stage that cannot follow leaves behind."""

from __future__ import annotations

import random

import pytest
from core_world import CoreWorld
from ppengine.protocol.control import Outcome, Pause, Resume, SetMemory


def states(world: CoreWorld, *names: str) -> list[str]:
    return [getattr(world.last(name), "state", "open") for name in names]


def mapped(world: CoreWorld) -> int:
    return world.engine.resizer.mapped_blocks


def test_a_grow_in_flight_that_is_superseded_by_a_shrink_and_fails_everywhere_does_not_stop_the_shrink():
    world = CoreWorld()
    grow = world.set_memory(0.8)
    shrink = world.set_memory(0.3)
    assert world.steps[0].map_blocks == 700
    world.retire(mapped=[400, 400])
    world.run()
    assert states(world, grow, shrink) == ["superseded", "applied"]
    assert (mapped(world), world.engine.resizer.utilization) == (200, 0.3)
    world.check()


def test_a_grow_in_flight_that_is_superseded_by_a_shrink_and_fails_on_one_stage_does_not_stop_the_shrink():
    world = CoreWorld()
    grow = world.set_memory(0.8)
    shrink = world.set_memory(0.3)
    world.retire(mapped=[700, 400])
    world.run()
    assert states(world, grow, shrink) == ["superseded", "applied"]
    assert mapped(world) == 200
    world.check()


def test_a_grow_that_one_stage_cannot_follow_goes_back_to_what_all_have():
    world = CoreWorld()
    grow = world.set_memory(0.8)
    world.retire(mapped=[700, 400])
    assert world.steps[0].map_blocks == 400
    world.run()
    outcome = world.last(grow)
    assert isinstance(outcome, Outcome)
    assert (outcome.state, outcome.text) == ("failed", "stage 1: no memory; stays at 400 blocks")
    assert (mapped(world), world.engine.resizer.utilization) == (400, 0.5)
    world.check()


def test_what_a_failed_change_goes_back_to_is_what_was_mapped_last_and_not_what_was_superseded():
    world = CoreWorld()
    first = world.set_memory(0.6)
    second = world.set_memory(0.8)
    world.retire()
    world.retire(mapped=[500, 500])
    world.run()
    assert states(world, first, second) == ["superseded", "failed"]
    assert (mapped(world), world.engine.resizer.utilization) == (500, 0.6)
    world.check()


def test_a_change_before_the_first_mapping_waits_for_it():
    world = CoreWorld(serve=False)
    world.ready()
    grow = world.set_memory(0.7)
    world.run()
    assert states(world, grow) == ["applied"]
    assert mapped(world) == 600
    world.check()


def test_a_first_mapping_that_fails_ends_the_engine_also_when_a_change_waits():
    world = CoreWorld(serve=False)
    world.ready()
    world.set_memory(0.3)
    world.retire(mapped=[1, 400])
    assert "no memory" in world.engine.failed
    assert world.engine.leaving


def test_the_same_size_is_applied_at_once():
    world = CoreWorld()
    assert [type(answer).__name__ for answer in world.say(SetMemory(utilization=0.5))] == ["Accepted", "Outcome"]
    assert not world.steps
    world.check()


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_changes_steps_failures_and_pauses_ends_with_what_was_asked_last(seed):
    source = random.Random(seed)
    world = CoreWorld(schedule_ahead=seed % 2 == 1, max_model_len=640, max_num_seqs=16, preemption="swap")
    names, wanted = [], 0.5
    for index in range(12):
        world.submit([1 + index] * source.randint(1, 300), max_tokens=source.randint(1, 300))
    for _ in range(400):
        chance = source.random()
        if chance < 0.1:
            wanted = source.choice([0.2, 0.25, 0.5, 0.75, 1.0])
            names.append(world.set_memory(wanted))
        elif chance < 0.13:
            world.say(source.choice([Pause(mode="keep"), Pause(mode="wait"), Resume()]))
        elif world.steps:
            asked, have = world.steps[0].map_blocks, mapped(world)
            fails = asked is not None and asked > have and source.random() < 0.4
            world.retire(mapped=source.choice([[have, have], [asked, have], [have, asked]]) if fails else None)
        else:
            world.engine.advance()
        world.check()
    world.say(Resume())
    final = world.set_memory(0.6)
    world.run()
    world.check()
    assert states(world, final) == ["applied"]
    assert mapped(world) == 500
    assert all(state in ("applied", "failed", "superseded") for state in states(world, *names))
    assert world.engine.live() == []
    assert world.engine.scheduler.device.used == 0
