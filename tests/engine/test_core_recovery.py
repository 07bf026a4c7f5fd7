"""The core loses stages: what it tells whom, what becomes of requests, and when it gives up."""

from __future__ import annotations

import random
import re
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
import scheduler_invariants
from core_world import BLOCK, PEAK, CoreWorld
from hypothesis import HealthCheck, given, settings
from ppengine.common.config import ConfigError, build_profile
from ppengine.core.signs_of_life import ANSWER_S
from ppengine.core.start_tries import StartTries
from ppengine.diagnosis.evidence import WireLoss
from ppengine.diagnosis.fault_log import FaultLog
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.facts import Exited, GenerationBegan, Lost, Serving
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo, ProcessReport
from ppengine.protocol.stage_lifecycle import Drained, StageFailed, StageProgress
from ppengine.protocol.steps import Retired
from ppengine.protocol.verbs import (
    Abort,
    Cordon,
    Pause,
    Preempt,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    SwapIn,
    SwapOut,
)

KILLED = "killed by SIGKILL"


def ended(world: CoreWorld, stage: int, generation: int = 1, detail: str = KILLED) -> None:
    """Let the supervisor report the end of a stage's process."""
    info = ProcessInfo(role="stage", stage=stage, rank=0, pid=1, exit_code=-9, detail=detail, generation=generation)
    world.facts.append(
        Exited(
            mono_ns=int(world.now * 1e9), role="stage", place=Place(stage, 0), generation=generation, pid=1,
            exit_code=-9, detail=detail,
        )
    )  # fmt: skip
    world.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))
    world.engine.advance()


def back(world: CoreWorld, **fields: int) -> None:
    """Let all stages leave and meet; the steps of the generation that is over are dropped."""
    stages = range(len(world.engine.stages))
    world.steps.clear()
    world.drained(*stages)
    world.ready(**fields)
    world.engine.advance()
    assert all(step.generation == world.generation for step in world.steps)


def events(world: CoreWorld, kind: str) -> list[str]:
    return [event.text for event in world.events if event.kind == kind]


def reduced(world: CoreWorld) -> FaultLog:
    """Return the log of the facts of core and supervisor so far."""
    log = FaultLog()
    for fact in world.facts:
        log.take(fact)
    return log


def wires(world: CoreWorld) -> list[WireLoss]:
    return list(reduced(world).losses(int(world.now * 1e9)))


def running(**scheduler: object) -> CoreWorld:
    """Three stages, six requests: some run, one is held on the host, one was swapped, some wait."""
    world = CoreWorld(stages=3, **{"max_num_seqs": 3, **scheduler})
    for index in range(6):
        world.submit([1 + index] * 20, name=f"r{index}", max_tokens=12)
    world.run(4)
    world.say(SwapOut(request="r0"))
    world.say(SwapOut(request="r1", hold=False))
    while world.scheduler.queues.requests["r0"].state != "held":
        world.retire()
    return world


def test_a_killed_stage_is_started_and_the_others_leave() -> None:
    world = running()
    assert world.scheduler.queues.requests["r0"].host_blocks
    ended(world, 1)
    assert world.generation == 2
    assert world.started == [(1, 2)]
    assert world.told_to_leave == [(0, 2), (2, 2)]
    assert world.engine.health.state == "degraded"
    assert events(world, "stage.lost") == [f"stage 1: {KILLED}"]
    states = {name: request.state for name, request in world.scheduler.queues.requests.items()}
    assert states == {"r0": "held", **{f"r{index}": "waiting" for index in range(1, 6)}}
    back(world)
    assert world.engine.health.state == "serving"
    first = world.steps[0]
    assert (first.generation, first.map_blocks, first.rows) == (2, 400, [])
    world.run()
    world.say(Release(request="r0"))
    world.run()
    assert world.engine.requests.live() == []
    assert all(len(world.tokens(f"r{index}")) == 12 for index in range(6))
    world.check()


def test_the_end_of_a_process_is_news_until_a_successor_serves() -> None:
    world = running()

    def news() -> int | None:
        log = reduced(world)
        log.end((1, 0), 1)
        end = log.end((1, 0), int(10 * 1e9))
        return None if end is None else end.generation

    assert news() is None
    ended(world, 1)
    assert news() == 1, "also while another one is started"
    ended(world, 1, generation=2)
    assert news() == 2, "the one that was started has ended as well"
    world.say(RestartStage(stage=1))
    world.engine.advance()
    assert news() == 2
    back(world)
    assert news() is None


