"""Memory changed live in the core: what supersedes what, and what a stage that cannot follow leaves behind."""

from __future__ import annotations

import random

import pytest
from core_world import CoreWorld
from ppengine.core.memory_controller import LATE_S
from ppengine.protocol.control import Deferred, Outcome
from ppengine.protocol.steps import Mapped
from ppengine.protocol.verbs import Drain, Pause, Resume, SetMemory


def states(world: CoreWorld, *names: str) -> list[str]:
    return [getattr(world.last(name), "state", "open") for name in names]


def mapped(world: CoreWorld) -> int:
    return world.memory.mapped_blocks


def test_a_grow_in_flight_that_is_superseded_by_a_shrink_and_fails_everywhere_does_not_stop_the_shrink():
    world = CoreWorld()
    grow = world.set_memory(0.8)
    shrink = world.set_memory(0.3)
    assert world.steps[0].map_blocks == 700
    world.retire(mapped=[400, 400])
    world.run()
    assert states(world, grow, shrink) == ["superseded", "applied"]
    assert (mapped(world), world.memory.utilization) == (200, 0.3)
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
    assert (mapped(world), world.memory.utilization) == (400, 0.5)
    world.check()


def test_what_a_failed_change_goes_back_to_is_what_was_mapped_last_and_not_what_was_superseded():
    world = CoreWorld()
    first = world.set_memory(0.6)
    second = world.set_memory(0.8)
    world.retire()
    world.retire(mapped=[500, 500])
    world.run()
    assert states(world, first, second) == ["superseded", "failed"]
    assert (mapped(world), world.memory.utilization) == (500, 0.6)
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
    assert "no memory" in world.engine.health.failed
    assert world.engine.health.leaving


def test_what_is_so_already_is_applied_at_once_and_is_no_new_revision():
    world = CoreWorld()
    world.set_memory(0.6)
    world.run()
    accepted, outcome = world.say(SetMemory(utilization=0.6))
    assert (type(accepted).__name__, outcome.state, outcome.revision) == ("Accepted", "applied", 1)
    assert outcome.text == "nothing to change: 500 blocks are mapped"
    assert not world.steps and not world.memory.busy
    world.check()


def test_another_utilization_of_the_same_size_is_a_new_revision():
    world = CoreWorld()
    accepted, outcome = world.say(SetMemory(utilization=0.5001))
    assert (type(accepted).__name__, outcome.state, outcome.revision) == ("Accepted", "applied", 1)
    assert not world.steps
    world.check()


def test_the_same_size_that_one_stage_could_not_map_is_asked_for_again():
    world = CoreWorld()
    world.set_memory(0.8)
    world.retire(mapped=[700, 400])
    world.run()
    again = world.set_memory(0.8)
    assert world.steps[0].map_blocks == 700
    world.run()
    assert (states(world, again), mapped(world), world.memory.revision) == (["applied"], 700, 2)


# --- stages that are at their mapping while steps go on -------------------------------------------------------


def at_it(world: CoreWorld, utilization: float) -> str:
    """Ask for a change, and retire steps up to the one that begins it on the stages; return the command's id."""
    name = world.set_memory(utilization)
    while (step := world.retire(answer=False)).map_blocks is None:
        pass
    assert step is world.changing
    return name


def busy(world: CoreWorld) -> CoreWorld:
    world.submit([1] * 40, name="r", max_tokens=20)
    world.run(3)
    return world


@pytest.mark.parametrize("utilization", [0.3, 0.8])
def test_steps_go_on_while_stages_map_and_new_blocks_are_used_when_all_have_them(utilization):
    world = busy(CoreWorld())
    name = at_it(world, utilization)
    device, tokens = world.scheduler.blocks.device, len(world.tokens("r"))
    for _ in range(5):
        world.retire()
    assert len(world.tokens("r")) >= tokens + 4
    assert (states(world, name), device.limit, mapped(world)) == (["open"], min(400, device.size), 400)
    assert not world.answer(stages=[0]), "one stage is not all"
    assert (device.limit, mapped(world)) == (min(400, device.size), 400)
    assert world.answer(stages=[1])
    assert (states(world, name), mapped(world)) == (["applied"], int(1000 * utilization - 100))
    world.run()
    world.check()


