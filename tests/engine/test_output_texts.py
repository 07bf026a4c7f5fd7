"""Texts of outputs for consoles: made from the core's tokens, resumed by offset, cut at stop texts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import profiles_dir
from ppengine.core import long_polls, output_parts
from ppengine.core.journal_records import Entered, SampleState
from ppengine.core.output_state import compact
from ppengine.protocol.control import Failed, Fetch, Logprob
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.offline import Follow, News, Piece
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.text_messages import ReadOutput
from ppengine.texts import output_reader, text_store
from ppengine.texts.core_questions import AGAIN_S
from ppengine.texts.output_reader import PACE_S
from pushed_tokens import push
from text_world import EOS, TextWorld

TINY = Tokenizer.load(profiles_dir() / "models" / "tiny")


@pytest.fixture
def world() -> TextWorld:
    return TextWorld()


def test_a_stream_resumes_by_offset(world: TextWorld) -> None:
    world.open()
    world.say("hello")
    first = world.fetch()
    assert (first.text, first.token_ids) == ("hello", [ord(letter) for letter in "hello"])
    world.say(" you")
    second = world.fetch(offset=5, text_offset=5)
    assert (second.text, second.offset, len(second.token_ids), second.finished) == (" you", 5, 4, False)
    world.hub.finish("r-1", 0, "length")
    last = world.fetch(offset=9, text_offset=9)
    assert (last.text, last.token_ids, last.finished, last.finish_reason) == ("", [], True, "length")
    assert world.fetch().text == "hello you", "still there for another reader"
    assert world.fetch(offset=7).token_ids == [ord("o"), ord("u")]


def test_a_console_waits_for_more(world: TextWorld) -> None:
    world.open()
    world.ask(wait_ms=60_000)
    for _ in range(5):
        world.now += 1.1
        world.turn()
    assert world.answers == [], "however often the core has answered without news"
    world.say("x")
    world.turn()
    assert [answer.text for answer in world.answers] == ["x"]  # type: ignore[attr-defined]
    world.answers.clear()
    world.ask(offset=1, text_offset=1, wait_ms=3000)
    for _ in range(3):
        assert world.answers == []
        world.now += 1.0
        world.turn()
    (answer,) = world.answers
    assert (answer.token_ids, answer.text, answer.finished) == ([], "", False)  # type: ignore[attr-defined]


def test_a_console_that_reads_along_gets_many_tokens_at_once(world: TextWorld) -> None:
    """Each answer passes through four processes, and an output may have hundreds of tokens a second."""
    world.open()
    world.ask(wait_ms=1000)
    world.say("a")
    world.turn()
    assert [answer.text for answer in world.answers] == ["a"], "the first token at once"
    world.answers.clear()
    world.ask(offset=1, text_offset=1, wait_ms=1000)
    for letter in "bcd":
        world.say(letter)
        world.turn()
    asked = len(world.asked)
    assert not world.answers and world.reader.next_due == world.now + PACE_S
    world.now += PACE_S
    world.turn()
    assert [answer.text for answer in world.answers] == ["bcd"] and len(world.asked) == asked + 1
    # Neither what is here, nor an end, nor a question that waits for nothing.
    assert world.fetch(offset=2, text_offset=2, wait_ms=1000).text == "cd"
    assert world.fetch(offset=4, text_offset=4).text == ""
    world.hub.finish("r-1", 0, "length")
    assert world.fetch(offset=3, text_offset=3, wait_ms=1000).finished
    assert world.fetch(offset=4, text_offset=4, wait_ms=1000).finished


def test_a_text_that_is_behind_its_tokens_is_given_at_once_by_another_process(world: TextWorld) -> None:
    world.open()
    world.say("hello")
    world.fetch()
    world.replace()
    world.ask(offset=5, text_offset=3, wait_ms=60_000)
    assert [(answer.text, answer.token_ids) for answer in world.answers] == [("lo", [])]  # type: ignore[attr-defined]


def test_an_unknown_request_or_sample_or_offset_is_an_answer(world: TextWorld) -> None:
    world.ask("r-9")
    world.open()
    world.ask(sample=1)
    world.ask(offset=-1)
    texts = [answer.text for answer in world.answers if isinstance(answer, Failed) and answer.nonce == 7]
    assert texts == [
        "no request r-9", "no sample 1 of r-1 (it has 1)", "offset -1, text_offset 0; both must be 0 or more"
    ]  # fmt: skip


def test_a_question_whose_core_ended_is_asked_again(world: TextWorld) -> None:
    world.open()
    world.say("hello")
    world.reader.fetch(world_fetch())
    world._to_core.clear()
    world.turn()
    assert world.answers == []
    world.now += AGAIN_S + 0.1
    world.turn()
    assert [answer.text for answer in world.answers] == ["hello"]  # type: ignore[attr-defined]
    world.now += 100
    world.turn()
    assert len(world.answers) == 1 and not world.core.open_count


def world_fetch() -> Any:
    return Fetch(nonce=7, request="r-1", wait_ms=0)


def test_an_engine_that_has_failed_says_so(world: TextWorld) -> None:
    world.open()
    world.ask(wait_ms=60_000)
    world.failure = "stage 1 is lost"
    world.turn()
    assert [answer.text for answer in world.answers] == ["stage 1 is lost"]  # type: ignore[attr-defined]


def test_a_request_that_has_the_name_of_another_one_has_its_own_text(world: TextWorld) -> None:
    world.open(session="s")
    world.say("hello")
    world.hub.finish("r-1", 0, "length")
    assert world.fetch().text == "hello"
    world.hub.forget(["r-1"])
    world.open(session="s")
    world.say("ab")
    assert world.fetch().text == "ab"
    assert world.fetch(offset=1, text_offset=1).text == "b"


def test_more_questions_than_the_core_lets_wait_are_answered_with_what_is_there(
    world: TextWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that the core does not let wait must not come back at once, for a minute."""
    monkeypatch.setattr(output_reader, "WAITING_MOST", 5)
    monkeypatch.setattr(long_polls, "MAX_WAITING", 6)
    world.open()
    world.say("x")
    for _ in range(8):
        world.reader.fetch(Fetch(nonce=7, request="r-1", offset=1, text_offset=1, wait_ms=60_000))
    world.turn()
    assert [answer.token_ids for answer in world.answers] == [[]] * 3  # type: ignore[attr-defined]
    world.say("y")
    world.turn()
    assert [answer.text for answer in world.answers[3:]] == ["y"] * 5  # type: ignore[attr-defined]
    world.answers.clear()
    world.ask(offset=2, text_offset=2, wait_ms=60_000)
    assert world.answers == [], "it waits again"