def test_last_words_are_a_fact_with_their_process() -> None:
    world = running()
    for _ in range(2):
        world.engine.stage_messages.take(Retired(1, 3, 2, 0, error="IndexError: block 7", fatal=True))
    world.engine.advance()
    (said,) = [fact for fact in world.facts if isinstance(fact, Lost)]
    assert (said.place, said.generation, said.words, said.pid) == (Place(2, 0), 1, "IndexError: block 7", 1)
    assert said.mono_ns == int(world.now * 1e9)
    world.engine.stage_messages.take(StageFailed(stage=2, rank=0, generation=2, text="no weights"))
    world.engine.advance()
    assert [(fact.generation, fact.pid) for fact in world.facts if isinstance(fact, Lost)] == [(1, 1), (2, None)]


def test_a_new_generation_is_a_fact_with_its_reason_its_cost_and_its_operator() -> None:
    world = running()
    ended(world, 1)
    world.now += 1.5
    back(world)
    began, serving = world.facts[-2:]
    assert isinstance(began, GenerationBegan) and isinstance(serving, Serving)
    assert (began.generation, began.restarted, began.by) == (2, (Place(1, 0),), "")
    assert began.why == f"stage 1 is lost: {KILLED}"
    assert (serving.generation, serving.took_s, serving.by) == (2, pytest.approx(1.5), "")
    assert serving.recomputed > 0
    assert dict(serving.processes) == {(0, 0): 1, (1, 0): 2, (2, 0): 1}
    world.say(RestartStage(stage=2))
    world.engine.advance()
    back(world)
    began, serving = world.facts[-2:]
    assert isinstance(began, GenerationBegan) and isinstance(serving, Serving)
    assert (began.by, serving.by, began.why) == ("eve", "eve", "stage 2 was restarted")
    assert dict(serving.processes) == {(0, 0): 1, (1, 0): 2, (2, 0): 3}


def test_what_neighbours_say_is_one_fault_and_not_three() -> None:
    world = running()
    for stage in (0, 2):
        world.engine.stage_messages.take(Retired(1, 3, stage, 0, error="lost stage 1", fatal=True, peer=1))
    world.engine.advance()
    assert (world.generation, world.engine.health.state) == (1, "degraded")
    ended(world, 1)
    assert (world.generation, world.started) == (2, [(1, 2)])
    world.engine.stage_messages.take(Retired(1, 3, 2, 0, error="lost stage 1", fatal=True, peer=1))
    ended(world, 1)
    assert (world.generation, events(world, "stage.lost")) == (2, [f"stage 1: {KILLED}"])


def test_a_neighbour_is_believed_when_the_supervisor_says_nothing() -> None:
    world = running()
    world.engine.stage_messages.take(Retired(1, 3, 0, 0, error="lost stage 1", fatal=True, peer=1))
    world.engine.advance()
    assert world.generation == 1
    later(world, 0.6)
    assert (world.generation, world.started) == (2, []), "a closed wire alone: everybody is to meet again"
    world.drained(0, 2)
    later(world, 2.1)
    assert world.started == [(1, 3)], "who does not leave is gone, or as good as gone"


def test_what_was_heard_of_a_stage_that_meets_the_others_is_moot() -> None:
    world = running()
    ended(world, 1)
    world.engine.stage_messages.take(Retired(2, 3, 1, 0, error="lost stage 2", fatal=True, peer=2))
    back(world)
    assert world.engine.health.state == "serving"
    world.now += 1
    world.engine.advance()
    assert (world.generation, world.engine.health.state) == (2, "serving")


@pytest.mark.parametrize("restart", ["auto", "never"])
def test_two_that_end_at_once(restart: str) -> None:
    world = running(restart=restart)
    infos = [ProcessInfo(role="stage", stage=stage, rank=0, pid=1, exit_code=-9, detail=KILLED) for stage in (0, 2)]
    world.engine.on_processes(ProcessReport(mono_ns=0, processes=infos))
    world.engine.advance()
    assert events(world, "stage.lost") == [f"stage 0: {KILLED}", f"stage 2: {KILLED}"]
    assert world.started == ([(0, 2), (2, 2)] if restart == "auto" else [])
    assert world.engine.health.state == "degraded"


def test_a_stage_that_fails_by_itself_is_started_anew() -> None:
    world = running()
    world.engine.stage_messages.take(Retired(1, 3, 2, 0, error="IndexError: block 7", fatal=True))
    world.engine.advance()
    assert world.started == [(2, 2)]
    assert events(world, "stage.lost") == ["stage 2: IndexError: block 7"]


def test_acknowledgements_of_the_old_generation_count_for_nothing() -> None:
    world = running()
    step = world.steps[0]
    ended(world, 0)
    for stage in range(3):
        world.engine.stage_messages.take(Retired(1, step.number, stage, 0))
    world.engine.advance()
    back(world)
    assert world.steps[0].number > step.number, "numbers go on"
    world.run()
    world.check()