@pytest.mark.parametrize(("first", "second"), [(0.8, 0.3), (0.3, 0.8), (0.8, 0.9), (0.4, 0.3)])
def test_a_change_that_supersedes_waits_until_all_stages_have_ended_the_one_they_are_at(first, second):
    world = busy(CoreWorld())
    older = at_it(world, first)
    newer = world.set_memory(second)
    assert states(world, older, newer) == ["superseded", "open"]
    for _ in range(3):
        assert world.retire().map_blocks is None
    world.answer(stages=[0])
    world.answer(stages=[0])
    assert all(step.map_blocks is None for step in world.steps), "an answer counts once"
    begun = world.changing
    world.answer(stages=[1])
    while world.changing is begun:
        world.retire(answer=False)
    assert world.changing.map_blocks == int(1000 * second - 100)
    late = Mapped(begun.generation, begun.number, 0, 0, begun.map_blocks)
    assert not world.engine.stage_messages.take(late), "what is late is no answer to the new one"
    assert not world.answer(stages=[1])
    assert states(world, newer) != ["applied"]
    world.answer(stages=[0])
    assert (states(world, newer), mapped(world)) == (["applied"], int(1000 * second - 100))
    world.run()
    world.check()


def test_a_change_that_takes_long_says_for_which_stages_it_waits():
    world = busy(CoreWorld())
    change = at_it(world, 0.8)
    world.engine.advance()
    assert not [answer for _, answer in world.answers if isinstance(answer, Deferred)]
    world.answer(stages=[0])
    world.now += LATE_S
    world.engine.advance()
    (deferred,) = (answer for _, answer in world.answers if isinstance(answer, Deferred))
    assert (deferred.id, deferred.text) == (change, "waits for stage 1 to change its mapping")
    world.answer(stages=[1])
    world.run()
    assert states(world, change) == ["applied"]


def test_a_change_back_to_what_there_was_is_made_when_the_first_one_has_ended():
    world = busy(CoreWorld())
    grow = at_it(world, 0.8)
    back = world.set_memory(0.5)
    assert world.answer()
    world.run()
    assert states(world, grow, back) == ["superseded", "applied"]
    assert (mapped(world), world.changing.map_blocks) == (400, 400)
    world.check()


def test_a_superseded_grow_that_fails_late_is_no_failure_of_the_one_under_way():
    world = busy(CoreWorld())
    grow = at_it(world, 0.8)
    shrink = world.set_memory(0.3)
    world.answer(mapped=[700, 400])
    world.run()
    assert (states(world, grow, shrink), mapped(world)) == (["superseded", "applied"], 200)
    assert [event.text for event in world.events if event.kind == "memory.error"] == [
        "utilization 0.8, superseded: stage 1: no memory"
    ]
    world.check()


def test_a_generation_begins_to_use_blocks_when_all_stages_have_them():
    world = CoreWorld(serve=False)
    world.ready()
    world.submit([1] * 40, max_tokens=5)
    assert world.retire(answer=False).map_blocks == 400
    assert not world.steps and not world.answer(stages=[1])
    assert not world.steps
    world.answer(stages=[0])
    assert world.steps[0].rows
    world.run()
    world.check()


@pytest.mark.parametrize("verb", [Pause(mode="keep"), Pause(mode="wait"), Drain()])
@pytest.mark.parametrize("utilization", [0.3, 0.8])
def test_what_pauses_or_drains_meanwhile_does_not_hold_it_up(verb, utilization):
    world = busy(CoreWorld())
    name = at_it(world, utilization)
    world.say(verb)
    world.answer()
    assert (states(world, name), mapped(world)) == (["applied"], int(1000 * utilization - 100))


def test_what_stages_answer_an_engine_that_leaves_begins_nothing():
    world = busy(CoreWorld())
    at_it(world, 0.8)
    world.set_memory(0.3)
    world.engine.health.leave("told to")
    sent = len(world.steps)
    assert world.answer()
    assert len(world.steps) == sent


@pytest.mark.parametrize("seed", range(30))
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
        elif chance < 0.25 and world.changing is not None:
            world.answer()
        elif world.steps:
            asked, have = world.steps[0].map_blocks, mapped(world)
            fails = asked is not None and asked > have and source.random() < 0.4
            answers = source.choice([[have, have], [asked, have], [have, asked]]) if fails else None
            world.retire(answers, answer=source.random() < 0.5)
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
    assert world.engine.requests.live() == []
    assert world.scheduler.blocks.device.used == 0
