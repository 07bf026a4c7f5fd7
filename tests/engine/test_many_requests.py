"""One verb on many requests: the same as the verbs one by one, with one plan and one outcome."""

from __future__ import annotations

from core_world import CoreWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.core.live_requests import SLICE
from ppengine.core.scheduler import Refused as NotPossible
from ppengine.protocol.control import Accepted, Conflict, Deferred, Outcome, Refused
from ppengine.protocol.offline import AbortMany, Added, AddMany
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Abort, Many, Pause, Preempt, Priority, Release, Resume, Submit, SwapIn, SwapOut

NAMES = [f"r{number}" for number in range(8)]


def many(verb, names, revisions=(), **fields):
    return Many(verbs=[verb(request=name, **fields) for name in names], revisions=list(revisions))


def states(world):
    return {
        request.id: (
            request.state, len(request.blocks), len(request.host_blocks), request.revision, request.priority,
            request.fence.kind if request.fence else None, bool(request.fence and request.fence.hold),
        )
        for request in world.engine.requests.live()
    }  # fmt: skip


VERBS = st.sampled_from([
    (Abort, {}), (Preempt, {}), (Preempt, {"mode": "recompute", "hold": True}), (Preempt, {"mode": "swap"}),
    (SwapOut, {}), (SwapOut, {"hold": False}), (SwapIn, {}), (Release, {}), (Priority, {"priority": -2}),
])  # fmt: skip
ACTS = st.lists(
    st.tuples(VERBS, st.lists(st.sampled_from([*NAMES, "gone"]), min_size=1, max_size=9, unique=True),
              st.integers(0, 5)),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(2, 24)), min_size=8, max_size=8),
    acts=ACTS, swap_blocks=st.integers(0, 14), ahead=st.booleans(),
)  # fmt: skip
def test_many_is_the_verbs_one_by_one(prompts, acts, swap_blocks, ahead):
    """Two worlds of one life: in one the verbs come together, in the other one by one; nothing differs at the end."""
    worlds = [CoreWorld(serve=False, schedule_ahead=ahead, max_num_seqs=6, preemption="swap") for _ in range(2)]
    for world in worlds:
        world.ready(swap_blocks=swap_blocks)
        world.run()
        for name, (length, samples, tokens) in zip(NAMES, prompts, strict=True):
            world.submit([7] * length, name=name, n=samples, max_tokens=tokens)
    together, apart = worlds
    ends = []
    for (verb, fields), names, steps in acts:
        for world in worlds:
            world.run(steps=steps)
        planned = together.say(many(verb, names, **fields), dry_run=True)[0]
        accepted = together.say(many(verb, names, **fields))[0]
        ends.append((accepted.id, planned, {name: apart.say(verb(request=name, **fields))[0].id for name in names}))
        assert states(together) == states(apart)
        for world in worlds:
            world.check()
            world.engine.advance()
    for world in worlds:
        for request in world.engine.requests.live():
            if request.state == "held" or (request.fence is not None and request.fence.hold):
                world.say(Release(request=request.id))
        world.run()
    assert states(together) == states(apart)
    assert {n: together.tokens(n) for n in NAMES} == {n: apart.tokens(n) for n in NAMES}
    assert together.engine.operations.live == []
    for command, planned, singles in ends:
        end = together.last(command)
        undone = {name for name, single in singles.items() if getattr(apart.last(single), "state", "") != "applied"}
        assert {each.request for each in end.conflicts} == undone
        assert end.figures == {"applied": len(singles) - len(undone), "conflicts": len(undone)}
        assert planned.figures["requests"] + planned.figures["conflicts"] == len(singles)


def filled(count=6, **options):
    """Return a core with `count` running requests of two blocks each."""
    world = CoreWorld(**options)
    for number in range(count):
        world.submit([number + 1] * 12, name=f"r{number}", max_tokens=40)
    world.run(steps=6)
    assert {request.state for request in world.engine.requests.live()} == {"running"}
    return world