def test_who_is_not_quiet_in_time_is_started_too() -> None:
    world = running()
    ended(world, 1)
    world.drained(0)
    world.now += 1.9
    world.engine.advance()
    assert world.started == [(1, 2)]
    world.now += 0.2
    world.engine.advance()
    assert world.started == [(1, 2), (2, 3)], "in a generation of its own: the others may have met the late one"
    assert world.told_to_leave[2:] == [(0, 3), (1, 3)]
    assert "stage 2 did not leave the old generation within 2 s: restarted too" in events(world, "stage.restart")
    back(world)
    assert world.engine.health.state == "serving"


def test_what_a_late_one_still_says_is_not_taken_for_its_successor() -> None:
    world = running()
    ended(world, 1)
    world.drained(0)
    later(world, 2.1)
    assert world.started[1:] == [(2, 3)]
    world.engine.stage_messages.take(Drained(2, 2, 0))
    ready = world.engine.stages.leader(0).ready
    assert ready is not None
    world.engine.stage_messages.take(msgspec.structs.replace(ready, stage=2, generation=2))
    world.drained(0)
    world.ready(stages=[0, 1])
    world.engine.advance()
    assert world.engine.health.state == "degraded"
    back(world)
    assert world.engine.health.state == "serving"


def test_what_waits_for_its_next_try_is_started_with_who_is_late() -> None:
    world = running()
    ended(world, 1)
    world.drained(0)
    later(world, 1.8)
    ended(world, 1, generation=2)
    later(world, 0.3)
    assert world.started == [(1, 2), (1, 3), (2, 3)]
    back(world)
    assert world.engine.health.state == "serving"


def test_a_notice_names_the_process_that_it_is_meant_for() -> None:
    world = running()
    ended(world, 1)
    assert world.meant == [1, 1]
    ended(world, 0)
    assert list(zip(world.told_to_leave, world.meant, strict=True))[2:] == [((1, 3), 2), ((2, 3), 1)]
    world.engine.stage_messages.take(StageProgress(stage=1, rank=0, text="", generation=2))
    assert world.meant[-1] == 2


def test_a_loading_stage_hears_of_a_newer_generation_when_it_speaks() -> None:
    world = running()
    ended(world, 1)
    ended(world, 2)
    assert (world.generation, world.started) == (3, [(1, 2), (2, 3)])
    world.told_to_leave.clear()
    world.engine.stage_messages.take(StageProgress(stage=1, rank=0, text="stage 1: waits", generation=2))
    assert world.told_to_leave == [(1, 3)]
    back(world)
    assert world.engine.health.state == "serving"
    ended(world, 1, generation=2)
    assert (world.generation, world.started[-1]) == (4, (1, 4)), "it was loaded: this is another death"


def test_a_restarted_stage_that_dies_before_all_have_met_is_restarted_again() -> None:
    world = running()
    ended(world, 1)
    world.drained(0, 2)
    world.ready(stages=[1])
    ended(world, 1, generation=2)
    assert (world.generation, world.started) == (3, [(1, 2), (1, 3)])
    back(world)
    assert world.engine.health.state == "serving"


def test_a_death_while_loading_is_followed_by_another_try() -> None:
    world = running()
    ended(world, 1)
    ended(world, 1, generation=2)
    ended(world, 1, generation=2)
    tries = "1 try failed, the next one is in 0 s; its requests end in 60 s"
    assert world.engine.health.state == "degraded"
    assert world.engine.health.message == f"stage 1 is lost: {KILLED}; {tries}"
    assert world.started == [(1, 2)], "the next try waits"
    assert len(events(world, "stage.lost")) == 2
    assert world.engine.outputs._failure() == "", "readers wait: it may come back"
    later(world, 0.6)
    assert world.started == [(1, 2), (1, 3)]
    back(world)
    assert world.engine.health.state == "serving"


def test_tries_go_on_for_days() -> None:
    """The back-off doubled a float a thousand times, and its overflow ended the core after half a day."""
    now = 0.0
    tries = StartTries(60.0, lambda: now)
    for _ in range(3000):
        tries.failed()
        assert tries.waits
        now += 15.0
        assert tries.due
        tries.begun()
    assert tries.count == 3000


def test_an_operator_can_restart_a_stage_between_two_tries() -> None:
    world = running()
    ended(world, 1)
    ended(world, 1, generation=2)
    world.say(RestartStage(stage=0))
    world.engine.advance()
    assert world.started[1:] == [(0, 3), (1, 3)], "what is lost is started with it"
    back(world)
    assert world.engine.health.state == "serving"


def fail_to_start(world: CoreWorld, detail: str) -> None:
    """Let the supervisor report that it could not make the newest process of stage 1."""
    info = ProcessInfo(
        role="stage", stage=1, rank=0, pid=1, exit_code=1, detail=detail, generation=world.generation
    )  # fmt: skip
    world.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))
    world.engine.advance()


def made(world: CoreWorld, stage: int) -> None:
    """Let the supervisor report that the newest process of a stage is there."""
    info = ProcessInfo(role="stage", stage=stage, rank=0, pid=7, generation=world.engine.stages.leader(stage).started)
    world.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))


