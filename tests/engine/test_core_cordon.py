"""A cordoned stage: what has begun goes on, what has not waits, and nothing starts the stage anew by itself."""

from __future__ import annotations

import pytest
from core_world import CoreWorld
from ppengine.core.scheduler import wait_reasons
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.reports import ProcessInfo, ProcessReport
from ppengine.protocol.verbs import Cordon, Drain, Release, RestartStage, SetMemory, SwapIn, SwapOut

BY_EVE = "stage 1 is cordoned by eve"


def ended(world: CoreWorld, stage: int) -> None:
    """Let the supervisor report that a stage's process was killed."""
    generation = world.engine.stages.leader(stage).started
    info = ProcessInfo(
        role="stage", stage=stage, rank=0, pid=1, exit_code=-9, detail="killed by SIGKILL", generation=generation
    )
    world.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))
    world.engine.advance()


def back(world: CoreWorld) -> None:
    """Let all stages leave and meet."""
    world.steps.clear()
    world.drained(0, 1, 2)
    world.ready()
    world.engine.advance()


def busy() -> CoreWorld:
    """Three stages; r0 and r1 have begun, r2 has not."""
    world = CoreWorld(stages=3, max_num_seqs=2)
    for name in ("r0", "r1", "r2"):
        world.submit([7] * 20, name=name, max_tokens=12)
    world.run(3)
    return world


def states(world: CoreWorld) -> dict[str, str]:
    return {name: request.state for name, request in world.scheduler.queues.requests.items()}


def why(world: CoreWorld, name: str) -> str:
    reason = wait_reasons.why(world.scheduler, world.scheduler.queues.requests[name])
    return "" if reason is None else f"{reason.code}: {reason.text}"


def test_what_has_begun_ends_and_what_has_not_waits() -> None:
    world = busy()
    (_, end) = world.say(Cordon(stage=1), reason="fan")
    assert (end.state, end.figures) == ("applied", {"new": 1.0, "begun": 2.0})
    assert end.text.startswith("finish 2 that have started, start none of 1 others, nor any new ones; stage 1 is")
    world.submit([9] * 20, name="r3", max_tokens=12)
    world.run()
    assert states(world) == {"r2": "waiting", "r3": "waiting"}
    assert [why(world, name) for name in ("r2", "r3")] == [f"cordoned: {BY_EVE}"] * 2
    assert world.engine.health.state == "serving"
    world.say(Cordon(stage=1, undo=True))
    world.run()
    assert world.engine.requests.live() == []
    world.check()


def test_who_has_begun_comes_back_whatever_it_lost() -> None:
    world = busy()
    world.say(SwapOut(request="r0"))
    world.say(SwapOut(request="r1", hold=False))
    world.say(Cordon(stage=0))
    world.run()
    assert states(world) == {"r0": "held", "r2": "waiting"}, "the swapped one has come back and ended"
    world.say(SwapIn(request="r0"))
    world.run()
    assert states(world) == {"r2": "waiting"}


def test_one_that_has_begun_passes_one_that_has_not() -> None:
    """r1 comes back to the waiting line, behind r0, which was held there before it ever ran."""
    world = CoreWorld(stages=3, max_num_seqs=1)
    world.submit([7] * 20, name="r0", max_tokens=12)
    world.scheduler.actions.preempt("r0", hold=True)
    world.submit([8] * 20, name="r1", max_tokens=12)
    world.run(3)
    world.scheduler.actions.preempt("r1", "recompute")
    world.say(Cordon(stage=0))
    world.say(Release(request="r0"))
    world.run()
    assert states(world) == {"r0": "waiting"}
    assert len(world.tokens("r1")) == 12


def test_samples_of_a_prompt_that_runs_are_not_new() -> None:
    world = CoreWorld(stages=3, max_num_seqs=1)
    world.submit([7] * 20, name="r0", max_tokens=12, n=3, temperature=1.0)
    world.run(2)
    world.say(Cordon(stage=2))
    world.run()
    assert world.engine.requests.live() == []


