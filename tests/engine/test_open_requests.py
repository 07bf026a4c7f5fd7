"""Requests of the offline API: text, tokens and reasons of what the core sends, however answers are lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import profiles_dir
from ppengine.core.outputs import OutputHub
from ppengine.offline.llm_engine import LLMEngine
from ppengine.offline.open_requests import OpenRequest, OpenRequests
from ppengine.offline.program_texts import ProgramTexts
from ppengine.offline.request_output import RequestOutput
from ppengine.protocol.control import Logprob
from ppengine.protocol.offline import Added, AddMany, EndSamples, Follow, ForgetMany, News, Piece
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.timings import Timings
from ppengine.protocol.token_ids import TokenIds, compact
from pushed_tokens import push
from transformers import AutoTokenizer

TINY = profiles_dir() / "models" / "tiny"
TOKENIZER, THEIRS = Tokenizer.load(TINY), AutoTokenizer.from_pretrained(TINY)
TEXTS = [
    " naïve café, “quote” and 漢字が並ぶ now",
    "🙂🚀👩‍👩‍👧 and Zürich\n\tagain",
    " the king said: go to the river.",
]
STOP_TOKEN = 7


def requests(**sampling: Any) -> OpenRequests:
    made = OpenRequests(lambda: TOKENIZER)
    made.add({"r": OpenRequest("p", compact([1, 2]), SamplingParams(**sampling))})
    return made


def take(made: OpenRequests, *pieces: Piece) -> tuple[RequestOutput, list[tuple[str, int]], list[str]]:
    taken = made.take(News(nonce=1, cursor=1, pieces=list(pieces)))
    (one,) = taken.changed.values()
    return one.output("r"), taken.stopped, taken.ended


def tokens_of(text: str) -> list[int]:
    ids: list[int] = THEIRS.encode(text, add_special_tokens=False)
    return ids


def test_a_stop_text_ends_a_sample_here_and_the_request_ends_with_the_core() -> None:
    tokens, more = tokens_of(" the king said: go"), tokens_of(" to the river")
    made = requests(stop=["said"], max_tokens=40, logprobs=0)
    scores = [Logprob(-float(place)) for place in range(len(tokens + more))]
    output, stopped, ended = take(made, Piece("r", 0, 0, tokens, scores[: len(tokens)]))
    (sample,) = output.outputs
    kept = next(count for count in range(len(tokens)) if "said" in THEIRS.decode(tokens[:count]))
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (" the king ", "stop", "said")
    assert (sample.token_ids, sample.logprobs) == (tokens[:kept], scores[:kept])
    assert stopped == [("r", 0)] and not output.finished and not ended and made.have_stops
    assert (output.num_cached_tokens, output.metrics) == (None, None)
    output, stopped, _ = take(made, Piece("r", 0, len(tokens), more, scores[len(tokens) :]))
    assert output.outputs == [sample] and stopped == [("r", 0)], "the message to end it may be lost"
    times = Timings(1.0, 2.0, 3.0, 4.0, [], 0, 1.0)
    last = Piece("r", 0, len(tokens + more), [], [], "length", cached_tokens=16, timings=times)
    output, stopped, ended = take(made, last)
    assert output.outputs == [sample] and output.finished and (stopped, ended) == ([], ["r"])
    assert (output.num_cached_tokens, output.metrics) == (16, times)
    assert len(made) == 0 and not made.have_stops


@pytest.mark.parametrize(
    ("sampling", "reason", "stop_reason"),
    [
        ({"stop_token_ids": [STOP_TOKEN]}, "stop", STOP_TOKEN),
        ({"stop": ["never"], "stop_token_ids": [STOP_TOKEN]}, "stop", STOP_TOKEN),
        ({}, "stop", None),
        ({"stop_token_ids": [STOP_TOKEN]}, "length", None),
        ({"stop": [" said"]}, "length", " said"),
        ({}, "abort", None),
    ],
)
def test_the_reason_of_an_end(sampling: dict[str, Any], reason: str, stop_reason: str | int | None) -> None:
    tokens = tokens_of(" he said") + [STOP_TOKEN] * (reason == "stop")
    output, _, _ = take(requests(max_tokens=20, **sampling), Piece("r", 0, 0, tokens, [], reason))
    (sample,) = output.outputs
    assert (sample.finish_reason, sample.stop_reason) == ("stop" if stop_reason else reason, stop_reason)
    assert (sample.text, sample.token_ids) == (" he" if stop_reason == " said" else " he said", tokens)


def test_text_that_a_stop_text_may_take_back_is_not_shown() -> None:
    made = requests(stop=["END"])
    assert take(made, Piece("r", 0, 0, tokens_of("the E")))[0].outputs[0].text == "the "
    assert take(made, Piece("r", 0, len(tokens_of("the E")), [], [], "length"))[0].outputs[0].text == "the E"


def test_text_that_is_not_wanted_is_not_made() -> None:
    def none() -> Tokenizer:
        raise AssertionError("no tokenizer is loaded")

    made = OpenRequests(none)
    made.add({"r": OpenRequest(None, compact([1]), SamplingParams(detokenize=False, stop_token_ids=[3]))})
    (sample,) = take(made, Piece("r", 0, 0, [2, 3], [], "stop"))[0].outputs
    assert (sample.text, sample.token_ids, sample.stop_reason) == ("", [2, 3], 3)


def test_log_probabilities_of_the_prompt_stay_also_if_the_core_loses_them() -> None:
    made = requests(prompt_logprobs=0, max_tokens=9)
    take(made, Piece("r", 0, 0, [9], prompt_logprobs=[None, None]))
    assert take(made, Piece("r", 0, 0, [9, 9], [], "length"))[0].prompt_logprobs == [None, None]


def test_an_output_does_not_change_later() -> None:
    made = requests(max_tokens=9, logprobs=0)
    first = take(made, Piece("r", 0, 0, [90], [Logprob(-1.0)]))[0]
    before = msgspec.json.encode(first)
    take(made, Piece("r", 0, 1, [91], [Logprob(-2.0)], "length"))
    assert msgspec.json.encode(first) == before


def test_requests_of_an_interrupted_call_are_forgotten_at_their_end() -> None:
    taken = requests().take(
        News(nonce=1, cursor=1, pieces=[Piece("old", 0, 4, [1]), Piece("old", 1, 3, [], [], "abort")])
    )
    assert (taken.changed, taken.ended, taken.gap) == ({}, ["old"], False)


# --- with a core ------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Tokens that the engine makes of one sample, unless it is ended before, and its reason."""

    tokens: list[int]
    reason: str
    made: int = 0
    ended: str = ""