def test_one_plan_has_the_sums_and_one_outcome_the_counts():
    world = filled()
    names = [f"r{number}" for number in range(6)]
    before = states(world)
    (plan,) = world.say(many(Abort, [*names, "r9"]), dry_run=True)
    each = [world.say(Abort(request=name), dry_run=True)[0].figures for name in names]
    assert plan.state == "planned" and plan.text == plan.plan[0] == "abort 6 of 7 requests; 1 cannot be done"
    assert plan.plan[2] == "6 running"
    assert plan.figures["blocks_back"] == sum(one["blocks_back"] for one in each) > 0
    assert (plan.figures["requests"], plan.figures["conflicts"]) == (6, 1)
    assert plan.plan[3].startswith(f"at least {plan.figures['blocks_back']:.0f} device blocks (")
    computed, written = (sum(one[name] for one in each) for name in ("computed_tokens", "output_tokens"))
    assert plan.plan[1] == f"{computed:.0f} computed tokens are lost, after {written:.0f} of output"
    assert plan.plan[-1] == "r0 r1 r2 r3 r4 r5"
    assert plan.conflicts == [Conflict(request="r9", code="NOT_FOUND", text="no request r9")]
    assert states(world) == before
    accepted = world.say(many(Abort, [*names, "r9"]))[0]
    assert [info.verb for info in world.engine.operations.infos() if info.state == "deferred"] == ["abort 7 requests"]
    world.run()
    kinds = [type(answer) for answer in world.answers_to(accepted.id)]
    assert kinds[0] is Accepted and kinds[-1] is Outcome and kinds.count(Outcome) == 1 and Deferred in kinds
    end = world.last(accepted.id)
    assert (end.state, end.text) == ("applied", "6 of 7 requests; not: r9")
    assert [each.request for each in end.conflicts] == ["r9"] and end.step is not None
    assert [event.text for event in world.events if event.kind == "op.applied"][-1] == f"abort 7 requests: {end.text}"
    assert world.engine.requests.live() == []


def test_a_plan_of_a_thousand_has_ten_lines_at_most():
    world = CoreWorld()
    names = [f"r{number}" for number in range(1000)]
    for name in names:
        world.submit([1, 2, 3], name=name, max_tokens=8)
    world.run(steps=4)
    for verb in (Abort, Preempt, SwapOut, Release):
        (plan,) = world.say(many(verb, names), dry_run=True)
        assert len(plan.plan) <= 10 and all(len(line) < 100 for line in plan.plan)
    assert plan.plan == ["release 0 of 1000 requests; 1000 cannot be done"]
    (plan,) = world.say(many(Priority, names, priority=4), dry_run=True)
    assert plan.plan[1] == "priority 4; smaller first" and plan.plan[-1] == "r0 r1 r2 r3 r4 r5 r6 r7 and 992 more"


def test_the_plan_of_many_swaps_counts_the_host_blocks_of_all():
    """Each of the six would fit alone; together two do."""
    world = CoreWorld(serve=False)
    world.ready(swap_blocks=6)
    world.run()
    for number in range(6):
        world.submit([number + 1] * 17, name=f"r{number}", max_tokens=40)
    world.run(steps=6)
    names = [f"r{number}" for number in range(6)]
    assert all(world.say(SwapOut(request=name), dry_run=True)[0].state == "planned" for name in names)
    (plan,) = world.say(many(SwapOut, names), dry_run=True)
    assert plan.figures["requests"] == 2
    assert [(each.request, each.code, each.text) for each in plan.conflicts][:1] == [
        ("r2", "DOES_NOT_FIT", "r2 needs 3 host blocks, the others leave 0")
    ]
    assert "mode swap: takes 6 host blocks (0.1 KiB) of 6 free" in plan.plan
    world.say(many(SwapOut, names))
    world.run()
    end = world.answers[-1][1]
    held = [request.id for request in world.engine.requests.live() if request.state == "held"]
    assert held == ["r0", "r1"] or end.text.startswith("2 of 6")


def test_a_preemption_without_room_for_all_on_the_host_recomputes_the_rest():
    world = CoreWorld(serve=False, preemption="swap")
    world.ready(swap_blocks=6)
    world.run()
    for number in range(4):
        world.submit([number + 1] * 17, name=f"r{number}", max_tokens=40)
    world.run(steps=6)
    verbs = many(Preempt, [f"r{number}" for number in range(4)])
    tokens = sum(world.scheduler.queues.requests[name].num_computed for name in ("r2", "r3"))
    (plan,) = world.say(verbs, dry_run=True)
    assert "mode swap: takes 6 host blocks (0.1 KiB) of 6 free" in plan.plan and plan.conflicts == []
    assert f"mode recompute: {tokens} computed tokens (0.1 KiB) are computed again" in plan.plan
    accepted = world.say(verbs)[0]
    while world.steps and not isinstance(world.last(accepted.id), Outcome):
        world.retire()
    assert world.last(accepted.id).text == "4 of 4 requests"