def speaks(world: CoreWorld, stage: int, generation: int, phase: str) -> None:
    """Let a stage that starts report a phase."""
    world.engine.stage_messages.take(StageProgress(stage=stage, rank=0, text="", generation=generation, phase=phase))


def test_a_stage_that_never_reaches_the_core_is_tried_again_until_the_limit() -> None:
    world = running()
    ended(world, 1)
    begun, tries = world.now, []
    while world.now < begun + 75:
        count = len(world.started)
        made(world, 1)
        world.drained(0, 2)
        later(world, 0.25)
        if len(world.started) > count:
            tries.append(world.now - begun)
        lives = len(world.engine.requests.live())
        assert lives == (6 if world.now < begun + ANSWER_S + 60 else 0)
    assert tries[:3] == pytest.approx([10.5, 21.5, 33.5]), "ten seconds each, and the back-off between them"
    assert events(world, "stage.lost")[1:] == ["stage 1: its process did not reach the core within 10 s"] * 5
    loss = "stage 1 did not come up within 60 s, 5 tries: its process did not reach the core within 10 s"
    assert events(world, "engine.gave-up") == [f"{loss}; 6 requests are lost, and new ones are refused"]
    refused = world.submit(name="late")[-1]
    assert isinstance(refused, Refused) and refused.code == "FAILED" and "did not reach the core" in refused.text
    count = len(world.started)
    for _ in range(20):
        made(world, 1)
        later(world, 1.0)
    assert len(world.started) > count, "the tries go on"
    speaks(world, 1, world.generation, "start")
    later(world, 60.0)
    back(world)
    assert world.engine.health.state == "serving"
    world.submit(name="later", max_tokens=3)
    world.run()
    assert len(world.tokens("later")) == 3


@pytest.mark.parametrize(
    ("phase", "limit_s"), [("start", 120), ("load", 900), ("profile", 300), ("capture", 300), ("compile", 900)]
)
def test_a_stage_that_loads_gets_the_budget_of_its_phase_since_its_last_word(phase: str, limit_s: float) -> None:
    world = running()
    ended(world, 1)
    made(world, 1)
    world.drained(0, 2)
    for _ in range(3):
        speaks(world, 1, 2, phase)
        later(world, limit_s - 1)
        made(world, 1)
        later(world, 0.5)
    assert world.started == [(1, 2)] and len(events(world, "stage.lost")) == 1
    later(world, 0.5)
    assert events(world, "stage.lost")[1:] == [f"stage 1: no progress in phase {phase} for {limit_s} s"]
    later(world, 0.5)
    assert world.started == [(1, 2), (1, 3)]


def test_a_stage_that_waits_for_the_others_is_no_failed_try() -> None:
    world = running()
    ended(world, 1)
    speaks(world, 1, 2, "meet")
    later(world, 3000.0)
    assert len(events(world, "stage.lost")) == 1 and (1, 3) not in world.started


def test_a_process_that_is_never_made_is_a_failed_try() -> None:
    world = running()
    ended(world, 1)
    world.drained(0, 2)
    later(world, 119.0)
    assert world.started == [(1, 2)] and len(events(world, "stage.lost")) == 1
    later(world, 1.0)
    assert events(world, "stage.lost")[1:] == ["stage 1: no process of it came within 120 s"]


def test_words_of_a_replaced_process_are_no_sign_of_life() -> None:
    world = running()
    ended(world, 1)
    made(world, 1)
    speaks(world, 1, 1, "load")
    later(world, ANSWER_S)
    assert events(world, "stage.lost")[1:] == ["stage 1: its process did not reach the core within 10 s"]


def test_a_silent_stage_under_a_cordon_is_left_alone() -> None:
    world = running()
    ended(world, 1)
    made(world, 1)
    world.say(Cordon(stage=1))
    later(world, 1000.0)
    assert len(events(world, "stage.lost")) == 1


def test_tries_have_a_back_off_and_requests_end_as_lost_at_the_limit() -> None:
    world = running()
    world.submit([7] * 5, name="n", n=2, max_tokens=4)
    ended(world, 1)
    detail, times = "could not be started: [Errno 24] Too many open files", []
    fail_to_start(world, detail)
    begun = world.now
    while world.now < begun + 100:
        count = len(world.started)
        world.drained(0, 2)
        later(world, 0.25)
        if len(world.started) > count:
            times.append(world.now - begun)
            fail_to_start(world, detail)
        if world.now < begun + 60:
            assert len(world.engine.requests.live()) == 8 and world.engine.health.state == "degraded"
    assert times[:9] == pytest.approx([0.5, 1.5, 3.5, 7.5, 15.5, 30.5, 45.5, 60.5, 75.5]), "and they never end"
    loss = f"stage 1 did not come up within 60 s, 8 tries: {detail}"
    assert world.engine.requests.live() == []
    gave_up = f"{loss}; 8 requests are lost, and new ones are refused"
    assert events(world, "engine.gave-up") == [gave_up]
    ends = [event for event in world.events if event.kind == "request.finished" and event.finished is not None]
    assert {event.finished.id for event in ends} == {*(f"r{index}" for index in range(6)), "n", "n.1"}
    assert {event.finished.ending for event in ends} == {f"lost: {loss}"}
    assert world.engine.health.state == "degraded" and "; its requests have ended" in world.engine.health.message
    for verb in (Abort(request="r1"), SetMemory(utilization=0.4)):
        refused = world.say(verb)[0]
        assert isinstance(refused, Refused) and refused.code == "FAILED" and detail in refused.text
    refused = world.submit([1] * 5, name="late")[0]
    assert isinstance(refused, Refused) and refused.code == "FAILED" and detail in refused.text