def test_a_dry_run_changes_nothing_and_a_second_cordon_keeps_its_author() -> None:
    world = busy()
    (planned,) = world.say(Cordon(stage=1), dry_run=True)
    assert isinstance(planned, Outcome)
    assert planned.plan[1] == "stage 1 is not restarted by itself while it is cordoned"
    assert world.engine.stages.cordons == ""
    world.say(Cordon(stage=1), reason="fan")
    world.now += 5
    (_, again) = world.say(Cordon(stage=1))
    assert again.text == "nothing changes: stage 1 is cordoned by eve already"
    shown = [stage.cordon for stage in world.engine.reporter.build().stages]
    assert (shown[0], shown[2]) == (None, None)
    assert shown[1] is not None
    assert (shown[1].by, shown[1].since_s, shown[1].reason) == ("eve", 5.0, "fan")
    (_, other) = world.say(Cordon(stage=0, undo=True))
    assert other.text == "nothing changes: stage 0 is not cordoned"
    (refused,) = world.say(Cordon(stage=3))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.text) == ("NOT_FOUND", "no stage 3: this engine has 0 to 2")


def test_the_last_of_several_cordons_lets_them_begin() -> None:
    world = busy()
    world.say(Cordon(stage=1))
    world.say(Cordon(stage=2))
    assert world.engine.stages.cordons == "stage 1 is cordoned by eve, stage 2 by eve"
    (_, end) = world.say(Cordon(stage=1, undo=True))
    assert end.text == "stage 2 stays cordoned by eve"
    world.run()
    assert states(world) == {"r2": "waiting"}
    world.say(Cordon(stage=2, undo=True))
    world.run()
    assert world.engine.requests.live() == []


def test_a_drain_that_a_cordon_holds_up_says_so() -> None:
    world = busy()
    world.say(Cordon(stage=1))
    world.run()
    (_, deferred) = world.say(Drain())
    assert deferred.text == f"waits for 1 request; {BY_EVE}"


def test_a_cordoned_stage_that_dies_stays_down_until_it_is_restarted() -> None:
    world = busy()
    world.say(Cordon(stage=1))
    ended(world, 1)
    kept = "stage 1 is lost: killed by SIGKILL; it is cordoned by eve: restart-stage 1, or lift the cordon"
    assert (world.started, world.engine.health.message, world.engine.health.state) == ([], kept, "degraded")
    world.say(RestartStage(stage=1))
    world.engine.advance()
    assert world.started == [(1, 2)]
    back(world)
    world.run()
    assert states(world) == {"r2": "waiting"}, "the cordon outlives the stage's process"
    assert why(world, "r2") == f"cordoned: {BY_EVE}"


def test_lifting_the_cordon_starts_the_stage_that_it_kept_down() -> None:
    world = busy()
    world.say(Cordon(stage=1))
    ended(world, 1)
    (planned,) = world.say(Cordon(stage=1, undo=True), dry_run=True)
    assert planned.plan == ["start requests again, 1 wait", "stage 1, which is lost, is restarted"]
    assert world.started == []
    world.say(Cordon(stage=1, undo=True))
    world.engine.advance()
    assert world.started == [(1, 2)]
    back(world)
    world.run()
    assert world.engine.requests.live() == []
    world.check()


def test_another_stage_that_dies_is_started_as_ever() -> None:
    world = busy()
    world.say(Cordon(stage=1))
    ended(world, 2)
    assert world.started == [(2, 2)]
    back(world)
    world.run()
    assert states(world) == {"r2": "waiting"}


def test_both_lost_stages_wait_for_the_cordon_of_one() -> None:
    world = busy()
    world.say(Cordon(stage=1))
    ended(world, 1)
    ended(world, 2)
    assert world.started == []
    (refused,) = world.say(SetMemory(utilization=0.4))
    assert refused.code == "FAILED"
    world.say(Cordon(stage=1, undo=True))
    world.engine.advance()
    assert world.started == [(1, 2), (2, 2)]


@pytest.mark.parametrize("lifted", [True, False])
def test_a_cordoned_survivor_that_does_not_leave_is_not_ended(lifted: bool) -> None:
    world = busy()
    world.say(Cordon(stage=1))
    ended(world, 2)
    world.drained(0)
    world.now += 3
    world.engine.advance()
    assert world.started == [(2, 2)]
    assert "stage 1 does not leave the old generation and is cordoned by eve" in world.engine.health.message
    if lifted:
        world.say(Cordon(stage=1, undo=True))
        world.engine.advance()
        assert world.started == [(2, 2), (1, 3)]
    back(world)
    assert world.engine.health.state == "serving"


def test_a_stage_that_the_profile_never_restarts_stays_down_without_its_cordon() -> None:
    world = CoreWorld(stages=3, restart="never")
    (_, end) = world.say(Cordon(stage=1))
    assert end.text == "finish 0 that have started, start none of 0 others, nor any new ones"
    ended(world, 1)
    world.say(Cordon(stage=1, undo=True))
    world.engine.advance()
    assert world.started == []
