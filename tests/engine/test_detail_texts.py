"""Texts of prompt and output in the details of requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import profiles_dir
from ppengine.protocol.control import Inspect, Inspected
from ppengine.protocol.frames import decode_as, encode
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.sampling import SamplingParams
from ppengine.texts.core_questions import CoreQuestions
from ppengine.texts.detail_reader import DetailReader

TINY = Tokenizer.load(profiles_dir() / "models" / "tiny")
PROMPT, OUTPUT = TINY.encode("Once upon"), TINY.encode(" a time END there was")


class World:
    """The reader of details, and a core that answers each question."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.core = CoreQuestions(lambda question: None, lambda: 0.0)
        self.reader = DetailReader(TINY, [0], self.core, self.answers.append, lambda: 0.0)

    def look(self, *, output: list[int] = OUTPUT, **fields: Any) -> RequestDetail:
        detail = RequestDetail(
            id="r-1", owner="o", state="running", prompt_tokens=len(PROMPT), output_tokens=len(output),
            computed_tokens=0, cached_tokens=0, block_table=[], shared_blocks=[], host_blocks=[], in_flight=[],
            revision=0, age_s=0.0, preemptions=0, swaps=0, priority=0, history=[], client="",
            queued_s=None, first_token_s=None, inter_token_ms=None, prompt_token_ids=PROMPT, output_token_ids=output,
            **{"why": "", "sampling": SamplingParams(), **fields},
        )  # fmt: skip
        self.reader.inspect(Inspect(nonce=7, what="request", request="r-1"))
        (number,) = self.core._asked
        self.core.take(Inspected(nonce=number, what="request", data=msgspec.Raw(encode(detail))))
        answer = self.answers.pop()
        assert answer.nonce == 7
        return decode_as(RequestDetail, answer.data)


@pytest.fixture
def world() -> World:
    return World()


def test_a_text_grows_with_its_request_and_is_cut_at_a_stop_text(world: World) -> None:
    cut = SamplingParams(stop=["END"])
    for count in range(len(OUTPUT) + 1):
        detail = world.look(output=OUTPUT[:count], sampling=cut)
        assert detail.prompt_text == "Once upon"
        assert detail.output_text == TINY.decode(OUTPUT[:count]).partition("END")[0]
    ended = world.look(sampling=cut, finished_s=1.0, why="over")
    assert ended.why == "stop" and ended.output_tokens == len(ended.output_token_ids) < len(OUTPUT)
    assert TINY.decode(ended.output_token_ids) == " a time END"


def test_another_request_of_the_same_name_has_its_own_stop_texts(world: World) -> None:
    assert world.look(sampling=SamplingParams(stop=["END"])).output_text == " a time "
    assert world.look().output_text == " a time END there was"


def test_bad_words_are_texts_each_once(world: World) -> None:
    ids = [sequence for word in ("king", "Once upon") for sequence in TINY.encode_bad_word(word)]
    assert len(ids) == 4
    detail = world.look(sampling=SamplingParams(bad_words_ids=ids))
    assert detail.bad_words == ["king", "Once upon"] and detail.sampling.bad_words_ids == ids
    assert world.look().bad_words == []
