"""Sampling parameters from the client to the stages: ranges, words to tokens, the wire and the journal."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from core_world import VOCAB, CoreWorld
from ppengine.core.journal_records import DECODER, ENCODER, Entered
from ppengine.protocol.control import Refused
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.steps import Adjustments, ToStage
from ppengine.protocol.text_messages import Encode, Encoded
from ppengine.protocol.verbs import Submit
from ppengine.texts.submission_encoder import SubmissionEncoder
from test_core_successor import follow

EVERYTHING: dict[str, Any] = {
    "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2,
    "logit_bias": {5: -1.5}, "bad_words_ids": [[1, 2], [3]], "allowed_token_ids": [4, 5],
}  # fmt: skip


class Words:
    """A tokenizer of capital letters; a space before a word replaces its first token by a small letter."""

    longest_token = 1

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 60 for letter in text]

    def encode_bad_word(self, word: str) -> list[list[int]]:
        return [[ord(letter) - 60 for letter in form] for form in (word, word[0].lower() + word[1:])]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min_p": 1.5}, "min_p is 1.5; it must be 0 to 1"),
        ({"min_p": float("nan")}, "min_p is nan; it must be 0 to 1"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be -2 to 2"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3.0; it must be -2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be 0.01 to 100"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf; it must be 0.01 to 100"),
        ({"logit_bias": {5: 101.0}}, "logit_bias of token 5 is 101.0; ids are 0 to 2\\*\\*31-1, biases -100 to 100"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias of token -5 is 1.0; ids are 0 to 2\\*\\*31-1, biases -100 to 100"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias has 301 entries; at most 300 are taken"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is .*; it must be a map from whole numbers to numbers"),
        ({"allowed_token_ids": []}, "allowed_token_ids has 0 ids; it must be 1 to 4096, or None"),
        ({"allowed_token_ids": [1] * 5000}, "allowed_token_ids has 5000 ids; it must be 1 to 4096, or None"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids has -1; ids are 0 to 2\\*\\*31-1"),
        ({"bad_words": [" "]}, "bad_words holds an empty text; every bad word needs a character that is no space"),
        ({"bad_words": ["a"] * 257}, "bad_words holds 257 texts of up to 1 characters; at most 256 of 256 are taken"),
        ({"bad_words_ids": [[]]}, "bad_words_ids holds an empty sequence or a number that is no id"),
        ({"bad_words_ids": [[3, -1]]}, "bad_words_ids holds an empty sequence or a number that is no id"),
        ({"bad_words_ids": [[3] * 1025]}, "bad_words_ids holds 1 sequences with 1025 tokens; at most 256 with 1024"),
        ({"bad_words_ids": [["a"]]}, "bad_words_ids is .*; it must be a list of lists of whole numbers"),
        ({"top_k": 2**31}, "top_k is 2147483648; it must be 1 to 2\\*\\*31-1, or 0 or -1 for all tokens"),
        ({"min_tokens": 2**31, "max_tokens": None}, "min_tokens is 2147483648; it must be 0 to 2\\*\\*31-1"),
        ({"max_tokens": 2**64}, "max_tokens is 18446744073709551616; it must be at least 1, and below 2\\*\\*63"),
        ({"stop_token_ids": [5, 2**64]}, "stop_token_ids is .*; ids are 0 to 2\\*\\*31-1"),
        ({"allowed_token_ids": [5, 2**31]}, "allowed_token_ids has 2147483648; ids are 0 to 2\\*\\*31-1"),
        ({"logit_bias": {2**64: 1.0}}, "logit_bias of token 18446744073709551616 is 1.0; ids are 0 to"),
        ({"bad_words_ids": [[2**31]]}, "bad_words_ids holds an empty sequence or a number that is no id"),
        ({"allowed_token_ids": [3, 4], "bad_words_ids": [[3], [4]]}, "allowed_token_ids has only bad words"),
        (
            {"allowed_token_ids": [3, 4], "bad_words_ids": [[3]], "stop_token_ids": [4], "min_tokens": 1},
            "allowed_token_ids has only bad words, or stop tokens before min_tokens; one must be free",
        ),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_in_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        SamplingParams(**fields)
    assert "\n" not in str(raised.value)


def test_the_ends_of_the_ranges_are_taken() -> None:
    for penalty in (-2.0, 2.0):
        SamplingParams(presence_penalty=penalty, frequency_penalty=penalty, min_p=1.0, logit_bias={1: 50 * penalty})
    assert not SamplingParams(logit_bias={}, repetition_penalty=1.0).adjusts
    for field, value in EVERYTHING.items():
        assert SamplingParams(**{field: value}).adjusts


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: token id {VOCAB} is not in the vocabulary"),
        ({"allowed_token_ids": [1, VOCAB]}, f"allowed_token_ids: token id {VOCAB} is not in the vocabulary"),
        ({"bad_words_ids": [[1], [2, VOCAB]]}, f"bad_words_ids: token id {VOCAB} is not in the vocabulary"),
        ({"bad_words": ["A"]}, "bad_words is a text; the core has token ids alone"),
        ({"stop": ["A"]}, "stop texts need a tokenizer; this engine was started without one: use stop_token_ids"),
    ],
)
def test_the_core_refuses_what_no_stage_can_do(fields: dict[str, Any], says: str) -> None:
    (answer,) = CoreWorld().submit(**fields)
    assert isinstance(answer, Refused) and answer.code == "INVALID"
    assert says in answer.text


def test_stages_get_the_adjustments_of_a_request_that_has_some() -> None:
    world = CoreWorld()
    world.submit(name="a", **EVERYTHING)
    world.submit(name="b")
    world.engine.advance()
    found = {one.request: one.adjustments for step in world.steps for one in step.register}
    assert found == {"a": Adjustments(**EVERYTHING), "b": None}
    (step,) = [step for step in world.steps if step.register]
    assert Codec(ToStage).decode(encode(step)) == step


def encoded(sampling: SamplingParams) -> Encoded:
    """Return the answer to a submission with `sampling`."""
    answers: list[Encoded] = []
    tokenizer: Any = Words()
    encoder = SubmissionEncoder(tokenizer, 64, cast(Any, None), answers.append)
    encoder.take(Encode(id="c", submit=Submit(prompt="AAA", request="a", sampling=sampling)))
    (answer,) = answers
    return answer


def test_more_bad_words_than_a_stage_has_room_for_are_refused() -> None:
    answer = encoded(SamplingParams(bad_words=["AB"] * 200, detokenize=False))
    assert answer.submit is None and answer.code == "INVALID"
    assert "bad_words_ids holds 400 sequences with 800 tokens; at most 256 with 1024 are taken" in answer.error


def test_bad_words_become_tokens_and_the_journal_keeps_them() -> None:
    world = CoreWorld(has_tokenizer=True)
    sampling = SamplingParams(bad_words=["AB"], bad_words_ids=[[7]], logit_bias={3: 2.0}, detokenize=False)
    submit = encoded(sampling).submit
    assert submit is not None and submit.sampling.bad_words == []
    world.say(submit)
    world.engine.advance()
    world.engine.commit()
    (register,) = [one for step in world.steps for one in step.register]
    assert register.adjustments is not None
    assert register.adjustments.bad_words_ids == [[7], [5, 6], [37, 6]]
    (entered,) = [record for record in world.journal.records if isinstance(record, Entered)]
    written = DECODER.decode(ENCODER.encode([entered]))
    assert written == [entered]
    assert entered.sampling.bad_words_ids == [[7], [5, 6], [37, 6]]
    after = follow(world, has_tokenizer=True)
    assert after.scheduler.queues.requests["a"].sampling == entered.sampling


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"best_of": 2}, "best_of=2 is refused: it must be n: ask for n continuations"),
        ({"n": 2, "best_of": 3}, "best_of=3 is refused: it must be n: ask for n continuations"),
        ({"use_beam_search": True}, "use_beam_search=True is refused: this engine samples each continuation by itself"),
        ({"skip_special_tokens": False}, "skip_special_tokens=False is refused: the text has no special tokens"),
        ({"guided_decoding": "x"}, "guided_decoding='x' is refused: give structured_outputs"),
    ],
)
def test_an_argument_of_vllm_is_refused_with_the_reason(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SamplingParams(**fields)


def test_an_argument_of_vllm_is_taken_where_it_changes_nothing() -> None:
    taken = {"use_beam_search": False, "skip_special_tokens": True, "length_penalty": 1.0, "guided_decoding": None}
    assert SamplingParams(n=2, best_of=2, **cast("dict[str, Any]", taken)) == SamplingParams(n=2)
    assert SamplingParams(**cast("dict[str, Any]", {"best_of": 1})) == SamplingParams()
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(**cast("dict[str, Any]", {"best_off": 1}))
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        msgspec.json.decode(b'{"best_of": 1}', type=SamplingParams)