def test_many_log_probabilities_come_in_several_answers(world: TextWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway takes no message of more than 16 MiB."""
    monkeypatch.setattr(output_parts, "LOGPROBS_MOST", 3)
    world.open(logprobs=1)
    for number, letter in enumerate("abcdefg"):
        push(world.hub, "r-1", 0, ord(letter), -float(number))
    world.hub.finish("r-1", 0, "length")
    tokens: list[int] = []
    seen: list[float] = []
    while True:
        part = world.fetch(offset=len(tokens))
        assert len(part.token_ids) == len(part.logprobs) and part.text == "abcdefg"
        tokens += part.token_ids
        seen += [one.chosen for one in part.logprobs]
        assert (part.finish_reason == "length") == part.finished == (len(tokens) == 7)
        if part.finished:
            break
        assert len(part.token_ids) == 3
    assert tokens == [ord(letter) for letter in "abcdefg"] and seen == [-float(number) for number in range(7)]


def test_a_stop_text_is_looked_for_without_log_probabilities(world: TextWorld) -> None:
    world.open(logprobs=1, stop=["END"])
    for letter in "an END":
        push(world.hub, "r-1", 0, ord(letter), -1.0)
        world.turn()
    assert world.ended[0] == ("r-1", 0) and world.fetch().logprobs == [Logprob(-1.0)] * 6
    assert world.scored == 0


def test_questions_to_a_core_that_is_stopped_are_refused_beyond_some(
    world: TextWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is kept for ten seconds and more, and a console may send thousands a second."""
    monkeypatch.setattr(output_reader, "OPEN_MOST", 5)
    world.open()
    for _ in range(8):
        world.reader.fetch(world_fetch())
    assert [answer.code for answer in world.answers] == ["BUSY"] * 3  # type: ignore[attr-defined]
    world.turn()
    assert len(world.answers) == 8 and world.fetch().text == ""


# --- stop texts ---------------------------------------------------------------------------------------------


def test_a_stop_text_is_found_with_nobody_reading(world: TextWorld) -> None:
    world.open(stop=["END"])
    world.turn()
    for letter in "an END":
        assert world.ended == []
        world.say(letter)
        world.turn()
    assert world.ended == [("r-1", 0)]
    assert world.fetch().finish_reason == "stop"


def test_a_stop_text_over_several_tokens_is_held_back_and_cut(world: TextWorld) -> None:
    world.open(stop=["END"])
    world.say("an EN")
    assert world.fetch().text == "an ", "EN may be the beginning of the stop text"
    world.say("E")
    assert world.fetch().text == "an EN", "it was not, but this E may be"
    world.say("ND")
    world.say(" and more, before the core hears of it")
    world.turn()
    last = world.fetch()
    assert (last.text, len(last.token_ids), last.finished, last.finish_reason) == ("an EN", 8, True, "stop")
    assert world.ended == [("r-1", 0)]
    rest = world.fetch(offset=6, text_offset=4)
    assert (rest.text, rest.token_ids) == ("N", [ord("N"), ord("D")])
    assert world.fetch(offset=8, text_offset=5).token_ids == []


def test_the_end_waits_for_the_core(world: TextWorld) -> None:
    """An answer that says so is the last one, and the core then counts the output as read."""
    world.obeys = False
    world.open(stop=["END"])
    world.say("an END")
    first = world.fetch()
    assert (first.text, first.finished, first.finish_reason) == ("an ", False, None)
    world.ask(offset=6, text_offset=3, wait_ms=60_000)
    world.say("x")
    world.turn()
    assert world.answers == [] and len(world.ended) > 1, "the core is asked again to end it"
    world.obeys = True
    world.say("y")
    world.turn()
    (answer,) = world.answers
    assert (answer.token_ids, answer.text, answer.finished, answer.finish_reason) == ([], "", True, "stop")  # type: ignore[attr-defined]
    output = world.hub.get("r-1")
    assert output is not None and output.read_at is not None


def test_looking_for_a_stop_text_is_no_reading_also_if_the_request_has_ended_by_then(world: TextWorld) -> None:
    world.open(stop=["END"])
    world.say("a")
    world.stops.turn()
    world.on_core()  # Its answer names the request, of which the process knows nothing yet.
    world.hub.finish("r-1", 0, "length")
    world.turn()
    output = world.hub.get("r-1")
    assert any(isinstance(one, ReadOutput) for one in world.asked)
    assert output is not None and output.finished and output.read_at is None


def test_following_is_no_reading(world: TextWorld) -> None:
    world.open(stop=["END"])
    world.turn()
    world.say("an END")
    world.turn()
    output = world.hub.get("r-1")
    assert output is not None and output.finished and output.read_at is None
    world.fetch()
    assert output.read_at is not None


CUTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "earliest": ({"stop": ["yz", "xyz"]}, "wxyz", "w"),
    "before min_tokens": ({"stop": ["b"], "min_tokens": 3}, "abcb", "abc"),
    "begins before min_tokens": ({"stop": ["abc"], "min_tokens": 3}, "abc", ""),
    "short beside long": ({"stop": ["b", "a long one"], "min_tokens": 3}, "abcdb", "abcd"),
    "twice": ({"stop": ["c"]}, "abcabc", "ab"),
}