def test_a_stage_that_comes_up_after_the_limit_serves_again() -> None:
    world = running()
    ended(world, 1)
    fail_to_start(world, "no room")
    later(world, 61.0)
    fail_to_start(world, "no room")
    later(world, 61.0)
    assert world.engine.requests.live() == []
    back(world)
    assert (world.engine.health.state, world.engine.health.failure) == ("serving", "")
    world.submit([1] * 5, name="new", max_tokens=3)
    world.run()
    assert len(world.tokens("new")) == 3
    world.check()


def test_a_restart_that_an_operator_requested_fails_at_the_limit() -> None:
    world = running()
    name = f"c{world._count + 1}"
    world.say(RestartStage(stage=1))
    world.engine.advance()
    fail_to_start(world, "no room")
    later(world, 61.0)
    end = world.last(name)
    assert isinstance(end, Outcome)
    assert (end.state, end.text) == ("failed", "stage 1 did not come up within 60 s, 1 try: no room")


def test_a_stage_that_cannot_load_is_tried_again() -> None:
    world = running()
    ended(world, 1)
    world.engine.stage_messages.take(StageFailed(stage=1, rank=0, text="no weights", generation=2))
    world.engine.advance()
    assert world.engine.health.message.startswith("stage 1 is lost: no weights; 1 try failed")


def test_the_fourth_death_within_ten_minutes_leaves_it_down() -> None:
    world = running()
    for generation in range(1, 4):
        ended(world, 1, generation=generation)
        back(world)
        assert world.engine.health.state == "serving"
        world.now += 100
    ended(world, 1, generation=4)
    assert world.engine.health.state == "degraded"
    assert world.engine.health.message == (
        f"stage 1 is lost: {KILLED}, and 4 times within 10 minutes; restart-stage 1 tries once more"
    )
    world.now += 700
    world.say(RestartStage(stage=1))
    world.engine.advance()
    back(world)
    ended(world, 1, generation=5)
    assert world.generation == 6, "the count is of the last ten minutes"


def test_a_requested_restart_outlives_a_death_that_is_reported_with_it() -> None:
    world = running()
    for generation in range(1, 4):
        ended(world, 1, generation=generation)
        back(world)
    name = f"c{world._count + 1}"
    world.say(RestartStage(stage=1))
    ended(world, 1, generation=4)
    back(world)
    end = world.last(name)
    assert isinstance(end, Outcome) and end.state == "applied", end
    assert world.engine.health.state == "serving"


def test_never_means_never() -> None:
    world = running(restart="never")
    shrink = world.set_memory(0.4)
    ended(world, 2)
    assert (world.started, world.engine.health.state) == ([], "degraded")
    assert world.engine.health.message == f"stage 2 is lost: {KILLED}"
    end = world.last(shrink)
    assert isinstance(end, Outcome)
    assert end.state == "failed"
    world.say(RestartStage(stage=2))
    world.engine.advance()
    back(world)
    assert world.engine.health.state == "serving"
    world.run()
    world.check()