def test_a_request_that_ended_or_moved_on_meanwhile_is_a_conflict_and_the_others_go_on():
    world = filled(4)
    world.say(Preempt(request="r1", mode="recompute", hold=True))
    world.run(steps=3)
    seen = {request.id: request.revision for request in world.engine.requests.live()}
    world.say(Release(request="r1"))
    world.say(Abort(request="r2"))
    world.run(steps=3)
    accepted = world.say(many(Abort, seen, revisions=seen.values()))[0]
    world.run()
    end = world.last(accepted.id)
    assert end.text == "2 of 4 requests; ended meanwhile: r2; not: r1"
    assert [(each.request, each.code) for each in end.conflicts] == [("r1", "CONFLICT"), ("r2", "NOT_FOUND")]
    assert end.conflicts[0].text.startswith("r1 has moved on: revision 2, you saw 1")
    assert end.conflicts[1].text.startswith("request r2 has finished (abort")


def test_an_effect_that_another_verb_supersedes_is_a_conflict():
    world = filled(2)
    accepted = world.say(many(SwapOut, ["r0", "r1"]))[0]
    world.say(Abort(request="r0"))
    world.run()
    end = world.last(accepted.id)
    assert (end.state, [each.request for each in end.conflicts]) == ("applied", ["r0"])
    assert end.conflicts[0].text.startswith("superseded: ")


def test_many_of_which_none_can_be_done_fails_with_every_reason():
    world = filled(2)
    answers = world.say(many(Release, ["r0", "r1"]))
    assert [type(answer) for answer in answers] == [Accepted, Outcome]
    assert (answers[-1].state, answers[-1].text) == ("failed", "0 of 2 requests; not: r0 r1")
    assert all("nothing to release" in each.text for each in answers[-1].conflicts)
    assert not isinstance(answers[0], Refused | NotPossible)


def test_only_a_dry_run_computes_the_figures_of_a_plan(monkeypatch):
    world = filled()
    counted = []
    figures = world.scheduler.actions.figures
    monkeypatch.setattr(world.scheduler.actions, "figures", lambda request: counted.append(request) or figures(request))
    planned = world.say(many(Abort, NAMES[:6]), dry_run=True)[0]
    assert len(counted) == 6 and planned.figures["requests"] == 6
    world.say(many(Abort, NAMES[:6]))
    world.run()
    assert len(counted) == 6 and world.scheduler.queues.requests == {}


def crowd(count):
    """Return a world in which one request runs, and `count` wait behind it."""
    world = CoreWorld(stages=1, max_num_seqs=1)
    world.submit([1, 2], name="runs", max_tokens=30)
    world.engine.advance()
    for number in range(count):
        world.submit([1, 2, 3], name=f"r{number}", max_tokens=8)
    return world


def live(world):
    return len(world.engine.requests.live())


def test_many_waiting_requests_are_aborted_in_slices_between_steps():
    count = 2 * SLICE + 10
    world = crowd(count)
    answers = world.say(many(Abort, [f"r{number}" for number in range(count)]))
    assert isinstance(answers[0], Accepted) and isinstance(answers[1], Deferred)
    assert answers[1].text == f"{SLICE} of {count} applied" and live(world) == 1 + count - SLICE
    assert world.engine.unfinished, "the loop does not wait for a message"
    before = len(world.engine.requests.members("runs")[0].output_ids)
    world.retire()
    assert live(world) == 1 + count - 2 * SLICE and world.engine.unfinished
    assert len(world.engine.requests.members("runs")[0].output_ids) == before + 1, "a step retires between two slices"
    world.say(Abort(request=f"r{count - 1}"))
    world.retire()
    assert live(world) == 1 and not world.engine.unfinished
    (outcome,) = [each for each in world.answers_to(answers[0].id) if isinstance(each, Outcome)]
    assert outcome.state == "applied" and outcome.text.startswith(f"{count - 1} of {count} requests; not: r{count - 1}")
    assert [each.code for each in outcome.conflicts] == ["NOT_FOUND"], "it ended by another verb meanwhile"


def test_pause_abort_and_an_offline_session_abort_in_slices():
    world = crowd(3 * SLICE)
    answers = world.say(Pause(mode="abort"))
    assert [type(each) for each in answers] == [Accepted] and world.engine.unfinished
    world.say(Resume())
    world.submit([5, 6], name="later", max_tokens=2)
    turns = 0
    while world.engine.unfinished:
        world.engine.advance()
        turns += 1
    assert turns == 3, "those of the running one and of three slices"
    outcome = world.answers_to(answers[0].id)[-1]
    assert outcome.state == "applied" and outcome.text.startswith(f"abort {3 * SLICE + 1} requests")
    world.run()
    assert live(world) == 0 and {each.text for each in world.events if each.request == "later"} == {
        "submit later: 2 prompt tokens queued", "later length, 2 tokens",
    }, "a request from after the pause goes on"  # fmt: skip
    world = crowd(SLICE + 5)
    world.engine.requests.abort_many([f"r{number}" for number in range(SLICE + 5)])
    assert live(world) == 6 and world.engine.unfinished
    world.engine.advance()
    assert live(world) == 1 and not world.engine.unfinished


