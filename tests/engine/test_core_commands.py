"""Commands and messages to the core: one end each, and no message that ends the core."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from core_world import VOCAB, CoreWorld
from ppengine.core import operations
from ppengine.protocol.control import Command, Failed, Fetch, Fetched, Inspect, Outcome, Refused
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.sampling import MAX_STOP_TOKENS, SamplingParams
from ppengine.protocol.store_verbs import StoreAdd, StorePause, StoreVerb
from ppengine.protocol.verb_table import ROWS
from ppengine.protocol.verbs import (
    MESSAGES,
    Abort,
    Continue,
    Cordon,
    Drain,
    DrainClient,
    Kick,
    Limit,
    Many,
    Pause,
    Preempt,
    Priority,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Stop,
    Submit,
    SwapIn,
    SwapOut,
)


def refusal(answers):
    assert len(answers) == 1
    assert isinstance(answers[0], Refused), answers
    return answers[0].code, answers[0].text


def test_a_later_pause_supersedes_one_that_waits():
    world = CoreWorld()
    world.submit(max_tokens=20)
    world.engine.advance()
    first = world.say(Pause(mode="wait"))
    second = world.say(Pause(mode="wait"))
    assert [type(answer).__name__ for answer in first] == ["Accepted", "Deferred"]
    assert world.last(first[0].id).state == "superseded"
    third = world.say(Pause(mode="keep"))
    assert world.last(second[0].id).state == "superseded"
    assert world.last(third[0].id).state == "applied"


def test_an_end_is_told_of_the_request_or_the_stage_that_it_is_about():
    world = CoreWorld(stages=2)
    name = world.submit(max_tokens=20)[0].request
    world.engine.advance()
    for verb in (Pause(mode="keep"), Cordon(stage=1), Abort(request=name)):
        world.say(verb)
    world.run()
    told = [(event.text.split()[0], event.request, event.stage) for event in world.events if event.kind == "op.applied"]
    assert [line for line in told if line[0] != "submit"] == [
        ("pause", None, None), ("cordon", None, 1), ("abort", name, None)
    ]  # fmt: skip


def test_pause_wait_after_pause_keep_lets_finish_what_runs():
    world = CoreWorld()
    world.submit(max_tokens=20)
    world.engine.advance()
    world.say(Pause(mode="keep"))
    name = world.say(Pause(mode="wait"))[0].id
    world.run()
    assert world.last(name).state == "applied"
    assert world.engine.requests.live() == []


def test_requests_of_a_paused_engine_say_who_paused_it_and_how_to_go_on():
    """With nothing running too: two hundred requests waited for what runs, and nothing ran."""
    world = CoreWorld()

    def waits():
        return {request.why.text for request in world.engine.reporter.build().requests}

    world.say(Pause(mode="wait"))
    world.submit()
    world.submit()
    world.run()
    report = world.engine.reporter.build()
    assert (report.engine.state, report.engine.message) == ("paused", "paused by eve; resume goes on")
    assert "paused by eve; resume goes on" in waits()
    assert all("paused by eve; resume goes on" in text for text in waits())
    world.say(Resume())
    world.engine.advance()
    world.say(Pause(mode="wait"))
    world.submit()
    assert any("paused by eve; resume goes on; 2 running finish first" in text for text in waits())
    world.say(Pause(mode="keep"))
    world.run()
    assert waits() == {"paused by eve; resume goes on"}


def test_the_rate_is_that_of_the_last_two_seconds():
    """A pipeline that hangs has no rate two seconds later, whatever it did before."""
    world = CoreWorld()
    world.submit(max_tokens=40)

    def rate():
        found = world.engine.reporter.build().throughput
        return found.output_tok_s, found.window_s

    assert rate() == (None, None)
    for _ in range(30):
        world.now += 0.1
        world.engine.advance()
        world.retire()
        last = rate()
    assert last == (pytest.approx(10.0), pytest.approx(2.0))
    for _ in range(21):
        world.now += 0.1
        last = rate()
    assert last == (0.0, pytest.approx(2.0))


def test_drain_refuses_offline_sessions_too():
    world = CoreWorld()
    world.say(Drain())
    assert refusal(world.submit())[0] == "BUSY"
    world.engine.offline.add_many(b"o", AddMany(nonce=1, session="s", submissions=[Submit(prompt_token_ids=[1])]))
    answer = world.answers[-1][1]
    assert isinstance(answer, Added)
    assert "draining" in answer.error
    assert not answer.requests


def test_the_dry_run_of_a_submission_that_does_not_fit_says_so():
    world = CoreWorld()
    code, text = refusal(world.say(Submit(prompt_token_ids=[1] * 64), dry_run=True))
    assert code == "DOES_NOT_FIT"
    assert "at most 63 would fit" in text
    assert world.say(Submit(prompt_token_ids=[1]), dry_run=True)[0].state == "planned"
    assert world.engine.requests.live() == []


def test_a_request_named_like_anothers_sample_is_its_own():
    world = CoreWorld()
    world.submit(name="a", n=2, max_tokens=1)
    world.run()
    world.submit(name="a.1", max_tokens=20)
    world.engine.advance()
    assert refusal(world.say(Abort(request="a")))[0] == "NOT_FOUND"
    assert [request.id for request in world.engine.requests.members("a.1")] == ["a.1"]


@pytest.mark.parametrize("name", ["x" * 129, "a b", "a\nb", "\x1b[31m", "a/b\u202e"])
def test_a_request_id_that_no_screen_can_show_is_refused(name):
    world = CoreWorld()
    code, text = refusal(world.submit(name=name))
    assert code == "INVALID"
    assert "request id" in text
    assert len(text) < 300


def test_stop_tokens_outside_of_the_vocabulary_are_refused():
    assert refusal(CoreWorld().submit(stop_token_ids=[VOCAB]))[0] == "INVALID"


def test_more_stop_tokens_than_a_stage_has_room_for_are_refused():
    assert SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS)))
    with pytest.raises(ValueError, match="65 stop_token_ids"):
        SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS + 1)))


def test_aborting_a_leader_alone_lets_its_samples_go_on():
    world = CoreWorld()
    world.submit(name="a", n=3, max_tokens=5)
    world.engine.requests.abort(world.engine.health.require(), world.engine.requests.members("a")[0])
    world.run()
    output = world.engine.outputs.get("a")
    assert [sample.finish_reason for sample in output.samples] == ["abort", "length", "length"]
    world.check()
    assert world.scheduler.blocks.device.used == 0


def test_every_verb_on_every_state_is_answered_and_leaves_the_books_in_order():
    for ahead in (False, True):
        for state in ("waiting", "running", "swapped", "held", "finished", "gone"):
            world = CoreWorld(schedule_ahead=ahead)
            if state != "gone":
                world.submit(name="a", n=2, max_tokens=1 if state == "finished" else 30)
            if state == "finished":
                world.run()
            elif state != "waiting":
                world.run(steps=4)
                world.say(SwapOut(request="a", hold=state == "held")) if state != "running" else None
                if state == "held":
                    world.run()
            for verb in (
                Preempt(request="a", hold=True), Release(request="a"), SwapOut(request="a"), SwapIn(request="a"),
                Preempt(request="a", mode="swap"), SwapOut(request="a", hold=False), Preempt(request="a.1"),
                Priority(request="a", priority=2), Priority(request="a.1", priority=-1),
                Continue(stage=2**63), SetMemory(utilization=float("nan")), Abort(request="a"), Abort(request="a"),
            ):  # fmt: skip
                for dry in (True, False):
                    assert world.say(verb, dry_run=dry)
                    world.check()
                    for what in ("request", "blocks", "stacks"):
                        world.engine.details.answer(Inspect(nonce=2**63, what=what, request="a"))
                world.engine.advance()
            world.run()
            world.check()
            assert world.engine.requests.live() == []
            assert world.engine.operations.live == []


def test_offsets_below_zero_are_refused_and_far_ones_wait():
    world = CoreWorld()
    world.submit(name="a", max_tokens=2)
    for fields in ({"offset": -1}, {"text_offset": -(2**63)}, {"sample": -1}):
        world.engine.outputs.fetch(b"c", Fetch(nonce=1, request="a", **fields))
        assert isinstance(world.answers[-1][1], Failed), fields
    world.engine.outputs.fetch(b"c", Fetch(nonce=2, request="a", offset=2**63, wait_ms=2**63))
    world.run()
    world.engine.outputs.serve_waiters()
    answer = world.answers[-1][1]
    assert isinstance(answer, Fetched)
    assert (answer.nonce, answer.token_ids, answer.finished) == (2, [], True)


def test_prompt_throughput_counts_what_was_computed():
    world = CoreWorld(max_num_batched_tokens=8)
    world.submit([1] * 20, max_tokens=3)
    assert world.engine.requests.prompt_tokens_total == 0
    world.run()
    assert (world.engine.requests.prompt_tokens_total, world.engine.requests.output_tokens_total) == (20, 3)


def test_effects_that_have_ended_are_not_kept():
    world = CoreWorld()
    for _ in range(5):
        world.submit(name=None, max_tokens=30)
        world.run(steps=3)
        name = world.engine.requests.live()[0].id
        outcome = world.say(Abort(request=name))
        world.run()
        assert isinstance(world.last(outcome[0].id), Outcome)
    assert world.scheduler.fences.settled() == []


def test_resume_undoes_every_pause():
    world = CoreWorld()
    world.submit(max_tokens=3)
    for mode in ("keep", "wait"):
        world.say(Pause(mode=mode))
    world.say(Resume())
    world.run()
    assert world.engine.health.state == "serving"
    assert world.engine.requests.live() == []


def test_an_act_on_a_group_ends_when_all_of_its_samples_have_moved():
    world = CoreWorld(stages=1, max_num_batched_tokens=4)
    world.submit([1] * 8, name="a", n=2, max_tokens=40)
    while not all(request.in_flight for request in world.engine.requests.live()):
        world.retire() if world.steps else world.engine.advance()
    flying = [request.in_flight[-1] for request in world.engine.requests.live()]
    name = world.say(Preempt(request="a", mode="recompute", hold=True))[0].id
    while world.last(name).__class__ is not Outcome:
        assert min(flying) <= world.steps[-1].number
        world.retire()
    assert [request.state for request in world.engine.requests.live()] == ["held", "held"]


def test_the_plan_of_a_priority_has_the_position_before_and_after():
    world = CoreWorld(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 2), ("d", 5)):
        world.say(Submit(prompt_token_ids=[1] * 4, request=name, priority=priority))
    world.run(steps=2)
    (plan,) = world.say(Priority(request="d", priority=1), dry_run=True)
    assert plan.plan == ["d is waiting, priority 5 -> 1", "position 3 -> 2 of 3 waiting"]
    assert plan.figures == {"priority_before": 5, "priority_after": 1, "position_before": 3, "position_after": 2}
    (plan,) = world.say(Priority(request="a", priority=-1), dry_run=True)
    assert plan.plan == ["a is running, priority 0 -> -1", "takes effect when it waits in a queue"]
    assert world.say(Priority(request="b", priority=0), dry_run=True)[0].plan == [
        "nothing changes: the priority of b is 0 already"
    ]
    assert [request.id for request in world.scheduler.queues.waiting] == ["b", "c", "d"]
    end = world.say(Priority(request="d", priority=-5), if_rev=0)[-1]
    assert (end.state, end.text, end.revision) == ("applied", "priority by eve: 5 -> -5", 1)
    end = world.say(Priority(request="d", priority=-5))[-1]
    assert (end.text, end.revision) == ("nothing changes: the priority of d is -5 already", 1)
    assert [request.id for request in world.scheduler.queues.waiting] == ["d", "b", "c"]
    assert refusal(world.say(Priority(request="z", priority=1))) == ("NOT_FOUND", "no request z")


def test_all_samples_take_the_priority_and_count_as_one_in_the_position():
    world = CoreWorld()
    world.submit([1] * 4, name="b", n=3, max_tokens=20)
    world.run(steps=4)
    world.say(Preempt(request="b", mode="recompute", hold=True))
    world.run()
    world.say(Pause(mode="keep"))
    world.submit([1] * 4, name="c", max_tokens=20)
    world.say(Release(request="b"))
    waiting = world.scheduler.queues.waiting
    assert [request.id for request in waiting] == ["b", "b.1", "b.2", "c"]
    end = world.say(Priority(request="b", priority=4), dry_run=True)[-1]
    assert end.plan[1] == "position 1 -> 2 of 2 waiting"
    world.say(Priority(request="b", priority=4))
    assert [request.id for request in waiting] == ["c", "b", "b.1", "b.2"]
    assert {request.revision for request in world.engine.requests.members("b")} == {3}
    world.say(Priority(request="b.1", priority=-1))
    assert [request.id for request in waiting] == ["b.1", "c", "b", "b.2"]
    world.say(Resume())
    world.run()
    assert world.engine.requests.live() == []


def test_the_priority_is_in_the_picture_and_in_the_detail_also_after_the_end():
    world = CoreWorld()
    world.say(Submit(prompt_token_ids=[1], request="a", priority=4, sampling=SamplingParams(max_tokens=9)))
    world.say(Priority(request="a", priority=-2))
    assert [info.priority for info in world.engine.reporter.build().requests] == [-2]
    for _ in range(2):
        answer = world.engine.details.answer(Inspect(nonce=1, what="request", request="a"))
        detail = msgspec.msgpack.decode(answer.data, type=RequestDetail)
        assert detail.priority == -2
        world.run()
    assert detail.state == "finished"


def test_prompts_of_a_session_begin_by_their_priority():
    world = CoreWorld(max_num_seqs=1, stages=1)
    prompts = [
        Submit(prompt_token_ids=[1], request=name, priority=priority, sampling=SamplingParams(max_tokens=2))
        for name, priority in (("a", 3), ("b", -1), ("c", 0))
    ]
    world.engine.offline.add_many(b"o", AddMany(nonce=1, session="s", submissions=prompts))
    world.run()
    assert [event.request for event in world.events if event.kind == "request.finished"] == ["b", "c", "a"]


def test_a_drain_shows_how_far_it_is_and_tells_its_client_now_and_then():
    world = CoreWorld()
    for length in range(1, 30):
        world.submit(max_tokens=length)
    name = world.say(Drain())[0].id
    seen = set()
    while world.engine.requests.live():
        world.retire() if world.steps else world.engine.advance()
        seen.update(info.progress for info in world.engine.operations.infos() if info.state == "deferred")
    assert len(seen) > 10
    kinds = [type(answer).__name__ for answer in world.answers_to(name)]
    assert kinds[:2] == ["Accepted", "Deferred"]
    assert kinds[-1] == "Outcome"
    assert len(kinds) < len(seen)


def test_the_newest_word_on_progress_is_told_in_the_end(monkeypatch):
    now, told = [0.0], []
    board = operations.Operations(lambda _, message: told.append(message), lambda event: None, lambda: now[0])
    operation = board.open(Command(id="c", epoch="e", verb=Abort(request="r"), by="op"), b"", "r")
    for now[0], text in ((1.0, "at stage 0"), (1.1, "at stage 1"), (1.2, "at stage 1"), (1.3, "at stage 1")):
        board.defer(operation, text)
        assert operation.progress == text
    assert [message.text for message in told[1:]] == ["at stage 0", "at stage 1"], "once each, 0.2 s apart"


def test_every_verb_for_the_core_has_a_handler_and_any_other_is_refused():
    world = CoreWorld()
    assert set(world.engine.verbs.by_type) == {MESSAGES[row.name] for row in ROWS.values() if row.runs == "core"}
    assert refusal(world.say(Continue(stage=0))) == ("UNSUPPORTED", "continue is not for the core")


def test_an_engine_without_tiers_refuses_verbs_on_backends_with_the_remedy():
    world = CoreWorld()
    for verb in (StorePause(backend="nvme0"), StoreAdd(backend="nvme0", kind="files", url="/data/kv")):
        code, text = refusal(world.say(verb))
        assert code == "UNSUPPORTED" and text.startswith("tiers.host is false in the profile; set it to true")


def test_a_dry_run_of_every_verb_for_the_core_plans_and_changes_nothing():
    world = CoreWorld()
    world.submit(name="a", max_tokens=30)
    world.run(steps=4)
    before = [(request.id, request.state, request.revision) for request in world.engine.requests.live()]
    plans = {}
    for verb in (
        Submit(prompt_token_ids=[1]), Abort(request="a"), Preempt(request="a"), SwapOut(request="a"),
        SetMemory(utilization=0.6), Pause(), Resume(), Drain(), Stop(), SetCheck(check="finite"),
        RestartStage(stage=0), Cordon(stage=1), Priority(request="a", priority=-3),
        Many(verbs=[Abort(request="a")]), Limit(client="ann", limit="8"), DrainClient(client="ann"),
    ):  # fmt: skip
        (answer,) = world.say(verb, dry_run=True)
        assert isinstance(answer, Outcome), (verb, answer)
        assert answer.state == "planned" and answer.text == answer.plan[0] and answer.op == ""
        plans[type(verb)] = answer
    assert set(plans) == set(world.engine.verbs.by_type) - {SwapIn, Release, Kick, *get_args(StoreVerb)}
    assert (plans[Abort].request, plans[Abort].revision, plans[Submit].request) == ("a", before[0][2], None)
    assert [(request.id, request.state, request.revision) for request in world.engine.requests.live()] == before
    assert world.engine.operations.infos()[1:] == [] and world.engine.health.state == "serving"


@pytest.mark.parametrize(
    "verb", [Abort(request="a"), Release(request="a"), Priority(request="a", priority=0), SetMemory(utilization=0.6)]
)
def test_a_revision_that_has_moved_on_refuses_before_anything_else_is_looked_at(verb):
    world = CoreWorld()
    world.submit(name="a", max_tokens=30)
    world.run(steps=4)
    code, text = refusal(world.say(verb, if_rev=99))
    assert code == "CONFLICT" and "you saw 99" in text
    assert refusal(world.say(Abort(request="b"), if_rev=99))[0] == "NOT_FOUND"