def test_a_restart_that_was_asked_for_is_no_fault() -> None:
    world = running()
    (planned,) = world.say(RestartStage(stage=1), dry_run=True)
    assert isinstance(planned, Outcome)
    assert planned.plan[0] == "stage 1 (pid 1) is ended and restarted, generation 2"
    assert planned.figures["requests"] == 6
    assert world.generation == 1
    name = f"c{world._count + 1}"
    world.say(RestartStage(stage=1))
    world.engine.advance()
    assert (world.engine.health.state, world.started, events(world, "stage.lost")) == ("loading", [(1, 2)], [])
    back(world)
    end = world.last(name)
    assert isinstance(end, Outcome)
    assert end.state == "applied"
    assert end.text.startswith("stage 1 is pid 1; all stages are back after ")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"restart": "always"}, "parallel.restart is 'always'; it must be one of auto, never"),
        ({"restarts": "never"}, "unknown key parallel.restarts; did you mean parallel.restart?"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tmp_path: Path, keys: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        build_profile({"name": "t", "model": {"path": "m"}, "parallel": keys}, base=tmp_path)


def test_verbs_go_on_while_a_stage_loads() -> None:
    world = running()
    ended(world, 1)
    world.steps.clear()
    assert world.say(Abort(request="r3"))[-1].state == "applied"  # type: ignore[attr-defined]
    assert world.say(Release(request="r0"))[-1].state == "applied"  # type: ignore[attr-defined]
    assert world.say(Preempt(request="r4", hold=True))[-1].state == "applied"  # type: ignore[attr-defined]
    world.submit([9] * 9, name="new", max_tokens=3)
    shrink = world.set_memory(0.3)
    back(world)
    world.run()
    end = world.last(shrink)
    assert isinstance(end, Outcome)
    assert (end.state, world.memory.mapped_blocks) == ("applied", 200)
    assert len(world.tokens("new")) == 3
    assert [request.id for request in world.engine.requests.live()] == ["r4"]
    world.check()


@pytest.mark.parametrize("known", [False, True], ids=["before the generation begins", "while a stage loads"])
def test_a_check_is_switched_when_the_stages_are_back(known: bool) -> None:
    world = running()
    if known:
        ended(world, 1)
    else:
        info = ProcessInfo(role="stage", stage=1, rank=0, pid=1, exit_code=-9, detail=KILLED, generation=1)
        world.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))
    world.steps.clear()
    world.say(SetCheck(check="finite"))
    name = f"c{world._count}"
    assert not world.steps, "nobody is there to retire it"
    world.engine.advance()
    back(world)
    world.run()
    end = world.last(name)
    assert isinstance(end, Outcome) and end.state == "applied", end
    assert not world.engine.operations.live
    world.check()


def test_of_switches_that_wait_for_the_stages_the_last_one_counts() -> None:
    world = running()
    ended(world, 1)
    names = []
    for check, mode in (("finite", "on"), ("ledger", "on"), ("finite", "off")):
        world.say(SetCheck(check=check, mode=mode))  # type: ignore[arg-type]
        names.append(f"c{world._count}")
    back(world)
    world.run()
    ends = [world.last(name) for name in names]
    assert [end.state for end in ends] == ["superseded", "applied", "applied"]
    assert ends[0].text.startswith("finite off by ")
    assert not world.engine.operations.live
    world.check()


def test_the_reference_is_not_begun_while_a_stage_loads() -> None:
    world = running()
    ended(world, 1)
    refused = world.say(SetCheck(check="shadow"))[-1]
    assert isinstance(refused, Refused) and refused.code == "BUSY"
    assert refused.text.endswith("the reference needs all stages")


def test_effects_under_way_have_an_end() -> None:
    world = running(max_num_seqs=8)
    names = []
    for verb in (Abort(request="r2"), SwapOut(request="r3"), SwapIn(request="r0")):
        world.say(verb)
        names.append(f"c{world._count}")
    ended(world, 1)
    states = [getattr(world.last(name), "state", "open") for name in names]
    assert "open" not in states
    assert "deferred" not in states
    assert world.scheduler.queues.requests["r3"].state == "held"
    assert "r2" not in world.scheduler.queues.requests


@pytest.mark.parametrize("when", ["before the map step", "map step in flight", "stages are at it", "one has answered"])
@pytest.mark.parametrize("utilization", [0.3, 0.8])
def test_a_change_of_memory_goes_on_after_a_loss(utilization: float, when: str) -> None:
    world = CoreWorld(stages=2)
    world.submit([1] * 40, max_tokens=20)
    world.run(4)
    name = world.set_memory(utilization)
    while when != "before the map step" and not any(step.map_blocks for step in world.steps):
        world.retire()
    while when in ("stages are at it", "one has answered") and world.retire(answer=False).map_blocks is None:
        pass
    if when == "one has answered":
        world.answer(stages=[1])
    ended(world, 0)
    assert not world.answer(), "an answer of the generation that is over"
    back(world)
    assert not world.answer()
    world.run()
    end = world.last(name)
    assert isinstance(end, Outcome)
    assert (end.state, world.memory.mapped_blocks) == ("applied", int(1000 * utilization - 100))
    assert world.memory.utilization == utilization
    world.check()


def test_a_stage_that_comes_back_with_less_room_sets_the_size() -> None:
    world = running()
    ended(world, 1)
    back(world, reserved=300)
    assert world.steps[0].map_blocks == 300
    world.run()
    assert world.memory.mapped_blocks == 300
    world.check()


def test_a_stage_that_comes_back_with_a_higher_peak_maps_no_more_than_is_agreed() -> None:
    world = running()
    before = world.memory.mapped_blocks
    ended(world, 1)
    back(world, peak=PEAK + 7 * BLOCK)
    world.run()
    assert world.memory.mapped_blocks == before - 7
    world.check()


