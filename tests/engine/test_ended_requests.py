"""Memory of requests that have ended: their tokens are compact, bounded in number, and read as before."""

from __future__ import annotations

import sys

import msgspec
import pytest
from core_world import CoreWorld
from kept_objects import lists_of
from ppengine.core import outputs as hub_module
from ppengine.core.output_state import LOGPROB_TOKENS
from ppengine.core.outputs import OutputHub
from ppengine.protocol.control import Fetch, Fetched, Inspect, Inspected
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.offline import AddMany, Follow, News
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit
from pushed_tokens import push
from test_core_successor import follow

PROMPT = [(7 * place) % 90 + 3 for place in range(300)]
ANSWER = [5] * 100
"""The token that the stages of a `CoreWorld` sample."""
SAMPLING = SamplingParams(max_tokens=len(ANSWER), temperature=0.0, ignore_eos=True)


def world() -> CoreWorld:
    return CoreWorld(max_model_len=500, utilization=0.9)


def lists(core: CoreWorld, tokens: list[int]) -> int:
    """Return how many lists of these tokens the core keeps."""
    core.engine.commit()
    return lists_of(tokens, core.engine, core, core.answers, core.steps)


def detail(core: CoreWorld) -> RequestDetail:
    answer = core.engine.details.answer(Inspect(nonce=1, what="request", request="a"))
    assert isinstance(answer, Inspected)
    return msgspec.msgpack.decode(answer.data, type=RequestDetail)


def fetched(core: CoreWorld) -> Fetched:
    core.engine.outputs.fetch(b"c", Fetch(nonce=1, request="a", wait_ms=0))
    answer = core.answers[-1][1]
    assert isinstance(answer, Fetched)
    return answer


def news(core: CoreWorld) -> News:
    core.engine.outputs.follow(b"c", Follow(nonce=2, session="s", since=-1, wait_ms=0, finished_only=True))
    answer = core.answers[-1][1]
    assert isinstance(answer, News)
    return answer


def test_an_ended_request_leaves_no_list_of_tokens_and_is_read_as_before() -> None:
    core = world()
    core.say(Submit(prompt_token_ids=list(PROMPT), request="a", sampling=SAMPLING))
    core.run(steps=50)
    assert lists(core, ANSWER[:10]), "the scheduler has its outputs while it lives"
    assert detail(core).prompt_token_ids == PROMPT
    core.run()
    [submission] = core.engine.operations.infos()
    assert (submission.verb, submission.by, submission.state) == ("submit a", "eve", "applied"), "it just ended"
    assert submission.progress == f"{len(PROMPT)} prompt tokens queued"
    for after in (core, follow(core, max_model_len=500)):
        assert not lists(after, PROMPT) and not lists(after, ANSWER[:10])
        output = after.engine.outputs.get("a")
        assert output is not None
        sizes = sys.getsizeof(output.prompt_ids) + sys.getsizeof(output.samples[0].tokens)
        assert sizes < 6 * len(PROMPT + ANSWER), "four bytes a token, and some room"
        assert (fetched(after).token_ids, fetched(after).prompt_tokens) == (ANSWER, len(PROMPT))
        assert (detail(after).prompt_token_ids, detail(after).output_token_ids) == (PROMPT, ANSWER)


def test_prompts_of_a_session_leave_no_list_of_tokens_and_are_followed_as_before() -> None:
    core = world()
    prompt = Submit(prompt_token_ids=list(PROMPT), request="a", sampling=SAMPLING)
    core.engine.offline.add_many(b"o", AddMany(nonce=1, session="s", submissions=[prompt]))
    del prompt
    core.run()
    assert not lists(core, PROMPT) and not lists(core, ANSWER[:10])
    [piece] = news(core).pieces
    assert (piece.token_ids, piece.finish_reason) == (ANSWER, "length")


class Hub:
    """Outputs with a clock of the test."""

    def __init__(self) -> None:
        self.now, self.dropped = 1000.0, list[str]()
        self.hub = OutputHub(lambda _client, _answer: None, lambda: self.now, lambda: "", self.dropped.extend)

    def run(self, name: str, prompt: int, *, tokens: int = 1, top: int | None = None, read: bool = True) -> None:
        self.hub.open(name, "", [1] * prompt, SamplingParams(logprobs=top), 0)
        for token in range(tokens):
            push(self.hub, name, 0, token, -1.0, [(one, -2.0) for one in range(top or 0)])
        self.hub.finish(name, 0, "length")
        if read:
            self.hub.fetch(b"c", Fetch(nonce=1, request=name, wait_ms=0))


def test_tokens_of_ended_outputs_are_bounded_and_the_oldest_read_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEEP_TOKENS", 1000)
    desk = Hub()
    desk.run("unread", 99, read=False)
    desk.run("large", 599)
    desk.run("small", 99)
    desk.run("next", 199)
    assert desk.dropped == [], "1,000 tokens may stay"
    desk.run("one more", 9)
    assert desk.dropped == [], "an answer may have been lost on its way"
    desk.now += hub_module.KEEP_READ_S
    desk.run("last", 9)
    assert desk.dropped == ["large"] and "unread" in desk.hub
    desk.run("much", 979)
    assert desk.dropped == ["large", "small", "next", "one more"], "newer answers stay a while, also large ones"


@pytest.mark.parametrize(("finished", "tokens"), [(4, 10**9), (10**9, 4 * 11)])
def test_outputs_that_nothing_reads_are_bounded(monkeypatch: pytest.MonkeyPatch, finished: int, tokens: int) -> None:
    """Scripts submit for days and read nothing. An output of a session is read, however late."""
    monkeypatch.setattr(hub_module, "KEEP_FINISHED", finished)
    monkeypatch.setattr(hub_module, "KEEP_TOKENS", tokens)
    desk = Hub()
    desk.hub.open("of a session", "s", [1] * 10, SamplingParams(), 0)
    desk.hub.finish("of a session", 0, "length")
    desk.hub.open("lives", "", [1] * 10, SamplingParams(), 0)
    for number in range(50):
        desk.run(f"r{number}", 10, read=False)
    kept = [output.request for output in desk.hub]
    assert kept == ["of a session", "lives", *(f"r{number}" for number in range(50 - len(kept) + 2, 50))]
    assert 4 < len(kept) <= 10 and len(desk.dropped) == 52 - len(kept)


def test_forgotten_outputs_and_those_of_the_core_before_count_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEEP_TOKENS", 1000)
    desk = Hub()
    desk.run("a", 899)
    desk.now += hub_module.KEEP_READ_S
    desk.run("b", 899)
    assert desk.dropped == ["a"]
    desk.now += hub_module.KEEP_READ_S
    desk.hub.forget(["b"])
    desk.run("c", 899)
    assert desk.dropped == ["a", "b"] and "c" in desk.hub


def test_log_probabilities_count_as_the_tokens_whose_memory_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "KEEP_TOKENS", 10 * 3 * LOGPROB_TOKENS)
    desk = Hub()
    desk.run("scored", 1, tokens=10, top=2)
    desk.now += hub_module.KEEP_READ_S
    desk.run("plain", 1)
    assert desk.dropped == ["scored"]