@pytest.mark.parametrize("pieces", ["one by one", "at once", "at random"])
@pytest.mark.parametrize(("sampling", "says", "text"), CUTS.values(), ids=CUTS)
def test_a_text_is_cut_at_the_same_place_however_its_tokens_come(
    world: TextWorld, pieces: str, sampling: dict[str, Any], says: str, text: str
) -> None:
    world.open(**sampling)
    chance = random.Random(text)
    for letter in says:
        world.say(letter)
        if pieces == "one by one" or (pieces == "at random" and chance.random() < 0.4):
            world.turn()
    world.turn()
    answer = world.fetch()
    assert (answer.text, answer.finished, answer.finish_reason) == (text, True, "stop")
    assert set(world.ended) == {("r-1", 0)}


def test_a_stop_text_in_the_last_token_is_the_reason(world: TextWorld) -> None:
    world.open(stop=["c"])
    world.say("abc")
    world.hub.finish("r-1", 0, "length")
    answer = world.fetch()
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("ab", "stop", 3)


def test_tokens_that_are_missing_are_read(world: TextWorld) -> None:
    world.open(stop=["END"])
    world.say("an ")
    world.turn()
    world.say("EN")
    world.asked.clear()
    world.stops.take(News(nonce=0, cursor=0, pieces=[Piece("r-1", 0, 5, [ord("D")])]))
    world.on_core()
    assert [(one.offset, one.request) for one in world.asked if isinstance(one, ReadOutput)] == [(3, "r-1")]
    world.say("D")
    world.turn()
    assert set(world.ended) == {("r-1", 0)} and world.fetch().text == "an "


