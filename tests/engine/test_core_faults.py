"""Faults of the core that are habits of other connectors, in a core whose stores the test answers for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ppengine.drills.core_faults import load_polled_by_steps, lookup_in_step
from ppengine.drills.fault_points import CoreParts
from ppengine.drills.registry import FaultError
from ppengine.protocol.store_messages import Find
from tier_world import CHUNK, TierWorld

PROMPT = [3 + number % 90 for number in range(CHUNK + 10)]


class Answers:
    """The stores' socket: each look at it brings all answers."""

    def __init__(self, world: Any) -> None:
        self.world, self.looks = world, 0

    def poll(self, _: int) -> int:
        self.looks += 1
        for store, number in self.world.jobs(Find):
            store.answer(number)
        return 0


def struck(fault: Callable[[CoreParts], Any]) -> tuple[Any, Answers, Callable[[], None]]:
    world = TierWorld()
    socket = Answers(world)
    return world, socket, fault(CoreParts(world.engine, socket))


def test_lookup_in_step_waits_in_the_turn_and_goes_on_when_it_is_lifted() -> None:
    world, socket, undo = struck(lookup_in_step)
    world.now += 1.0
    world.submit(PROMPT, name="r", max_tokens=1)
    assert socket.looks == 1, "the turn has asked"
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length" or world.state("r") == "waiting"
    undo()
    world.submit(PROMPT[::-1], name="s", max_tokens=1)
    assert (socket.looks, world.state("s")) == (1, "finding")


def test_load_polled_by_steps_needs_empty_steps_for_answers() -> None:
    world, _, undo = struck(load_polled_by_steps)
    world.submit(PROMPT, name="r", max_tokens=1)
    for store, number in world.jobs(Find):
        store.answer(number)
    world.engine.advance()
    assert world.state("r") == "finding", "an answer alone moves nothing"
    assert [step.rows for step in world.steps] == [[]]
    world.run()
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    undo()
    world.submit(PROMPT[::-1], name="s", max_tokens=1)
    world.engine.advance()
    assert not world.steps
    for store, number in world.jobs(Find):
        store.answer(number)
    assert world.state("s") == "waiting"


@pytest.mark.parametrize("fault", [lookup_in_step, load_polled_by_steps])
def test_they_need_a_backend_and_are_on_once(fault: Callable[[CoreParts], Any]) -> None:
    parts = CoreParts(TierWorld(backends={}, stores=False, slot_bytes=0).engine, None)
    with pytest.raises(FaultError, match="needs a backend of KV tiers"):
        fault(parts)
    world, _, _ = struck(fault)
    with pytest.raises(FaultError, match="is on"):
        fault(CoreParts(world.engine, None))