def loading(world: CoreWorld, seconds: float) -> None:
    """Let time pass; the stages that start report what they load."""
    world.now += seconds
    for record in world.engine.stages:
        if record.phase == "starting":
            speaks(world, record.stage, record.started, "load")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 10**6), ahead=st.booleans(), preemption=st.sampled_from(["recompute", "swap"]))
def test_any_order_of_losses_and_verbs_ends_with_every_token_once(seed: int, ahead: bool, preemption: str) -> None:
    source = random.Random(seed)
    world = CoreWorld(
        stages=3, schedule_ahead=ahead, preemption=preemption, max_num_seqs=4, max_model_len=200,
        restart_limit_s=86_400.0,
    )  # fmt: skip
    world.counting = True
    wanted = {f"r{index}": source.randint(1, 40) for index in range(10)}
    for index, (name, count) in enumerate(wanted.items()):
        world.submit([1 + index] * source.randint(1, 60), name=name, max_tokens=count)
    for _ in range(150):
        chance = source.random()
        live = [request.id for request in world.engine.requests.live()]
        if chance < 0.04:
            stage = source.randrange(3)
            ended(world, stage, generation=world.engine.stages.leader(stage).started)
            loading(world, 300.0)
        elif chance < 0.06:
            world.say(RestartStage(stage=source.randrange(3)))
        elif chance < 0.08:
            closes(world, *source.choice([(0, 1), (1, 2), (2, 0)]))
            loading(world, source.choice([1.0, 100.0]))
        elif chance < 0.2 and live:
            name = source.choice(live)
            world.say(source.choice([SwapOut(request=name), SwapIn(request=name), Preempt(request=name)]))
        elif chance < 0.25:
            memory = SetMemory(utilization=source.choice([0.2, 0.5]))
            check = SetCheck(check=source.choice(["ledger", "finite"]), mode=source.choice(["on", "off"]))
            world.say(source.choice([Pause(mode="keep"), Resume(), memory, check]))
        elif world.engine.health.recovering:
            loading(world, source.choice([0.0, 20.0]))
            world.engine.advance()
            if source.random() < 0.5:
                back(world)
        elif chance < 0.35 and world.changing is not None:
            world.answer()
        elif world.steps and not world.engine.health.blocked:
            world.retire(answer=source.random() < 0.7)
        else:
            world.engine.advance()
        scheduler_invariants.check(world.scheduler)
    if world.engine.health.down:
        world.say(RestartStage(stage=0))
    loading(world, 20.0)
    world.engine.advance()
    if world.engine.health.recovering:
        back(world)
    world.say(Resume())
    world.run()
    for _ in range(5):
        for request in world.engine.requests.live():
            world.say(Release(request=request.id))
        world.run()
    assert not world.engine.requests.live(), "all that is released goes on to its end"
    world.check()
    assert not [operation for operation in world.engine.operations.live if operation.verb == "check"]
    for name, count in wanted.items():
        assert world.tokens(name) == list(range(count)), "each token once and in order"


# --- wires that break between live processes ------------------------------------------------------------------

CLOSED = "lost stage 1: it closed the connection"


def says(world: CoreWorld, stage: int, peer: int, text: str = CLOSED) -> None:
    """Let a stage say that it cannot go on because of its peer."""
    world.engine.stage_messages.take(Retired(world.generation, 3, stage, 0, error=text, fatal=True, peer=peer))
    world.engine.advance()


def later(world: CoreWorld, seconds: float) -> None:
    world.now += seconds
    world.engine.advance()


def test_a_wire_that_broke_is_reported_from_when_no_process_turns_out_to_have_ended() -> None:
    world = running()
    says(world, 0, 1)
    says(world, 2, 1)
    assert wires(world) == [], "the supervisor may yet tell of an end"
    later(world, 0.6)
    (wire,) = wires(world)
    assert (wire.stage, wire.peer, wire.text, wire.closed, wire.healed_s) == (0, 1, CLOSED, True, None)
    assert wire.since_s == pytest.approx(0.6)
    back(world)
    later(world, 2.0)
    (wire,) = wires(world)
    assert wire.healed_s == pytest.approx(2.0) and wire.since_s == pytest.approx(2.6)
    assert wire.recomputed > 0
    says(world, 2, 1, "stage 1 sent message 4")
    later(world, 0.6)
    (wire,) = wires(world)
    assert (wire.stage, wire.closed, wire.healed_s) == (2, False, None), "the newest is what counts"


def test_who_expected_a_wrong_message_is_restarted_and_not_its_sender() -> None:
    world = running()
    says(world, 2, 2, "stage 1 sent message 4 (m5, 1 B), due was message 4 (m5, 2 B); m5 has 1 tokens")
    later(world, 0.6)
    (wire,) = wires(world)
    assert (wire.ends, wire.closed) == (((2, 0), (2, 0)), False)
    assert world.started == [(2, 2)]