def test_what_was_held_back_is_shown_at_the_end(world: TextWorld) -> None:
    world.open(stop=["END"])
    world.say("the E")
    world.hub.finish("r-1", 0, "length")
    assert world.fetch().text == "the E"


def test_a_stop_token_has_no_text_and_another_last_token_has_one(world: TextWorld) -> None:
    world.open(stop_token_ids=[ord("!")])
    world.say("hi!")
    world.hub.finish("r-1", 0, "stop")
    assert (world.fetch().text, len(world.fetch().token_ids)) == ("hi", 3)
    world.open("r-2")
    world.say("hi", name="r-2")
    push(world.hub, "r-2", 0, EOS)
    world.hub.finish("r-2", 0, "stop")
    assert world.fetch("r-2").text == "hi"
    world.open("r-3", session="s")  # A program has found a stop text.
    world.say("hi!", name="r-3")
    world.hub.finish("r-3", 0, "stop")
    assert world.fetch("r-3").text == "hi!"


def test_each_sample_has_its_own_stop_text(world: TextWorld) -> None:
    world.open(stop=["END"], n=3)
    world.turn()
    for index, says in enumerate(["an END", "no end", "END"]):
        world.say(says, index)
    world.turn()
    assert sorted(world.ended) == [("r-1", 0), ("r-1", 2)]
    world.hub.finish("r-1", 1, "length")
    assert [world.fetch(sample=index).text for index in range(3)] == ["an ", "no end", ""]


def test_requests_without_stop_texts_and_of_sessions_are_not_followed(world: TextWorld) -> None:
    world.open()
    world.open("r-2", session="s")
    for name in ("r-1", "r-2"):
        world.say("hello", name=name)
    world.turn()
    assert all(isinstance(one, Follow) for one in world.asked) and world.store.get("r-1") is None
    assert world.fetch("r-2").text == "hello", "a console looks at it"


def test_without_detokenize_a_console_gets_tokens_alone(world: TextWorld) -> None:
    world.open(detokenize=False)
    world.say("hello")
    world.hub.finish("r-1", 0, "length")
    assert (world.fetch().text, len(world.fetch().token_ids)) == ("", 5)
    world.open("r-2", session="s", detokenize=False)
    world.say("hello", name="r-2")
    assert world.fetch("r-2").text == "hello"


# --- kills --------------------------------------------------------------------------------------------------


def restored(world: TextWorld, sampling: SamplingParams) -> None:
    """Kill the core: another one has the tokens, from its journal."""
    before = world.hub.get("r-1")
    assert before is not None
    states = [
        SampleState(
            tokens=compact(sample.tokens.tolist()),
            finished=None if sample.finish_reason is None else FinishedInfo(
                id="r-1", owner="", wall=0.0, ended_s=0.0, took_s=1.0, prompt_tokens=3, output_tokens=1,
                reason=sample.finish_reason,
            ),
        )
        for sample in before.samples
    ]  # fmt: skip
    world.new_hub()
    world.hub.restart(2**40)
    world.hub.restore(
        Entered(
            name="r-1", session="", first=before.number, prompt_ids=compact([1, 2, 3]), sampling=sampling, seed=1,
            owner="", arrival=0.0, samples=states,
        )
    )  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, {"stop": ["lo", "zz"]}, {"stop": ["ll"], "min_tokens": 9}, {"n": 2}])
@pytest.mark.parametrize("ending", [None, "length", "stop"])
@pytest.mark.parametrize("killed", ["core", "texts", "both"])
def test_an_output_reads_after_a_kill_as_it_did(
    world: TextWorld, sampling: dict[str, Any], ending: str | None, killed: str
) -> None:
    """A live request, and one that ended by its length, a stop text or a stop token."""
    params = SamplingParams(**sampling, stop_token_ids=[ord("!")])
    world.open(**sampling, stop_token_ids=[ord("!")])
    for letter in "hello world":
        world.say(letter)
        world.turn()
        if world.ended:
            break
    else:
        if ending == "stop":
            world.say("!")
        if ending is not None:
            world.hub.finish("r-1", 0, ending)
    before = world.fetch()
    if killed != "texts":
        restored(world, params)
    if killed != "core":
        world.replace()
    assert world.fetch() == before
    if not before.finished:
        world.now += AGAIN_S + 0.1
        world.say(" lo")
        world.turn()
        assert world.fetch().text == (before.text + " lo" if "lo" not in sampling.get("stop", []) else before.text)


