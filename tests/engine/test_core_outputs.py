"""Outputs: kept until fetched, and resumed by offset."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from ppengine.core import outputs as hub_module
from ppengine.core.journal_records import Entered, SampleState
from ppengine.core.output_state import compact
from ppengine.core.outputs import OutputHub
from ppengine.protocol.control import Failed, Fetch, Fetched
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.offline import Follow, News
from ppengine.protocol.sampling import SamplingParams
from pushed_tokens import push


class Desk:
    def __init__(self) -> None:
        self.answers: list[msgspec.Struct] = []
        self.failure = ""
        self.hub = OutputHub(
            lambda _client, answer: self.answers.append(answer),
            time.monotonic,
            lambda: self.failure,
        )

    def open(self, session: str = "", **sampling: object) -> None:
        self.hub.open("r-1", session, [1, 2, 3], SamplingParams(**sampling), 0)  # type: ignore[arg-type]

    def say(self, text: str, index: int = 0) -> None:
        for letter in text:
            push(self.hub, "r-1", index, ord(letter))

    def fetch(self, **fields: object) -> Fetched:
        self.hub.fetch(b"c", Fetch(nonce=1, request="r-1", wait_ms=0, **fields))  # type: ignore[arg-type]
        answer = self.answers.pop()
        assert isinstance(answer, Fetched)
        return answer


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_stream_resumes_by_offset(desk: Desk) -> None:
    desk.open()
    desk.say("hello")
    first = desk.fetch()
    assert first.token_ids == [ord(letter) for letter in "hello"]
    desk.say(" you")
    second = desk.fetch(offset=5)
    assert (second.offset, len(second.token_ids), second.finished) == (5, 4, False)
    desk.hub.finish("r-1", 0, "length")
    last = desk.fetch(offset=9)
    assert (last.token_ids, last.finished, last.finish_reason) == ([], True, "length")
    assert len(desk.fetch().token_ids) == 9, "still there for another reader"


def test_a_waiting_fetch_is_answered_when_there_is_more(desk: Desk) -> None:
    desk.open()
    desk.hub.fetch(b"c", Fetch(nonce=7, request="r-1", wait_ms=60_000))
    desk.hub.serve_waiters()
    assert desk.answers == []
    desk.say("x")
    desk.hub.serve_waiters()
    answer = desk.answers.pop()
    assert isinstance(answer, Fetched)
    assert (answer.nonce, answer.token_ids) == (7, [ord("x")])
    assert desk.hub.next_deadline() is None


def test_an_unknown_request_or_sample_is_an_answer(desk: Desk) -> None:
    desk.hub.fetch(b"c", Fetch(nonce=1, request="r-9"))
    desk.open()
    desk.hub.fetch(b"c", Fetch(nonce=2, request="r-1", sample=1))
    texts = [answer.text for answer in desk.answers if isinstance(answer, Failed)]
    assert texts == ["no request r-9", "no sample 1 of r-1 (it has 1)"]


def followed(desk: Desk, **fields: object) -> None:
    question = Follow(nonce=1, session="s", since=-1, wait_ms=60_000, **fields)  # type: ignore[arg-type]
    desk.hub.follow(b"c", question)


def test_a_session_may_wait_for_the_ends_of_requests_alone(desk: Desk) -> None:
    desk.open(session="s", n=2)
    followed(desk, finished_only=True)
    desk.say("ab", 0)
    desk.hub.finish("r-1", 0, "stop")
    desk.hub.serve_waiters()
    assert desk.answers == []
    desk.say("c", 1)
    desk.hub.finish("r-1", 1, "length")
    desk.hub.serve_waiters()
    answer = desk.answers.pop()
    assert isinstance(answer, News)
    assert [(piece.token_ids, piece.finish_reason) for piece in answer.all_pieces()] == [
        ([ord("a"), ord("b")], "stop"), ([ord("c")], "length")
    ]  # fmt: skip
    desk.hub.forget(["r-1"])
    assert "r-1" not in desk.hub


@pytest.mark.parametrize("finished_only", [False, True])
def test_sessions_are_told_when_nothing_more_will_come(desk: Desk, finished_only: bool) -> None:
    desk.open(session="s")
    followed(desk, finished_only=finished_only)
    desk.failure = "stage 1 is lost"
    desk.hub.serve_waiters()
    answer = desk.answers.pop()
    assert isinstance(answer, News)
    assert (answer.pieces, answer.error) == ([], "stage 1 is lost")


def test_stop_texts_without_number_or_end_are_refused() -> None:
    for stop in (["x" * 257], ["x"] * 65):
        with pytest.raises(ValueError, match="at most 64 of 256"):
            SamplingParams(stop=stop)


def test_a_token_wakes_those_alone_who_wait_for_it(desk: Desk) -> None:
    desk.open()
    desk.hub.open("r-2", "", [1], SamplingParams(), 0)
    for nonce, request in ((1, "r-1"), (2, "r-2")):
        desk.hub.fetch(b"c", Fetch(nonce=nonce, request=request, wait_ms=60_000))
    desk.say("x")
    desk.hub.serve_waiters()
    assert [answer.nonce for answer in desk.answers] == [1]  # type: ignore[attr-defined]
    assert desk.hub.next_deadline() is not None
    desk.hub.finish("r-2", 0, "abort")
    desk.hub.serve_waiters()
    assert [answer.nonce for answer in desk.answers] == [1, 2]  # type: ignore[attr-defined]
    assert desk.hub.next_deadline() is None


class Visited(dict[Any, Any]):
    """A dictionary that counts the keys which loops have met."""

    met = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.met += 1
            yield key


def test_a_turn_costs_no_look_at_each_question_that_waits(desk: Desk) -> None:
    for number in range(50):
        desk.hub.open(f"r-{number}", "", [1], SamplingParams(), 0)
        desk.hub.fetch(b"c", Fetch(nonce=number, request=f"r-{number}", wait_ms=60_000))
    desk.hub.serve_waiters()
    polls = desk.hub._polls
    waiters = polls._waiters = Visited(polls._waiters)
    for changed in ([7], [3, 9], range(10, 50)):
        for number in changed:
            push(desk.hub, f"r-{number}", 0, ord("x"))
        desk.hub.serve_waiters()
        assert sorted(answer.nonce for answer in desk.answers) == [*changed]  # type: ignore[attr-defined]
        desk.answers.clear()
    assert not waiters.met and len(waiters) == 7


def test_questions_beyond_the_most_that_may_wait_are_answered_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppengine.core.long_polls.MAX_WAITING", 2)
    desk.open()
    for nonce in range(3):
        desk.hub.fetch(b"c", Fetch(nonce=nonce, request="r-1", wait_ms=60_000))
    assert [answer.nonce for answer in desk.answers] == [2]  # type: ignore[attr-defined]


def ended(name: str) -> Entered:
    """An output of the core before this one."""
    info = FinishedInfo(
        id=name, owner="eve", wall=1.0, ended_s=0.0, took_s=1.0, prompt_tokens=1, output_tokens=0, reason="length"
    )  # fmt: skip
    return Entered(
        name=name, session="", first=0, prompt_ids=compact([1]), sampling=SamplingParams(max_tokens=1), seed=7,
        owner="eve", arrival=1.0, samples=[SampleState(finished=info)],
    )  # fmt: skip


def test_an_end_whose_answer_was_lost_is_there_a_while_also_after_a_restart_of_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "KEEP_FINISHED", 3)
    now, dropped = [1000.0], list[str]()
    hub = OutputHub(lambda _client, answer: None, lambda: now[0], lambda: "", dropped.extend)
    for number in range(3):
        hub.restore(ended(f"old-{number}"))

    def run(name: str) -> None:
        hub.open(name, "", [1], SamplingParams(max_tokens=1), 0)
        push(hub, name, 0, ord("a"))
        hub.fetch(b"c", Fetch(nonce=1, request=name, wait_ms=60_000))
        hub.finish(name, 0, "length")
        hub.fetch(b"c", Fetch(nonce=2, request=name, wait_ms=0))

    run("a")
    run("b")
    assert "a" in hub and "b" in hub and dropped == []
    now[0] += hub_module.KEEP_READ_S
    run("c")
    assert dropped == ["old-0", "old-1", "old-2"]
    assert all(name in hub for name in "abc")
