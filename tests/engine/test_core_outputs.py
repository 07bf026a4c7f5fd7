"""Outputs: kept until fetched, resumed by offset, cut at stop texts that may span tokens."""

from __future__ import annotations

import time

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


class Letters:
    """A tokenizer whose token ids are characters."""

    def stream(self, _prompt: list[int]) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(token)

    def extend(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def flush(self) -> str:
        return ""


class Desk:
    def __init__(self) -> None:
        self.answers: list[msgspec.Struct] = []
        self.failure = ""
        self.hub = OutputHub(
            Letters(),  # type: ignore[arg-type]
            lambda _client, answer: self.answers.append(answer),
            time.monotonic,
            lambda: self.failure,
        )

    def open(self, session: str = "", **sampling: object) -> None:
        self.hub.open("r-1", session, [1, 2, 3], SamplingParams(**sampling), 0)  # type: ignore[arg-type]

    def say(self, text: str, index: int = 0) -> list[bool]:
        return [self.hub.push("r-1", index, ord(letter), None, ended=False) for letter in text]

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
    assert (first.text, first.token_ids) == ("hello", [ord(letter) for letter in "hello"])
    desk.say(" you")
    second = desk.fetch(offset=5, text_offset=5)
    assert (second.text, second.offset, len(second.token_ids), second.finished) == (" you", 5, 4, False)
    desk.hub.finish("r-1", 0, "length")
    last = desk.fetch(offset=9, text_offset=9)
    assert (last.text, last.token_ids, last.finished, last.finish_reason) == ("", [], True, "length")
    assert desk.fetch().text == "hello you"  # still there for another reader


def test_a_stop_text_over_several_tokens_is_held_back_and_cut(desk: Desk) -> None:
    desk.open(stop=["END"])
    assert desk.say("an EN") == [False] * 5
    assert desk.fetch().text == "an "  # "EN" may be the beginning of the stop text
    assert desk.say("E")[-1] is False
    assert desk.fetch().text == "an EN"  # it was not, but this E may be
    assert desk.say("ND") == [False, True]
    desk.hub.finish("r-1", 0, "stop")
    assert desk.fetch().text == "an EN"


def test_the_earliest_of_several_stop_texts_wins(desk: Desk) -> None:
    desk.open(stop=["yz", "xyz"])
    assert desk.say("wxyz")[-1] is True
    desk.hub.finish("r-1", 0, "stop")
    assert desk.fetch().text == "w"


def test_no_stop_text_before_min_tokens(desk: Desk) -> None:
    desk.open(stop=["b"], min_tokens=3)
    assert desk.say("ab") == [False, False]
    assert desk.say("cb") == [False, True]


def test_what_was_held_back_is_shown_at_the_end(desk: Desk) -> None:
    desk.open(stop=["END"])
    desk.say("the E")
    desk.hub.finish("r-1", 0, "length")
    assert desk.fetch().text == "the E"


def test_a_waiting_fetch_is_answered_when_there_is_more(desk: Desk) -> None:
    desk.open()
    desk.hub.fetch(b"c", Fetch(nonce=7, request="r-1", wait_ms=60_000))
    desk.hub.serve_waiters()
    assert desk.answers == []
    desk.say("x")
    desk.hub.serve_waiters()
    answer = desk.answers.pop()
    assert isinstance(answer, Fetched)
    assert (answer.nonce, answer.text) == (7, "x")
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
    assert [(piece.token_ids, piece.finish_reason) for piece in answer.pieces] == [
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


def test_the_text_of_a_session_is_made_from_the_first_look_on(desk: Desk) -> None:
    """A console may look at a request whose program makes its text by itself."""
    desk.open(session="s")
    desk.say("hello")
    output = desk.hub.get("r-1")
    assert output is not None and output.samples[0].growing is None
    assert (desk.fetch().text, len(desk.fetch(offset=3).token_ids)) == ("hello", 2)
    desk.say(" you")
    assert desk.fetch(text_offset=5).text == " you"
    desk.hub.push("r-1", 0, ord("!"), None, ended=True)
    desk.hub.finish("r-1", 0, "stop")
    assert (desk.fetch().text, desk.fetch().finish_reason) == ("hello you", "stop")


def test_a_session_that_has_ended_before_the_first_look_has_its_text_then(desk: Desk) -> None:
    desk.open(session="s", detokenize=False)
    desk.say("hello")
    desk.hub.finish("r-1", 0, "length")
    output = desk.hub.read("r-1")
    assert output is not None and output.samples[0].text == "hello"
    assert (desk.fetch().text, desk.fetch().finish_reason) == ("hello", "length")


def test_a_stop_text_that_begins_before_min_tokens_is_not_shown_and_then_cut(desk: Desk) -> None:
    desk.open(stop=["abc"], min_tokens=3)
    desk.say("ab")
    assert desk.fetch().text == ""
    assert desk.say("c") == [True]
    desk.hub.finish("r-1", 0, "stop")
    assert desk.fetch().text == ""


def test_a_short_stop_text_before_min_tokens_stays_ignored_beside_a_long_one(desk: Desk) -> None:
    desk.open(stop=["b", "a long one"], min_tokens=3)
    assert desk.say("abcd") == [False] * 4
    assert desk.say("b") == [True]
    desk.hub.finish("r-1", 0, "stop")
    assert desk.fetch().text == "abcd"


def test_a_stop_text_in_the_last_token_is_the_reason(desk: Desk) -> None:
    desk.open(stop=["c"])
    assert desk.say("abc")[-1] is True
    desk.hub.finish("r-1", 0, "length")
    assert (desk.fetch().text, desk.fetch().finish_reason) == ("ab", "stop")


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


def test_questions_beyond_the_most_that_may_wait_are_answered_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppengine.core.outputs.MAX_WAITING", 2)
    desk.open()
    for nonce in range(3):
        desk.hub.fetch(b"c", Fetch(nonce=nonce, request="r-1", wait_ms=60_000))
    assert [answer.nonce for answer in desk.answers] == [2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sampling", [{}, {"stop": ["lo", "zz"]}, {"stop": ["ll"], "min_tokens": 9}, {"n": 2}])
@pytest.mark.parametrize("ending", [None, "length", "stop"])
def test_a_restored_output_reads_as_it_did(desk: Desk, sampling: dict[str, object], ending: str | None) -> None:
    """A live request, and one that ended by its length, a stop text or a stop token."""
    desk.open(**sampling)
    for letter in "hello world":
        if desk.say(letter)[0]:
            desk.hub.finish("r-1", 0, "stop")
            break
    else:
        if ending == "stop":
            desk.hub.push("r-1", 0, ord("!"), None, ended=True)
        if ending is not None:
            desk.hub.finish("r-1", 0, ending)
    before = desk.fetch()
    params, fresh = SamplingParams(**sampling), Desk()  # type: ignore[arg-type]
    info = FinishedInfo(
        id="r-1", owner="", wall=0.0, ended_s=0.0, took_s=1.0, prompt_tokens=3, output_tokens=1,
        reason=before.finish_reason or "",
    )  # fmt: skip
    samples = [SampleState(tokens=compact(before.token_ids), finished=info if before.finished else None)]
    samples += [SampleState() for _ in range(params.n - 1)]
    fresh.hub.restore(
        Entered(
            name="r-1", session="", first=0, prompt_ids=compact([1, 2, 3]), sampling=params, seed=1, owner="",
            arrival=0.0, samples=samples,
        )
    )  # fmt: skip
    assert fresh.fetch() == before
    if not before.finished:
        assert fresh.say(" lo") == desk.say(" lo")
        assert fresh.fetch() == desk.fetch()


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
    hub = OutputHub(None, lambda _client, answer: None, lambda: now[0], lambda: "", dropped.extend)
    for number in range(3):
        hub.restore(ended(f"old-{number}"))

    def run(name: str) -> None:
        hub.open(name, "", [1], SamplingParams(max_tokens=1), 0)
        hub.push(name, 0, ord("a"), None, ended=False)
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
