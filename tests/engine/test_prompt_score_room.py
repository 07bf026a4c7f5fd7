"""Log-probabilities of prompts in the core: bounded over all requests, and gone once their reader has them."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import CoreWorld
from ppengine.core import prompt_score_room
from ppengine.core.outputs import OutputHub
from ppengine.protocol.control import Refused
from ppengine.protocol.offline import AbortMany, Added, AddMany, Follow, News
from ppengine.protocol.prompt_scores import PromptLogprob, PromptScores
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit
from pushed_tokens import push

SCORES = [PromptLogprob(-1.0, 1), PromptLogprob(-2.0, 2)]


def test_open_requests_have_a_bound_and_others_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_score_room, "HELD_MOST", 12)
    world, nonces = CoreWorld(), iter(range(1, 99))

    def add(*names: str, best: int | None = 1, token: int = 3, check: bool = False) -> Added:
        sampling = SamplingParams(n=2, max_tokens=2, ignore_eos=True, prompt_logprobs=best)
        several = [Submit(prompt_token_ids=[1, 2, token], sampling=sampling, request=name) for name in names]
        message = AddMany(nonce=next(nonces), session="s", submissions=several, first=5, check=check)
        world.engine.offline.add_many(b"h", message)
        answer = world.answers[-1][1]
        assert isinstance(answer, Added)
        return answer

    assert add("a", "b").requests == ["a", "b"]
    refused = add("c")
    assert refused.again_s and not refused.requests and "at most" in refused.error
    assert add("d", best=None).requests == ["d"], "one that wants none"
    world.run()
    assert add("c").again_s, "their reader may still want them"
    world.engine.outputs.forget(["a"])
    assert add("c", "e", "f", check=True) == Added(nonce=5, requests=[]), "they may begin one after another"
    assert "prompt 5: token id 999 is not in the vocabulary" in add("c", token=999, check=True).error
    assert add("c").requests == ["c"], "a check queues none"


def test_an_abort_gives_their_room_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call of a program follows an interrupted one: it reads nothing of that before its own requests."""
    monkeypatch.setattr(prompt_score_room, "HELD_MOST", 12)
    world = CoreWorld()
    one = Submit(
        prompt_token_ids=[1, 2, 3], sampling=SamplingParams(n=2, max_tokens=9, ignore_eos=True, prompt_logprobs=1)
    )

    def add(nonce: int) -> list[str]:
        world.engine.offline.add_many(b"h", AddMany(nonce=nonce, session="s", submissions=[one] * 2))
        answer = world.answers[-1][1]
        assert isinstance(answer, Added)
        return answer.requests

    first = add(1)
    assert first and not add(2)
    world.engine.offline.abort(AbortMany(session="s", requests=first))
    assert add(3)
    world.engine.offline.abort(AbortMany(session="s", requests=[], messages=[3]))
    assert add(4)
    world.run()
    world.engine.outputs.forget([output.request for output in world.engine.outputs])
    assert world.engine.outputs.scores.held == 0


@pytest.mark.parametrize("lost", [False, True])
def test_they_are_dropped_once_a_later_question_confirms_them(lost: bool) -> None:
    answers: list[Any] = []
    hub = OutputHub(lambda client, answer: answers.append(answer), lambda: 0.0, lambda: "")
    output = hub.open("r", "s", [1, 2, 3], SamplingParams(prompt_logprobs=0, detokenize=False), 0)
    assert hub.scores.held == 3

    def ask(nonce: int, since: int) -> list[News]:
        before = len(answers)
        hub.follow(b"h", Follow(nonce=nonce, session="s", since=since, wait_ms=0, answers=9))
        return answers[before:]

    hub.score(PromptScores("r", 1, SCORES))
    push(hub, "r", 0, 7)
    (news,) = ask(1, -1)
    assert news.pieces[0].prompt_logprobs == [None, *SCORES] and hub.scores.held == 3
    if lost:
        (again,) = ask(2, -1)
        assert again.pieces[0].prompt_logprobs == [None, *SCORES] and hub.scores.held == 3
    ask(3 if lost else 1, news.cursor)
    assert not output.prompt_logprobs and hub.scores.held == 0
    hub.finish("r", 0, "length")
    hub.forget(["r"])
    assert hub.scores.held == 0 and "r" not in hub


def test_a_console_has_no_place_for_them() -> None:
    world = CoreWorld()
    (answer,) = world.submit(prompt_logprobs=1)
    assert isinstance(answer, Refused) and answer.code == "INVALID" and "prompt_logprobs" in answer.text
