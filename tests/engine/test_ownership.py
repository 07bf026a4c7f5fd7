"""Requests belong to the key that submitted them: another key needs an override, and an admin needs none."""

import msgspec
import pytest
from core_world import CoreWorld
from ppengine.core.journal_records import DECODER, ENCODER
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Abort, Many, Pause, Preempt, Priority, Release, Submit, SwapIn, SwapOut
from test_core_successor import follow

ALICE = {"principal": "alice", "role": "operator"}
BOB = {"principal": "bob", "role": "operator"}
BOSS = {"principal": "boss", "role": "admin"}
OVERRIDE = {"override": True, "reason": "it is mine now"}
VERBS = [
    Abort(request="r"), Preempt(request="r"), SwapOut(request="r"), SwapIn(request="r"), Release(request="r"),
    Priority(request="r", priority=3), Many(verbs=[Abort(request="r")]), Pause(mode="abort"),
]  # fmt: skip


def submit(world, name, who, **sampling):
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40, **sampling)
    return world.say(Submit(prompt_token_ids=[1, 2, 3], request=name, sampling=params), **who)


@pytest.fixture
def world():
    """A core with the request `r` of alice, which runs."""
    made = CoreWorld(preemption="swap")
    submit(made, "r", ALICE)
    made.run(steps=3)
    return made


def denied(answers):
    """Return whether nothing was done, because of the owner."""
    answer = answers[-1]
    if isinstance(answer, Refused):
        return answer.code == "DENIED" and "alice" in answer.text
    conflicts = getattr(answer, "conflicts", [])
    return [each.code for each in conflicts] == ["DENIED"] and "key alice" in conflicts[0].text


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: type(verb).__name__)
def test_another_operator_needs_an_override(world, verb):
    before = world.engine.requests.live()[0].revision
    assert denied(world.say(verb, dry_run=True, **BOB)) and denied(world.say(verb, **BOB))
    request = world.engine.requests.live()[0]
    assert (request.revision, request.state) == (before, "running") and not world.scheduler.paused
    assert not denied(world.say(verb, **BOB, **OVERRIDE))


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: type(verb).__name__)
@pytest.mark.parametrize("who", [ALICE, BOSS], ids=["owner", "admin"])
def test_the_owner_and_an_admin_need_none(world, verb, who):
    assert not denied(world.say(verb, **who))


def test_a_plan_names_the_owners(world):
    submit(world, "b", BOB, n=2)
    submit(world, "c", BOB)
    own = world.say(Abort(request="r"), dry_run=True, **ALICE)[0]
    assert (own.owners, own.override) == ({}, False)
    one = world.say(Abort(request="r"), dry_run=True, **BOB, **OVERRIDE)[0]
    assert (one.owners, one.override) == ({"alice": 1}, True)
    assert one.plan[-1] == "1 request is of other keys: alice 1"
    every = [Abort(request=name) for name in "rbc"]
    plan = world.say(Many(verbs=every), dry_run=True, **BOSS)[0]
    assert (plan.owners, plan.override) == ({"bob": 2, "alice": 1}, False), "samples of one prompt count once"
    assert set(plan.plan[-1].removeprefix("3 requests are of other keys: ").split(", ")) == {"bob 2", "alice 1"}
    plan = world.say(Pause(mode="abort"), dry_run=True, **BOB, **OVERRIDE)[0]
    assert (plan.owners, plan.override) == ({"alice": 1}, True)
    assert world.say(Pause(mode="wait"), dry_run=True, **BOB)[0].owners == {}


def test_of_many_the_own_ones_are_done_and_the_others_are_conflicts(world):
    submit(world, "b", BOB)
    answers = world.say(Many(verbs=[Abort(request="r"), Abort(request="b")]), **BOB)
    world.run()
    end = world.last(answers[0].id)
    assert isinstance(end, Outcome) and end.state == "applied" and end.figures == {"applied": 1, "conflicts": 1}
    assert [(each.request, each.code) for each in end.conflicts] == [("r", "DENIED")]
    assert "belongs to key alice; acting on it needs --override --reason TEXT, or an admin" in end.conflicts[0].text


def test_an_owner_survives_the_core(world):
    after = follow(world)
    assert denied(after.say(Abort(request="r"), **BOB)) and not denied(after.say(Abort(request="r"), **ALICE))


def test_a_request_by_the_private_socket_is_of_the_engines_own_user(world):
    world.submit(name="offline", max_tokens=20)
    assert {row.id: row.principal for row in world.engine.reporter.build().requests} == {
        "r": "alice",
        "offline": "owner",
    }
    assert "key owner" in world.say(Abort(request="offline"), **BOB)[0].text
    local = {"principal": "owner", "role": "operator"}
    assert not isinstance(world.say(Abort(request="offline"), **local)[0], Refused)


def test_a_record_of_a_request_without_an_owner_is_of_the_engines_own_user(world):
    world.engine.commit()
    record = next(one for one in world.journal.records if getattr(one, "name", "") == "r")
    fields = msgspec.msgpack.decode(ENCODER.encode(record))
    owner = 1 + type(record).__struct_fields__.index("principal")  # the tag is the first
    assert fields[owner] == "alice"
    (known,) = DECODER.decode(msgspec.msgpack.encode([fields[:owner]]))
    assert known.principal == "owner"