@dataclass
class Core:
    """The outputs of a core, in place of a `LocalEngine`. It may be killed, and answers may be lost."""

    draw: Random
    lost: float
    plans: dict[tuple[str, int], Plan]
    answers: deque[News] = field(default_factory=deque)
    late: list[EndSamples] = field(default_factory=list)
    """Messages that have not arrived."""
    now: float = 0.0
    number: int = 0
    added: dict[str, tuple[TokenIds, SamplingParams]] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hub = self.new_hub()

    def new_hub(self) -> OutputHub:
        return OutputHub(lambda _, answer: self.answers.append(answer), lambda: self.now, lambda: "")

    def nonce(self) -> int:
        self.number += 1
        return self.number

    def ask(self, message: Any, kind: type) -> Any:
        if isinstance(message, AddMany):
            for verb, ids in zip(message.submissions, message.tokens, strict=True):
                assert verb.prompt is None and not verb.sampling.stop
                self.hub.open(verb.request or "", message.session, ids, verb.sampling, 0)
                self.added[verb.request or ""] = ids, verb.sampling
            return Added(nonce=message.nonce, requests=[one.request or "" for one in message.submissions])
        assert isinstance(message, Follow)
        self.answers.clear()
        self.hub.follow(b"c", message)
        while not self.answers:
            self.turn()
            if self.draw.random() < 0.02:
                self.be_killed()
                self.hub.follow(b"c", message)
        if self.draw.random() < self.lost:
            raise KeyboardInterrupt
        return self.answers.popleft()

    def send(self, message: Any) -> None:
        if isinstance(message, EndSamples):
            self.late.append(message)
        elif isinstance(message, ForgetMany):
            self.hub.forget(message.requests)
            self.forgotten |= {name for name in message.requests if name not in self.hub}

    def turn(self) -> None:
        self.now += 0.1
        if self.late and self.draw.random() < 0.5:
            for name, sample in self.late.pop(0).samples:
                self.end(name, sample, "stop")
        for (name, sample), plan in self.plans.items():
            if plan.ended or self.draw.random() < 0.5:
                continue
            push(self.hub, name, sample, plan.tokens[plan.made])
            plan.made += 1
            if plan.made == len(plan.tokens):
                self.end(name, sample, plan.reason)
        self.hub.serve_waiters()

    def end(self, name: str, sample: int, reason: str) -> None:
        plan = self.plans[name, sample]
        if not plan.ended:
            plan.ended = reason
            self.hub.finish(name, sample, reason)

    def be_killed(self) -> None:
        """Another core has the same outputs, and none of the messages under way."""
        before, self.hub = self.hub, self.new_hub()
        self.hub.restart(before._changes)
        self.late.clear()
        for name, (ids, sampling) in self.added.items():
            if name in self.forgotten:
                continue
            self.hub.open(name, "s", ids, sampling, 0)
            for index in range(sampling.n):
                plan = self.plans[name, index]
                for token in plan.tokens[: plan.made]:
                    push(self.hub, name, index, token)
                if plan.ended:
                    self.hub.finish(name, index, plan.ended)