def test_two_verbs_on_many_share_the_slice_of_a_turn():
    world = crowd(3 * SLICE)
    first = world.say(many(Abort, [f"r{number}" for number in range(2 * SLICE)]))[0].id
    second = world.say(many(Priority, [f"r{number}" for number in range(2 * SLICE, 3 * SLICE)], priority=-1))[0].id
    assert any(isinstance(each, Outcome) for each in world.answers_to(second)), "it fits the turn of its message"
    world.engine.advance()
    assert any(isinstance(each, Outcome) for each in world.answers_to(first)) and live(world) == 1 + SLICE


def test_a_session_ends_continuations_at_its_stop_text():
    world = CoreWorld()
    for name, n in (("r", 3), ("s", 1), ("t", 1)):
        world.submit([5, 6], name=name, n=n, seed=1, temperature=1.0, max_tokens=9)
    world.run(steps=3)
    world.engine.requests.end_samples([("r", 0), ("r", 2), ("s", 0), ("s", 0), ("t", 1), ("gone", 0)])
    assert sorted(request.id for request in world.engine.requests.live()) == ["r.1", "t"]
    world.run()
    world.check()
    ends = {name: world.engine.outputs.get(name).samples for name in "rst"}
    assert [sample.finish_reason for sample in ends["r"]] == ["stop", "length", "stop"]
    assert [ends[name][0].finish_reason for name in "st"] == ["stop", "length"]
    assert len(ends["r"][0].tokens) < 9 > len(ends["s"][0].tokens)
    reasons = {info.id: info.reason for info in world.engine.requests.finished().requests}
    assert reasons == {"r": "stop", "r.1": "length", "r.2": "stop", "s": "stop", "t": "length"}


def test_an_end_for_another_request_of_the_name_is_left_out():
    world = CoreWorld()
    for name in ("r", "s"):
        world.submit([5, 6], name=name, max_tokens=9)
    world.run(steps=2)
    numbers = [world.engine.outputs.get(name).number for name in ("r", "s")]
    world.engine.requests.end_samples([("r", 0), ("s", 0)], [numbers[0], numbers[1] + 1, 7])
    assert [request.id for request in world.engine.requests.live()] == ["s"]


def test_a_stop_text_ends_requests_in_every_state():
    world = CoreWorld()
    for name in ("queued", "out", "ending"):
        world.submit([5, 6], name=name, max_tokens=9)
    world.run(steps=2)
    world.say(SwapOut(request="out"))
    world.run(steps=1)
    world.say(Abort(request="ending"))
    world.engine.requests.end_samples([("queued", 0), ("out", 0), ("ending", 0)])
    world.run()
    world.check()
    reasons = {info.id: info.reason for info in world.engine.requests.finished().requests}
    assert reasons == {"queued": "stop", "out": "stop", "ending": "abort"}
    assert not world.scheduler.queues.requests


def test_a_session_aborts_a_message_whose_answer_it_did_not_wait_for():
    world = CoreWorld()
    one = Submit(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    for session, nonce in (("s", 4), ("s", 5), ("t", 4)):
        world.engine.offline.add_many(b"llm", AddMany(nonce=nonce, session=session, submissions=[one] * 2))
    world.run(steps=3)
    added = [answer.requests for _, answer in world.answers if isinstance(answer, Added)]
    world.engine.offline.abort(AbortMany(session="s", requests=[], messages=[4, 6]))
    world.run()
    ends = [[world.engine.outputs.get(name).samples[0].finish_reason for name in names] for names in added]
    assert ends == [["abort"] * 2, ["length"] * 2, ["length"] * 2]


def test_a_session_aborts_one_continuation_alone():
    world = CoreWorld()
    world.ready()
    world.submit([5, 6], name="r", n=3, seed=1, temperature=1.0, max_tokens=9)
    world.engine.requests.abort_many(["r.1", "r.7"])
    assert sorted(request.id for request in world.engine.requests.live()) == ["r", "r.2"]
    world.run()
    reasons = [sample.finish_reason for sample in world.engine.outputs.get("r").samples]
    assert reasons == ["length", "abort", "length"]
