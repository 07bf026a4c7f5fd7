"""Plans and results of verbs as operators read them: one request is no `requests`, and nothing done is said so."""

from __future__ import annotations

import pytest
from core_world import CoreWorld
from ppengine.common.sizes import counted
from ppengine.core.recovery import joined
from ppengine.protocol.control import Outcome
from ppengine.protocol.verbs import Abort, Drain, Many, Pause, Resume, Stop, Verb


def running(count: int) -> CoreWorld:
    """An engine with `count` requests that run."""
    world = CoreWorld(stages=2, max_num_seqs=4)
    for number in range(count):
        world.submit([7] * 20, name=f"r{number}", max_tokens=12)
    world.run(3)
    return world


def planned(world: CoreWorld, verb: Verb) -> str:
    """Return the first line of a plan."""
    answer = world.say(verb, dry_run=True)[-1]
    assert isinstance(answer, Outcome)
    return answer.plan[0]


@pytest.mark.parametrize(
    ("count", "texts"),
    [
        (1, ["stop scheduling; 1 request with all blocks", "abort 1 request and stop scheduling",
             "stop the engine; 1 request unfinished"]),
        (2, ["stop scheduling; 2 requests with all blocks", "abort 2 requests and stop scheduling",
             "stop the engine; 2 requests unfinished"]),
    ],
)  # fmt: skip
def test_plans_count_one_request_as_one(count: int, texts: list[str]) -> None:
    world = running(count)
    assert [planned(world, verb) for verb in (Pause(mode="keep"), Pause(mode="abort"), Stop())] == texts


def test_progress_and_ends_count_one_request_as_one() -> None:
    world = running(1)
    assert world.say(Drain())[-1].text == "waits for 1 request"
    world.say(Drain(undo=True))
    assert world.say(Pause())[-1].text == "waits for 1 running request"
    world.say(Resume())
    assert planned(world, Many(verbs=[Abort(request="r0")])) == "abort 1 of 1 request"


def test_a_pause_and_a_resume_without_effect_say_so() -> None:
    world = running(0)
    assert planned(world, Resume()) == world.say(Resume())[-1].text == "nothing to do: the engine is not paused"
    assert world.say(Pause())[-1].text == world.say(Pause())[-1].text == "paused: nothing runs"
    assert planned(world, Resume()) == "schedule again: 0 requests"
    assert world.say(Resume())[-1].text == "scheduling again"


def test_counts_and_names_in_a_sentence() -> None:
    assert [counted(number, "call") for number in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]
    assert (
        joined(["stage 0"]) == "stage 0" and joined(["a", "b"]) == "a and b" and joined(["a", "b", "c"]) == "a, b and c"
    )