def expected(plan: Plan, stop: str | None) -> tuple[str, list[int], str, str | int | None]:
    """Return text, tokens and reasons of a sample by transformers' text of the whole."""
    spoken = plan.tokens[:-1] if plan.reason == "stop" else plan.tokens
    text: str = THEIRS.decode(spoken, skip_special_tokens=True)
    if stop is not None and stop in text:
        counts = range(1, len(spoken) + 1)
        kept = next(count for count in counts if stop in THEIRS.decode(spoken[:count], skip_special_tokens=True))
        return text[: text.index(stop)], spoken[:kept], "stop", stop
    if plan.reason == "stop":
        # Half a character before a stop token has no text.
        return text.rstrip("\ufffd"), plan.tokens, "stop", STOP_TOKEN
    return text, plan.tokens, "length", None


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), lost=st.floats(0, 0.4), finished_only=st.booleans(), stops=st.booleans())
def test_outputs_are_those_of_transformers_however_often_the_core_is_killed(
    seed: int, lost: float, finished_only: bool, stops: bool
) -> None:
    draw = Random(seed)
    params, plans, wanted = [], {}, {}
    names = [f"r{number}" for number in range(draw.randint(1, 4))]
    for name in names:
        text = draw.choice(TEXTS)
        at = draw.randrange(1, len(text) - 3)
        stop = text[at : at + draw.randint(1, 3)] if stops and draw.random() < 0.7 else None
        samples = draw.randint(1, 3)
        params.append(SamplingParams(n=samples, stop=[stop] if stop else [], stop_token_ids=[STOP_TOKEN]))
        for index in range(samples):
            tokens = tokens_of(text)[: draw.randint(1, 40)]
            reason = draw.choice(["length", "stop"])
            plan = plans[name, index] = Plan(tokens + [STOP_TOKEN] * (reason == "stop"), reason)
            wanted[name, index] = expected(plan, stop)
    core = Core(draw, lost, plans)
    engine: Any = LLMEngine.__new__(LLMEngine)
    engine._engine, engine._session, engine._cursor = core, "s", -1
    engine._texts = ProgramTexts(TINY, 1024, absent=False)
    engine._open = OpenRequests(lambda: TOKENIZER)
    engine.add_many(["Once upon a time"] * len(names), params, names)
    done: dict[str, RequestOutput] = {}
    for _ in range(2000):
        if not engine.has_unfinished_requests():
            break
        try:
            outputs = engine.step(finished_only=finished_only)
        except KeyboardInterrupt:
            continue
        assert all(output.finished for output in outputs) or not finished_only
        for output in outputs:
            assert output.request_id not in done, "each ends once"
            for sample in output.outputs:
                text, tokens, *_ = wanted[output.request_id, sample.index]
                assert text.startswith(sample.text) and tokens[: len(sample.token_ids)] == sample.token_ids
            if output.finished:
                done[output.request_id] = output
    found = {
        (name, sample.index): (sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason)
        for name, output in done.items() for sample in output.outputs
    }  # fmt: skip
    assert found == wanted


@pytest.mark.parametrize(
    ("count", "stop", "finished_only", "asks"),
    [
        (1, [], True, (1000, True)),
        (1, [], False, (1000, False)),
        (1, ["x"], False, (1000, False)),
        (1, ["x"], True, (4, True)),
        (80, ["x"], True, (14, True)),
        (5000, ["x"], True, (24, True)),
    ],
)
def test_stop_texts_are_looked_for_after_a_few_milliseconds(
    count: int, stop: list[str], finished_only: bool, asks: tuple[int, bool]
) -> None:
    engine: Any = LLMEngine.__new__(LLMEngine)
    engine._engine, engine._session, engine._cursor = Core(Random(1), 0.0, {}), "s", 3
    engine._open = OpenRequests(lambda: TOKENIZER)
    engine._open.add({str(one): OpenRequest(None, compact([1]), SamplingParams(stop=stop)) for one in range(count)})
    question = engine._question(finished_only=finished_only)
    assert (question.wait_ms, question.finished_only) == asks and question.since == 3 and question.timings
