"""A core that follows another one: requests, settings, commands and events as they were, from the journal alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
from core_world import CoreWorld
from ppengine.core import offline_requests
from ppengine.core.journal_records import Answered, Entered, Opened, Tokens
from ppengine.core.successor import MOST_DEATHS
from ppengine.protocol.control import Accepted, Command, Fetch, Fetched, Outcome, Refused
from ppengine.protocol.facts import GenerationBegan, Serving
from ppengine.protocol.offline import Added, AddMany, Follow, News
from ppengine.protocol.reports import ProcessInfo, ProcessReport
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.stage_lifecycle import Drained
from ppengine.protocol.verbs import (
    Abort,
    Cordon,
    Drain,
    Pause,
    Preempt,
    Priority,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Submit,
    SwapOut,
    Verb,
)

NO_SPACE = "could not be started: [Errno 28] No space left on device"


def follow(world: CoreWorld, *, meet: bool = True, commit: bool = True, **options: Any) -> CoreWorld:
    """Kill the core of `world`, and return the one that follows it."""
    if commit:
        world.engine.commit()
    options = {"stages": len(world.engine.stages), "utilization": world.config.profile.memory.utilization, **options}
    fresh = CoreWorld(before=world, serve=False, journal=world.config.profile.journal, **options)
    fresh.counting, fresh.now = world.counting, world.now + 1.0
    fresh._count = world._count
    if meet:
        met(fresh)
    return fresh


def met(world: CoreWorld) -> None:
    """Let all stages leave their generation and meet the core."""
    world.engine.on_processes(processes(world))
    world.drained(*range(len(world.engine.stages)))
    world.ready()
    world.engine.advance()


def processes(world: CoreWorld, dead: int | None = None, generation: int = 1) -> ProcessReport:
    return ProcessReport(
        mono_ns=0,
        processes=[
            ProcessInfo(
                role="stage", stage=stage, rank=0, pid=1, generation=generation, exit_code=-9 if stage == dead else None
            )
            for stage in range(len(world.engine.stages))
        ],
    )  # fmt: skip


def stay_away(world: CoreWorld, seconds: float) -> Iterator[float]:
    """Let each try to start stage 1 fail; yield the seconds passed, before each turn."""
    begun = world.now
    while world.now < begun + seconds:
        info = ProcessInfo(
            role="stage", stage=1, rank=0, pid=0, exit_code=1, detail=NO_SPACE, generation=world.generation
        )  # fmt: skip
        world.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))
        world.drained(0)
        yield world.now - begun
        world.now += 0.25
        world.engine.advance()


def texts(world: CoreWorld, kind: str) -> list[str]:
    return [event.text for event in world.events if event.kind == kind]


def some(world: CoreWorld, steps: int) -> None:
    """Retire some steps, each in a turn of its own."""
    for _ in range(steps):
        if world.steps:
            world.retire()
        world.engine.commit()


# --- requests -----------------------------------------------------------------------------------------------


def test_requests_go_on_from_their_last_token() -> None:
    world = CoreWorld(max_num_seqs=2)
    world.counting = True
    for number in range(4):
        world.submit(name=f"r{number}", max_tokens=20)
    world.engine.advance()
    some(world, 9)
    came = [list(world.tokens(f"r{number}")) for number in range(4)]
    assert any(came) and not all(came)
    fresh = follow(world, max_num_seqs=2)
    assert [fresh.tokens(f"r{number}") for number in range(4)] == came
    assert [request.id for request in fresh.engine.requests.live()] == ["r0", "r1", "r2", "r3"]
    fresh.run()
    for number in range(4):
        assert fresh.tokens(f"r{number}") == list(range(20))
    fresh.check()
    assert texts(fresh, "engine.serving") == [
        "all stages are back after 1.0 s, generation 2; 4 requests are recomputed"
    ]


def test_steps_and_arrivals_are_numbered_on() -> None:
    world = CoreWorld()
    world.submit(name="a", max_tokens=9)
    some(world, 3)
    newest = world.scheduler.steps.number
    fresh = follow(world)
    assert fresh.steps[0].number > newest and fresh.steps[0].generation == 2
    fresh.submit(name="b", max_tokens=2)
    assert [request.arrival for request in fresh.engine.requests.live()] == [0, 1]


def test_a_reader_goes_on_by_offset_before_the_stages_have_met() -> None:
    world = CoreWorld()
    world.counting = True
    world.submit(name="a", max_tokens=12)
    world.engine.advance()
    some(world, 8)
    count = len(world.tokens("a"))
    assert count >= 3
    fresh = follow(world, meet=False)
    fresh.engine.outputs.fetch(b"g", Fetch(nonce=1, request="a", offset=2, wait_ms=0))
    (client, answer) = fresh.answers[-1]
    assert isinstance(answer, Fetched) and client == b"g"
    assert answer.token_ids == list(range(2, count)) and not answer.finished


def test_samples_seeds_logprobs_priority_and_holds_are_kept() -> None:
    world = CoreWorld()
    world.submit(name="a", n=3, max_tokens=30, logprobs=2)
    world.submit(name="b", max_tokens=30)
    world.submit(name="c", max_tokens=30)
    world.engine.advance()
    some(world, 6)
    world.say(Priority(request="a", priority=3))
    world.say(Preempt(request="b", hold=True))
    world.say(SwapOut(request="c"))
    some(world, 8)
    before = {request.id: request for request in world.engine.requests.live()}
    assert before["b"].state == "held" and before["c"].state == "held"
    fresh = follow(world)
    after = {request.id: request for request in fresh.engine.requests.live()}
    assert list(after) == list(before) == ["a", "a.1", "a.2", "b", "c"]
    for name, request in after.items():
        old = before[name]
        assert (request.seed, request.priority, request.held_by) == (old.seed, old.priority, old.held_by)
        assert (request.output_ids, request.stops, request.max_tokens) == (old.output_ids, old.stops, old.max_tokens)
        assert (request.owner, request.arrival_time, request.group) == (old.owner, old.arrival_time, old.group)
    assert len(fresh.engine.outputs.get("a").samples[2].logprobs) == len(before["a.2"].output_ids) > 0
    assert after["b"].state == "held" and after["b"].held_by == "preempt by eve"
    fresh.say(Release(request="b"))
    fresh.run()
    assert len(fresh.tokens("b")) == 30 and len(fresh.tokens("c")) < 30
    again = follow(fresh)
    assert [(one.id, one.state) for one in again.engine.requests.live()] == [("c", "held")]


def test_a_clock_that_was_set_back_ends_no_request_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    world = CoreWorld()
    world.submit(prompt=[1, 2, 3], max_tokens=2)
    world.run()
    (before,) = world.engine.requests.finished().requests
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600.0)
    (after,) = follow(world).engine.requests.finished().requests
    assert after.id == before.id and after.ended_s >= 0.0


def test_ends_outputs_and_the_finished_list_are_kept() -> None:
    world = CoreWorld()
    world.submit(name="done", max_tokens=3)
    world.submit(name="gone", max_tokens=9)
    world.run()
    world.say(Abort(request="gone"))
    world.engine.commit()
    for fresh in (follow(world), follow(follow(world))):
        assert [info.id for info in fresh.engine.requests.finished().requests] == ["gone", "done"]
        assert fresh.engine.outputs.get("done").samples[0].finish_reason == "length"
        assert len(fresh.tokens("done")) == 3
        fresh.engine.outputs.fetch(b"g", Fetch(nonce=1, request="done", wait_ms=60_000))
        assert fresh.answers[-1][1].finished  # type: ignore[attr-defined]
        detail = fresh.engine.details._of_request(fresh.scheduler, "done")
        assert detail is not None and (detail.state, detail.output_tokens, detail.prompt_tokens) == ("finished", 3, 3)
        assert "already in use" in fresh.submit(name="done")[-1].text
        assert texts(fresh, "request.finished") == []


def test_an_offline_session_goes_on_and_its_messages_count_once() -> None:
    world = CoreWorld()
    world.counting = True
    many = AddMany(
        nonce=4, session="s", submissions=[
            Submit(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        ] * 3,
    )  # fmt: skip
    world.engine.offline.add_many(b"llm", many)
    added = world.answers[-1][1]
    assert isinstance(added, Added)
    world.engine.advance()
    some(world, 3)
    world.engine.outputs.follow(b"llm", Follow(nonce=5, session="s", since=-1, wait_ms=0))
    before = world.answers[-1][1]
    assert isinstance(before, News) and all(0 < len(piece.token_ids) < 8 for piece in before.all_pieces())
    some(world, 2)
    fresh = follow(world)
    fresh.engine.offline.add_many(b"llm2", many)
    assert fresh.answers[-1] == (b"llm2", added) and len(fresh.engine.requests.live()) == 3
    fresh.run()
    question = Follow(nonce=6, session="s", since=before.cursor, wait_ms=0, finished_only=True)
    fresh.engine.outputs.follow(b"llm2", question)
    answer = fresh.answers[-1][1]
    assert isinstance(answer, News) and answer.cursor > before.cursor
    assert [piece.request for piece in answer.all_pieces()] == added.requests
    assert all((piece.offset, piece.token_ids) == (0, list(range(8))) for piece in answer.pieces)
    fresh.engine.outputs.forget(added.requests)
    assert list(follow(fresh).engine.outputs) == []


# --- losses -------------------------------------------------------------------------------------------------


def test_without_a_journal_every_request_is_reported_lost_by_id() -> None:
    world = CoreWorld(journal=False)
    world.submit(name="a", max_tokens=9, n=2)
    world.submit(name="b", max_tokens=2)
    world.submit(name="c", max_tokens=9)
    world.run(6)
    assert "b" in texts(world, "request.finished")[0]
    world.engine.commit()
    records = world.journal.records
    entered = [record for record in records if isinstance(record, Entered)]
    assert [one.name for one in entered][-3:] == ["a", "b", "c"] and not any(one.prompt_ids for one in entered)
    assert not any(isinstance(record, Tokens | Answered) for record in records)
    fresh = follow(world)
    why = "is lost: the engine core was restarted, and its journal is off"
    assert texts(fresh, "request.lost") == [f"a {why}", f"c {why}"]
    lost = "lost: the engine core was restarted, and its journal is off, 0 tokens"
    assert texts(fresh, "request.finished") == [f"a {lost}", f"a.1 {lost}", f"c {lost}"]
    fresh.engine.outputs.fetch(b"g", Fetch(nonce=1, request="a", offset=4, sample=1, wait_ms=60_000))
    answer = fresh.answers[-1][1]
    assert isinstance(answer, Fetched) and answer.finished and answer.finish_reason == "lost"
    assert fresh.engine.requests.live() == [] and fresh.memory.utilization == world.memory.utilization
    assert texts(follow(fresh), "request.lost") == [], "once"


def test_a_request_that_no_core_survives_is_not_tried_for_ever() -> None:
    world = CoreWorld()
    world.submit(name="poison", max_tokens=9)
    world.submit(name="held", max_tokens=9)
    world.say(Preempt(request="held", hold=True))
    world.engine.commit()
    for _ in range(MOST_DEATHS - 1):
        world = follow(world)
        assert texts(world, "request.lost") == []
    world = follow(world)
    assert texts(world, "request.lost") == [
        "poison is lost: the engine core ended 3 times while it ran, without a token between"
    ]
    assert [request.id for request in world.engine.requests.live()] == ["held"], "it had no work"
    assert world.engine.outputs.get("poison").samples[0].finish_reason == "lost"


def test_requests_of_a_paused_engine_are_no_reason() -> None:
    world = CoreWorld()
    world.say(Pause(mode="keep"))
    world.submit(name="a", max_tokens=9)
    for _ in range(MOST_DEATHS + 1):
        world = follow(world)
    assert [request.id for request in world.engine.requests.live()] == ["a"]


def test_one_that_runs_is_the_reason_and_not_those_behind_it() -> None:
    world = CoreWorld(max_num_seqs=1)
    world.submit(name="poison", max_tokens=9)
    world.submit(name="behind", max_tokens=9)
    for _ in range(MOST_DEATHS):
        world.engine.advance()
        world = follow(world, max_num_seqs=1)
    assert [request.id for request in world.engine.requests.live()] == ["behind"]
    world.run()
    assert len(world.tokens("behind")) == 9


def test_a_request_that_makes_tokens_is_no_reason_for_the_ends_of_cores() -> None:
    world = CoreWorld()
    world.counting = True
    world.submit(name="a", max_tokens=30)
    for _ in range(3 * MOST_DEATHS):
        world.run(4)
        world = follow(world)
    world.run()
    assert world.tokens("a") == list(range(30)) and texts(world, "request.lost") == []


# --- stages -------------------------------------------------------------------------------------------------


def test_every_stage_is_notified_until_it_answers() -> None:
    world = follow(CoreWorld(stages=3), meet=False)
    assert world.engine.health.state == "degraded"
    assert world.engine.health.message.startswith("the engine core was restarted")
    world.engine.on_processes(processes(world))
    world.engine.advance()
    assert world.told_to_leave == [(0, 2), (1, 2), (2, 2)]
    world.drained(1)
    world.engine.advance()
    assert len(world.told_to_leave) == 3, "not in every turn"
    world.now += 0.1
    world.engine.advance()
    assert world.told_to_leave[3:] == [(0, 2), (2, 2)]
    world.drained(0, 2)
    world.ready()
    world.engine.advance()
    world.now += 0.1
    world.engine.advance()
    assert len(world.told_to_leave) == 5 and world.engine.health.state == "serving" and world.started == []
    kinds = [type(fact) for fact in world.facts]
    assert kinds == [GenerationBegan, Serving]


def test_a_stage_that_died_meanwhile_is_restarted() -> None:
    world = CoreWorld(stages=3)
    world.counting = True
    world.submit(name="a", max_tokens=9)
    some(world, 3)
    fresh = follow(world, meet=False)
    fresh.engine.on_processes(processes(fresh, dead=1))
    fresh.engine.advance()
    assert fresh.started == [(1, 3)] and fresh.generation == 3
    assert "stage 1 is lost" in fresh.engine.health.message
    fresh.engine.on_processes(
        ProcessReport(mono_ns=0, processes=[ProcessInfo(role="stage", stage=1, rank=0, pid=2, generation=3)])
    )  # fmt: skip
    fresh.drained(0, 2)
    fresh.ready()
    fresh.engine.advance()
    fresh.run()
    assert fresh.tokens("a") == list(range(9))


def test_requests_of_the_core_before_end_as_lost_when_a_stage_does_not_come() -> None:
    world = CoreWorld()
    world.submit(name="a", n=2, max_tokens=9)
    world.submit(name="b", max_tokens=9)
    world.submit(name="done", max_tokens=1)
    world.engine.advance()
    some(world, 4)
    world.say(SetMemory(utilization=0.3))
    fresh = follow(world, meet=False, restart_limit_s=5.0)
    fresh.engine.on_processes(processes(fresh, dead=1))
    fresh.drained(0)
    fresh.engine.advance()
    for passed_s in stay_away(fresh, 6.0):
        assert bool(texts(fresh, "request.lost")) == (passed_s > 5.0)
    why = f"stage 1 did not come up within 5 s, 4 tries: {NO_SPACE}"
    assert texts(fresh, "request.lost") == [f"a is lost: {why}", f"b is lost: {why}"]
    assert texts(fresh, "engine.gave-up") == [f"{why}; 3 requests are lost, and new ones are refused"]
    end = fresh.last("c4")
    assert isinstance(end, Outcome) and end.state == "failed" and end.text == why
    fresh.engine.outputs.fetch(b"g", Fetch(nonce=1, request="b", wait_ms=60_000))
    answer = fresh.answers[-1][1]
    assert isinstance(answer, Fetched) and answer.finished and answer.finish_reason == "lost"
    refused = fresh.submit(name="c")[-1]
    assert isinstance(refused, Refused) and refused.code == "FAILED" and NO_SPACE in refused.text
    fresh.engine.commit()
    for core in (follow(fresh, meet=False), fresh):
        core.now += 16.0
        core.engine.advance()
        core.drained(0)
        core.ready()
        core.engine.advance()
        assert core.engine.health.state == "serving" and not core.engine.requests.live(), "they end once"
        core.submit(name="d", max_tokens=3)
        core.run()
        assert len(core.tokens("d")) == 3


def test_a_stage_that_was_loading_is_waited_for() -> None:
    world = CoreWorld()
    world.say(RestartStage(stage=1))
    world.engine.advance()
    assert world.started == [(1, 2)]
    fresh = follow(world, meet=False)
    fresh.engine.on_processes(processes(fresh, generation=2))
    fresh.now += 60.0
    fresh.drained(0)
    fresh.engine.advance()
    assert fresh.started == [] and fresh.engine.stages.leader(1).phase == "starting"
    fresh.ready()
    fresh.engine.advance()
    fresh.run()
    assert fresh.started == [], "it is not restarted twice"
    end = fresh.last("c1")
    assert isinstance(end, Outcome) and end.state == "applied"


def test_a_restart_whose_order_was_lost_is_ordered_again() -> None:
    world = CoreWorld()
    world.say(RestartStage(stage=1))
    world.engine.advance()
    fresh = follow(world, meet=False)
    fresh.engine.on_processes(processes(fresh, generation=1))
    fresh.engine.advance()
    assert fresh.started == [(1, 4)]


def test_a_stage_that_does_not_answer_is_restarted_as_after_any_loss() -> None:
    fresh = follow(CoreWorld(), meet=False)
    fresh.engine.on_processes(processes(fresh))
    fresh.drained(0)
    fresh.now += 1.9
    fresh.engine.advance()
    assert fresh.started == []
    fresh.now += 0.2
    fresh.engine.advance()
    assert fresh.started == [(1, 3)]


def test_words_of_the_generation_before_count_for_nothing() -> None:
    fresh = follow(CoreWorld(), meet=False)
    fresh.engine.stage_messages.take(Drained(1, 0, 0))
    fresh.engine.advance()
    assert fresh.engine.stages.leader(0).phase == "draining"


# --- settings and commands ----------------------------------------------------------------------------------


def test_settings_are_as_they_were() -> None:
    world = CoreWorld(utilization=0.5)
    world.set_memory(0.3)
    world.run()
    world.say(Cordon(stage=1), reason="look")
    world.say(SetCheck(check="finite", mode="on"))
    world.run()
    world.say(Drain())
    world.say(Pause(mode="keep"))
    fresh = follow(world)
    assert fresh.memory.utilization == 0.3 and fresh.memory.revision == world.memory.revision == 1
    assert fresh.memory.mapped_blocks == world.memory.mapped_blocks
    cordon = fresh.engine.stages.leader(1).cordon
    assert cordon == world.engine.stages.leader(1).cordon is not None
    assert fresh.scheduler.batcher.cordon == "stage 1 is cordoned by eve"
    assert fresh.engine.checks.flags == world.engine.checks.flags != 0
    assert fresh.engine.health.draining and fresh.scheduler.paused_by == "eve" and fresh.scheduler.paused
    assert any(step.checks == fresh.engine.checks.flags for step in fresh.steps)
    fresh.run()
    fresh.say(Resume())
    assert fresh.answers_to("c6")[-1].op == "op-6", "operations are numbered on"  # type: ignore[attr-defined]


def test_a_command_counts_once_and_its_answers_are_kept() -> None:
    world = CoreWorld()
    world.submit(name="a", max_tokens=50)
    world.engine.commit()
    fresh = follow(world)
    fresh.engine.commands.handle(
        b"g", Command(id="c1", epoch="epoch", by="eve", verb=Submit(prompt_token_ids=[1, 2, 3], request="a"))
    )  # fmt: skip
    assert fresh.answers_to("c1") == world.answers_to("c1") and len(fresh.engine.requests.live()) == 1
    replies, unknown = fresh.engine.answers.of(["c1", "c9"])
    assert replies == world.answers_to("c1") and unknown == ["c9"]


@pytest.mark.parametrize("commit", [True, False])
def test_a_turn_without_its_record_has_not_happened(commit: bool) -> None:
    world = CoreWorld()
    world.engine.commit()
    world.submit(name="a", max_tokens=50)
    fresh = follow(world, commit=commit)
    assert [request.id for request in fresh.engine.requests.live()] == (["a"] if commit else [])
    assert fresh.engine.answers.of(["c1"])[1] == ([] if commit else ["c1"])


def test_a_memory_change_under_way_is_carried_out_again() -> None:
    world = CoreWorld(utilization=0.5, prefix_caching=False)
    for number in range(6):
        world.submit(name=f"r{number}", prompt=range(3, 30), max_tokens=30)
    world.run(3)
    name = world.set_memory(0.3)
    world.engine.advance()
    assert not isinstance(world.last(name), Outcome)
    fresh = follow(world, prefix_caching=False)
    assert fresh.memory.agreed == 0.5
    fresh.run()
    end = fresh.last(name)
    assert isinstance(end, Outcome) and end.state == "applied" and end.op == "op-7", end
    assert fresh.memory.utilization == 0.3 and fresh.memory.mapped_blocks < world.memory.mapped_blocks
    assert all(len(fresh.tokens(f"r{number}")) == 30 for number in range(6))
    fresh.check()


@pytest.mark.parametrize("verb", [Pause(mode="wait"), Drain()])
def test_an_open_command_has_one_end(verb: Verb) -> None:
    world = CoreWorld()
    world.submit(name="a", max_tokens=40)
    world.run(4)
    assert not any(isinstance(reply, Outcome) for reply in world.say(verb))
    fresh = follow(follow(world, meet=False))
    fresh.run()
    ends = [reply for reply in fresh.answers_to("c2") if isinstance(reply, Outcome | Refused)]
    assert [(end.state, end.op) for end in ends if isinstance(end, Outcome)] == [("applied", "op-2")], ends
    assert fresh.engine.answers.of(["c2"])[0][-1] == ends[-1]


# --- events -------------------------------------------------------------------------------------------------


def test_events_are_numbered_on_and_pushed_again() -> None:
    world = CoreWorld()
    world.submit(name="a", max_tokens=2)
    world.run()
    newest = world.engine.feed.newest
    fresh = follow(world, meet=False)
    pending = [event for part in fresh.engine.feed.pending() for event in part.events]
    assert [event.kind for event in pending[:newest]] == [event.kind for event in world.events]
    assert fresh.engine.feed.newest == len(pending) >= newest
    met(fresh)
    fresh.engine.commit()
    assert fresh.engine.feed.facts()[: len(world.facts)] == world.facts


def test_a_journal_that_cannot_be_read_costs_the_requests_and_not_the_engine() -> None:
    world = CoreWorld()
    world.submit(name="a", max_tokens=9)
    newest = world.engine.feed.newest
    world.engine.commit()
    world.journal._written = []
    fresh = follow(world)
    assert fresh.generation == 1001 and fresh.engine.health.state == "serving" and fresh.engine.requests.live() == []
    assert fresh.engine.feed.newest > newest and len(fresh.engine.feed.pending()) == 1
    assert fresh.engine.feed.after(newest)[0].oldest > newest + 1, "the gateway sees that it cannot have those between"
    fresh.submit(name="b", max_tokens=4)
    fresh.run()
    assert len(fresh.tokens("b")) == 4


# --- anything at any time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_anything_may_happen_before_and_between_the_ends_of_cores(seed: int) -> None:
    """Whatever was committed is there again; in the end each request has its tokens, and each command one end."""
    draw = random.Random(seed)
    world = CoreWorld(stages=draw.randint(1, 3), max_num_seqs=6, schedule_ahead=draw.random() < 0.5)
    world.counting = True
    made: dict[str, int] = {}
    aborted: set[str] = set()
    for _ in range(4):
        for _ in range(draw.randint(5, 40)):
            act = draw.random()
            if act < 0.3:
                name = f"r{len(made)}"
                made[name] = draw.randint(1, 30)
                world.submit(name=name, max_tokens=made[name], prompt=range(3, 3 + draw.randint(1, 20)))
            elif act < 0.7 and world.steps:
                world.retire()
            elif made:
                name = draw.choice(list(made))
                verb: Verb = draw.choice([
                    Preempt(request=name, hold=draw.random() < 0.5), SwapOut(request=name), Release(request=name),
                    Priority(request=name, priority=draw.randint(-3, 3)), Abort(request=name),
                    SetMemory(utilization=draw.choice([0.3, 0.5])),
                ])  # fmt: skip
                world.say(verb)
                if isinstance(verb, Abort) and not isinstance(world.answers_to(f"c{world._count}")[-1], Refused):
                    aborted.add(name)
            world.engine.advance()
            world.engine.commit()
        live = {request.id: (list(request.output_ids), request.priority) for request in world.engine.requests.live()}
        ended = {output.request for output in world.engine.outputs if output.finished}
        old, world = world, follow(world, max_num_seqs=6, schedule_ahead=world.config.profile.scheduler.schedule_ahead)
        kept = {request.id: (list(request.output_ids), request.priority) for request in world.engine.requests.live()}
        gone = live.keys() - kept.keys()
        assert gone <= aborted, "an abort under way ends at once"
        assert kept == {name: state for name, state in live.items() if name not in gone}
        assert ended <= {output.request for output in world.engine.outputs if output.finished}
        world.run(3)
        scheduler_check(world)
    for request in world.engine.requests.live():
        if request.state == "held":
            world.say(Release(request=request.id))
    world.run()
    for name, count in made.items():
        tokens = world.tokens(name)
        assert tokens == list(range(len(tokens)))
        assert len(tokens) == count or name in aborted, (name, count, tokens)
    opened = [reply.id for _, reply in world.answers if isinstance(reply, Accepted)]
    for name in opened:
        assert sum(isinstance(reply, Outcome | Refused) for reply in world.answers_to(name)) == 1, world.answers_to(
            name
        )
    assert old.engine.operations.count <= world.engine.operations.count and not world.engine.operations.live


def scheduler_check(world: CoreWorld) -> None:
    import scheduler_invariants

    scheduler_invariants.check(world.scheduler)


def test_messages_that_are_known_by_number_are_bounded_over_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_requests, "ADDED_MOST", 3)
    one = Submit(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    world, nonce = CoreWorld(), 0
    for _ in range(3):
        for _ in range(5):
            nonce += 1
            world.engine.offline.add_many(b"llm", AddMany(nonce=nonce, session="s", submissions=[one]))
            world.run()
            world.engine.commit()
        assert list(world.engine.offline.added) == [("s", number) for number in range(nonce - 2, nonce + 1)]
        world = follow(world)


def test_a_state_that_moves_while_a_core_gives_up_is_complete() -> None:
    """The move takes slices of a turn, and the commands that it goes through may end between two."""
    world = CoreWorld()
    world.submit(name="a", max_tokens=40)
    world.run(4)
    for verb in (Pause(mode="wait"), Drain()):
        world.say(verb)
    fresh = follow(world, meet=False, restart_limit_s=5.0)
    fresh.engine.on_processes(processes(fresh, dead=1))
    fresh.drained(0)
    fresh.engine.advance()
    records = fresh.journal.state()
    found = list(takewhile(lambda record: not isinstance(record, Opened), records))
    for _ in stay_away(fresh, 6.0):
        pass
    assert texts(fresh, "engine.gave-up") and found and any(isinstance(record, Entered) for record in records)


@pytest.mark.parametrize("seed", range(30))
def test_tokens_behind_a_part_that_cannot_be_read_are_computed_again(seed: int) -> None:
    """They would follow others than those before them, and readers would have a text with a gap."""
    draw = random.Random(seed)
    world = CoreWorld(max_num_seqs=4)
    world.counting = True
    lengths = {f"r{number}": draw.randint(1, 30) for number in range(6)}
    for name, length in lengths.items():
        world.submit(name=name, max_tokens=length, n=draw.choice([1, 2]), temperature=1.0, logprobs=0)
    world.submit(name="aborted", max_tokens=40)
    world.engine.advance()
    world.engine.commit()
    begun = world.journal.turns
    some(world, 3)
    world.say(Abort(request="aborted"))
    some(world, draw.randint(2, 60))
    turns = range(begun, world.journal.turns)
    world.journal.lost = set(draw.sample(turns, draw.randint(1, 2)))
    fresh = follow(world)
    for output in fresh.engine.outputs:
        assert all(list(sample.tokens) == list(range(len(sample.tokens))) for sample in output.samples)
    fresh.run()
    for name, length in lengths.items():
        output = fresh.engine.outputs.get(name)
        assert output is not None and output.finished
        assert all(list(sample.tokens) == list(range(length)) for sample in output.samples)
        assert all(len(sample.logprobs) == length for sample in output.samples)