def test_a_wire_of_a_process_that_ended_is_no_loss() -> None:
    world = running()
    says(world, 0, 1)
    ended(world, 1)
    later(world, 0.6)
    back(world)
    assert wires(world) == []


def test_the_end_of_a_process_that_is_told_late_takes_a_loss_back() -> None:
    world = running()
    says(world, 0, 1)
    later(world, 0.6)
    assert wires(world)
    ended(world, 1, generation=1)
    assert wires(world) == []


def test_a_wire_that_a_restart_was_asked_across_is_no_loss() -> None:
    world = running()
    says(world, 0, 1)
    world.say(RestartStage(stage=1))
    world.engine.advance()
    later(world, 0.6)
    back(world)
    assert wires(world) == []
    says(world, 2, 1)
    world.engine.stage_messages.take(Retired(1, 3, 0, 0, error=CLOSED, fatal=True, peer=1))
    assert world.generation == 2, "and what an old generation says is nothing"


def closes(world: CoreWorld, first: int = 0, second: int = 1) -> None:
    """Let both ends of a wire say that it closed, and the supervisor nothing."""
    for stage, peer in ((first, second), (second, first)):
        text = f"lost stage {peer}: it closed the connection"
        world.engine.stage_messages.take(Retired(world.generation, 3, stage, 0, error=text, fatal=True, peer=peer))
    world.engine.advance()
    later(world, 0.6)


def test_a_wire_that_closes_between_live_processes_needs_no_new_process() -> None:
    world = running()
    world.counting = True
    assert world.scheduler.queues.requests["r0"].host_blocks
    closes(world)
    assert (world.generation, world.started) == (2, [])
    assert world.told_to_leave == [(0, 2), (1, 2), (2, 2)]
    assert world.engine.health.state == "degraded"
    assert events(world, "wire.lost") == [
        "stage 1: its connection to stage 0 closed, and no process has ended; all meet again, generation 2"
    ]
    later(world, 1.0)
    back(world)
    assert (world.engine.health.state, world.generation, world.started) == ("serving", 2, [])
    assert events(world, "stage.lost") == events(world, "stage.restart") == []
    (wire,) = wires(world)
    assert (wire.stage, wire.peer, wire.healed_s) == (0, 1, 0.0)
    world.say(Release(request="r0"))
    world.run()
    assert world.engine.requests.live() == []
    assert all(len(world.tokens(f"r{index}")) == 12 for index in range(6))
    world.check()


def test_a_wire_that_closes_again_within_a_minute_costs_the_processes() -> None:
    world = running()
    closes(world)
    back(world)
    later(world, 61.0)
    closes(world)
    assert (world.generation, world.started) == (3, [])
    back(world)
    later(world, 50.0)
    closes(world, 1, 2)
    assert (world.generation, world.started) == (4, [(1, 4)]), "stage 1 again, stage 2 for the first time"
    back(world)
    assert world.engine.health.state == "serving"


def test_a_wire_that_closes_while_the_stages_meet() -> None:
    world = running()
    closes(world)
    world.drained(0, 1, 2)
    world.ready(stages=[2])
    closes(world)
    assert (world.generation, world.started) == (3, [(0, 3), (1, 3)])
    back(world)
    assert world.engine.health.state == "serving"


def test_what_the_other_end_says_later_begins_nothing_more() -> None:
    world = running()
    says(world, 0, 1)
    later(world, 0.3)
    says(world, 1, 0, "lost stage 0: it closed the connection")
    later(world, 0.3)
    assert world.generation == 2
    later(world, 0.3)
    assert (world.generation, world.started) == (2, [])


def test_a_process_that_turns_out_to_have_ended_is_started_all_the_same() -> None:
    world = running()
    closes(world)
    ended(world, 1)
    assert (world.generation, world.started) == (3, [(1, 3)])
    assert wires(world) == []
    later(world, 1.0)
    assert world.generation == 3
    back(world)
    assert world.engine.health.state == "serving"


def test_what_was_not_due_costs_its_sender_the_process() -> None:
    world = running()
    says(world, 2, 1, "stage 1 sent message 4 (m4), due was message 3 (m3)")
    later(world, 0.6)
    assert (world.generation, world.started) == (2, [(1, 2)])


def test_a_wire_that_closes_is_left_alone_where_nothing_is_restarted() -> None:
    world = running(restart="never")
    closes(world)
    assert (world.generation, world.started, world.engine.health.state) == (1, [], "degraded")


def test_a_cordon_does_not_keep_a_wire_from_healing() -> None:
    world = running()
    world.say(Cordon(stage=1))
    closes(world)
    assert (world.generation, world.started, world.engine.health.down) == (2, [], "")
    back(world)
    closes(world)
    assert world.started == []
    assert "stage 1 is lost: its connection to stage 0 closed; it is cordoned by eve" in world.engine.health.message