@pytest.mark.parametrize("seed", range(30))
def test_kills_at_random_lose_no_stop_text(seed: int) -> None:
    """Core and process of texts end at any moment, also together; messages are lost with them."""
    chance = random.Random(seed)
    world, text = TextWorld(TINY), "It was a dark and stormy night, and the old king STOP slept well. " * 3
    tokens = TINY.encode_chat(text)
    params = SamplingParams(stop=["king STOP", "zz"], n=2, max_tokens=len(tokens))
    world.open(stop=params.stop, n=2, max_tokens=len(tokens))
    done = [0, 0]
    for _ in range(400):
        world.now += chance.choice([0.01, 0.3, 3.0])
        draw = chance.random()
        if draw < 0.04:
            world.lose(chance)
            restored(world, params)
        elif draw < 0.08:
            world.replace()
        elif draw < 0.5:
            world.turn()
        else:
            index, output = chance.randrange(2), world.hub.get("r-1")
            assert output is not None
            if output.samples[index].finish_reason is None:
                world.token(tokens[done[index]], index)
                done[index] += 1
                if done[index] == len(tokens):
                    world.hub.finish("r-1", index, "length")
    for _ in range(5):
        world.now += AGAIN_S + 0.1
        world.turn()
    for index in range(2):
        answer = world.fetch(sample=index)
        written = TINY.decode(answer.token_ids)
        if "king STOP" in TINY.decode(tokens[: done[index]]):
            assert (answer.finished, answer.finish_reason) == (True, "stop")
            assert answer.text == written.partition("king STOP")[0]
        else:
            assert written.startswith(answer.text) and not answer.finished


def test_another_request_of_the_same_name_may_have_more_samples(world: TextWorld) -> None:
    world.open(stop=["END"])
    world.turn()
    world.say("x")
    world.turn()
    world.hub.finish("r-1", 0, "length")
    world.turn()
    world.hub.forget(["r-1"])
    world.open(stop=["END"], n=2)
    world.say("the END", 1)
    world.turn()
    assert world.ended == [("r-1", 1)]


def test_the_tokens_of_another_request_of_the_same_name_are_not_added_to_its_text(world: TextWorld) -> None:
    """The core never sends the end of the first one: it was forgotten before the answer to `Follow`."""
    world.open(stop=["END"])
    world.turn()
    world.say("the E")
    world.turn()
    world.hub.finish("r-1", 0, "abort")
    world.hub.forget(["r-1"])
    world.open(stop=["END"])
    world.say("otherND")
    world.turn()
    assert world.ended == []
    world.say("a new END")
    world.turn()
    assert world.ended == [("r-1", 0)] and world.fetch().text == "otherNDa new "


def test_a_late_end_is_of_the_request_whose_text_it_was(world: TextWorld) -> None:
    world.open(stop=["END"])
    world.say("the")
    world.turn()
    world.stops.end("r-1", 0)
    world.hub.finish("r-1", 0, "length")
    world.hub.forget(["r-1"])
    world.open(stop=["END"])
    world.on_core()
    assert world.ended == []


def test_the_text_of_a_sample_that_never_began_is_not_looked_for(world: TextWorld) -> None:
    """Texts that stay for a stop text are as many as requests that live."""
    world.open(stop=["END"], n=2)
    world.say("some text")
    world.turn()
    assert world.store._texts["r-1"].followed
    for index in (1, 0):
        world.hub.finish("r-1", index, "abort")
    world.turn()
    assert not world.store._texts["r-1"].followed and not world.stops._known


def test_memory_is_bounded_by_dropping_texts_that_are_made_again(
    world: TextWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_store, "KEPT_TOKENS", 10 * text_store.REQUEST_WEIGHT)
    world.open("followed", stop=["END"])
    world.say("some text", name="followed")
    world.turn()
    for number in range(30):
        world.open(f"r-{number}")
        world.say("hello", name=f"r-{number}")
        assert world.fetch(f"r-{number}").text == "hello"
    assert len(world.store._texts) <= 11
    assert "followed" in world.store._texts, "its stop text is looked for"
    assert world.fetch("r-0", offset=3, text_offset=3).text == "lo", "made again"
    world.say("END", name="followed")
    world.turn()
    assert world.ended == [("followed", 0)] and not world.store._texts["followed"].followed
