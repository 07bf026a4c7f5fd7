"""Rules of API keys in the core: open requests, requests a minute, drains, kicks, and another core after this one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from core_world import CoreWorld
from ppengine.core import client_rules
from ppengine.http.api_errors import ApiError
from ppengine.http.client_limits import ClientLimits
from ppengine.http.client_stats import ClientStats
from ppengine.protocol.clients import ClientRule
from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import DrainClient, Kick, Limit, Submit


class World(CoreWorld):
    """A core with HTTP sessions."""

    nonce = 0

    def add(self, client: str, *names: str, n: int = 1) -> Added:
        """Submit requests of an API key; return the answer."""
        self.nonce += 1
        sampling = SamplingParams(n=n, max_tokens=30, temperature=0.0, ignore_eos=True)
        prompts = [Submit(prompt_token_ids=[1, 2], sampling=sampling, request=name) for name in names]
        message = AddMany(nonce=self.nonce, session="http0", submissions=prompts, owner="user", client=client)
        self.engine.offline.add_many(b"h", message)
        answer = self.answers[-1][1]
        assert isinstance(answer, Added)
        return answer

    def done(self, verb: Any, **fields: Any) -> Outcome:
        """Carry out a verb; return its outcome."""
        outcome = self.say(verb, role="admin", **fields)[-1]
        assert isinstance(outcome, Outcome), outcome
        return outcome

    def live(self) -> list[str]:
        return [request.id for request in self.engine.requests.live()]


def test_open_requests_are_limited_over_all_sessions() -> None:
    world = World()
    early = world.done(Limit(client="ann", limit="4")).text
    assert early == "client ann may have 4 open requests; it has 0; no request of ann has come since this core began"
    assert not world.add("ann", "a").error
    assert world.done(Limit(client="ann", limit="3")).text == "client ann may have 3 open requests; it has 1"
    assert not world.add("ann", "b", n=4).error, "samples of a prompt are one request"
    answer = world.add("ann", "c", "d")
    text = "client ann has 2 open requests; 2 more are above its limit of 3"
    assert (answer.requests, answer.error, answer.again_s, answer.later) == ([], text, 1, False)
    assert world.live() == ["a", "b", "b.1", "b.2", "b.3"]
    assert not world.add("bob", "e", "f", "g", "h").error
    assert not world.add("ann", "c").error
    world.run()
    assert not world.add("ann", "i", "j", "k").error, "those that have ended do not count"
    assert world.done(Limit(client="ann", limit="1")).text == "client ann may have 1 open request; it has 3"
    world.done(Limit(client="ann", limit="off"))
    assert not world.add("ann", "l").error
    assert world.engine.rules.rules() == []


def test_requests_a_minute_say_when_there_is_room() -> None:
    world = World()
    world.done(Limit(client="ann", limit="3/min"))
    assert not world.add("ann", "a").error
    world.now += 20
    assert not world.add("ann", "b", "c").error
    world.now += 10
    answer = world.add("ann", "d")
    assert answer.error == "client ann began 3 requests in the last minute; one more is above its limit of 3"
    assert answer.again_s == 30, "then the first of them is a minute old"
    assert world.add("ann", "d", "e").again_s == 50
    world.now += 30
    assert not world.add("ann", "d").error
    assert world.add("ann", "e").again_s == 20
    world.done(Limit(client="ann", limit="2"))
    assert [rule.text for rule in world.engine.rules.rules()] == ["2 3/min"]


def test_a_drain_ends_with_the_last_request_and_refuses_until_it_is_lifted() -> None:
    world = World()
    world.add("ann", "a", "b")
    answers = world.say(DrainClient(client="ann"))
    assert [type(each) for each in answers] == [Accepted, Deferred]
    assert answers[1].text == "waits for 2 requests of client ann"
    refused = world.add("ann", "c")
    assert (refused.later, refused.again_s) == (True, 0)
    assert refused.error == "client ann is drained and gets no new requests"
    assert not world.add("bob", "d").error
    name = answers[0].id
    world.run()
    assert world.last(name).text == "drained: client ann has no request left"
    assert world.add("ann", "e").error
    assert world.done(Limit(client="ann", limit="off")).text == "end the limits of client ann: drain"
    assert not world.add("ann", "f").error


def test_the_answer_about_an_unknown_client_says_so_and_names_the_one_that_is_meant() -> None:
    world = World()
    world.add("alice", "a")
    world.run()
    said = "no request of alcie has come since this core began; did you mean alice?"
    assert world.done(DrainClient(client="alcie"), dry_run=True).plan == [
        "refuse new requests of client alcie, finish 0", said, "limit alcie off ends that",
    ]  # fmt: skip
    assert world.done(DrainClient(client="alcie")).text == f"drained: client alcie has no request left; {said}"
    assert said in world.done(Limit(client="alcie", limit="3")).text
    assert "no request" not in world.done(Limit(client="alice", limit="3")).text
    assert "mean" not in world.done(Limit(client="bob", limit="3")).text
    assert world.done(Limit(client="bob", limit="off")).text == "end the limits of client bob: 3"
    for verb, text in (
        (Kick(client="alic"), "client alic has no open request; did you mean alice?"),
        (Limit(client="alic", limit="off"), "client alic has no limit; did you mean alice?"),
    ):
        (answer,) = world.say(verb)
        assert isinstance(answer, Refused) and answer.text == text


def test_lifting_a_drain_supersedes_it() -> None:
    world = World()
    world.add("ann", "a")
    first, second = (world.say(DrainClient(client="ann"))[0].id for _ in range(2))
    world.done(Limit(client="ann", limit="off"))
    assert [world.last(each).state for each in (first, second)] == ["superseded", "superseded"]
    assert world.live() == ["a"]


def test_a_kick_aborts_the_requests_of_one_key() -> None:
    world = World()
    world.add("ann", "a", "b", n=2)
    world.add("bob", "c")
    world.run(steps=2)
    plan = world.done(Kick(client="ann"), dry_run=True)
    assert plan.plan == ["abort 2 requests of client ann and close its streams"]
    assert len(world.live()) == 5
    name = world.say(Kick(client="ann"))[0].id
    world.run(steps=3)
    assert world.last(name).text == "2 requests of client ann aborted"
    assert world.live() == ["c"]
    assert [(rule.client, rule.text) for rule in world.engine.rules.rules()] == [("ann", "")]
    assert not world.add("ann", "d").error
    world.done(Kick(client="bob"))
    ann, bob = world.engine.rules.rules()
    assert (ann.client, bob.client) == ("ann", "bob") and 0 < ann.kick < bob.kick


def test_a_kick_leaves_nothing_behind() -> None:
    world = World()
    world.done(Limit(client="bob", limit="5"))
    world.add("ann", "a")
    for client in ("ann", "bob"):
        world.say(Kick(client=client))
    world.run()
    assert [rule.kick > 0 for rule in world.engine.rules.rules()] == [True, True], "HTTP processes ask for them"
    world.now += client_rules.KICK_S
    world.run()
    assert world.engine.rules.rules() == [ClientRule(client="bob", most_open=5)]
    world.done(Limit(client="bob", limit="off"))
    assert world.engine.rules.rules() == []
    (answer,) = world.say(Kick(client="ann"))
    assert isinstance(answer, Refused) and answer.text == "client ann has no open request"


def test_a_kick_of_another_keys_requests_needs_an_override() -> None:
    world = World()
    world.add("ann", "a")
    (answer,) = world.say(Kick(client="ann"), principal="eve", role="operator")
    assert isinstance(answer, Refused) and answer.code == "DENIED"
    assert world.done(Kick(client="ann"), principal="eve", override=True, reason="r").state == "applied"


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        (Kick(client="ann"), "client ann has no open request"),
        (Limit(client="ann", limit="off"), "client ann has no limit"),
    ],
)
def test_a_client_without_any_is_not_found(verb: Any, text: str) -> None:
    (answer,) = World().say(verb)
    assert isinstance(answer, Refused) and (answer.code, answer.text) == ("NOT_FOUND", text)


def test_rules_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_rules, "RULES_MOST", 2)
    world = World()
    for name in ("a", "b", "a"):
        world.done(Limit(client=name, limit="5"))
    (answer,) = world.say(Limit(client="c", limit="5"))
    assert isinstance(answer, Refused) and answer.code == "BUSY"


@pytest.mark.parametrize("limit", ["0", "-1", "1.5", "8/s", "", "OFF", "1000000", "8 "])
def test_a_limit_of_another_form_is_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=r"limit is .*; it must be N, N/min or off, N from 1 to 999999"):
        Limit(client="ann", limit=limit)


@pytest.mark.parametrize("client", ["", "a b", "a\n", "x" * 65])
def test_a_name_that_no_key_has_is_refused(client: str) -> None:
    with pytest.raises(ValueError, match="it must be the name of an API key, 1 to 64 printable characters"):
        Kick(client=client)


def test_another_core_goes_on_with_rules_and_clients() -> None:
    world = World()
    world.add("ann", "a")
    world.done(Limit(client="ann", limit="1"))
    world.done(DrainClient(client="bob"))
    world.add("eve", "b")
    world.done(Kick(client="eve"))
    world.engine.commit()
    later = World(before=world, serve=False)
    later.nonce, later._count = world.nonce, world._count
    later.drained(0, 1)
    later.ready()
    later.run(steps=2)
    assert later.engine.rules.rules() == world.engine.rules.rules()
    assert later.live() == ["a"]
    assert later.add("ann", "c").error and later.add("bob", "d").error
    later.done(Kick(client="ann"))
    kicks = {rule.client: rule.kick for rule in later.engine.rules.rules()}
    assert kicks["ann"] > kicks["eve"] > kicks["bob"] == 0, "an HTTP process carries out the greater ones alone"
    later.now += client_rules.KICK_S
    later.run(steps=1)
    assert {rule.client: rule.kick for rule in later.engine.rules.rules()} == {"ann": 0, "bob": 0}


def test_an_http_process_refuses_the_drained_and_cuts_the_streams_of_the_kicked() -> None:
    class Loop:
        """Time that the test moves."""

        def call_later(self, after: float, work: Any, *given: Any) -> None:
            self.work = after, lambda: work(*given)

    loop, stats, closed = Loop(), ClientStats(), []
    limits = ClientLimits(stats)
    calls = [
        stats.begin("ann", "/v1/completions"),
        stats.begin("ann", "/tokenize"),
        stats.begin("bob", "/v1/completions"),
    ]
    for name, call in zip("abc", calls, strict=True):
        call.on_close = lambda name=name: closed.append(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: loop)
        limits.take([ClientRule(client="ann", kick=4)])
        assert not hasattr(loop, "work"), "a kick before the start of this process"
        limits.take([ClientRule(client="ann", kick=5), ClientRule(client="bob", draining=True)])
        limits.take([ClientRule(client="ann", kick=5), ClientRule(client="bob", draining=True)])
    late = stats.begin("ann", "/v1/completions")
    late.on_close = lambda: closed.append("late")
    calls[1].end(200)
    after, work = loop.work
    work()
    assert (after, closed) == (1.0, ["a"]), "neither ended ones, nor those that came after the kick"
    limits.check("ann")
    with pytest.raises(ApiError) as caught:
        limits.check("bob")
    assert (caught.value.status, str(caught.value)) == (503, "client bob is drained and gets no new requests")
