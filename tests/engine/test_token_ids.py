"""Token ids in arrays: their bytes in messages, their check, and prompts that come in them."""

from __future__ import annotations

import random
from array import array

import pytest
from core_world import VOCAB, CoreWorld
from ppengine.protocol.frames import Codec, ProtocolError, encode
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.token_ids import beyond, compact, from_wire, to_wire, wide
from ppengine.protocol.verbs import Submit

MOST = 2**32 - 1


def test_a_compact_array_is_kept_and_all_else_becomes_one() -> None:
    tokens = compact([0, 5, MOST])
    assert compact(tokens) is tokens and tokens.itemsize == 4
    for others in (array("q", [1, 2]), (1, 2), iter([1, 2]), bytes([1, 2])):
        assert compact(others) == array("I", [1, 2])
    for wrong in (-1, MOST + 1):
        with pytest.raises(OverflowError):
            compact([1, wrong])


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 1000])
def test_tokens_are_widened_and_checked_as_one_by_one(count: int) -> None:
    ids = [random.Random(place).choice([place % 100, 2**31 - 1, 2**31, MOST]) for place in range(count)]
    assert wide(compact(ids)) == array("q", ids).tobytes()
    for limit in (1, 99, 100, 2**16, 2**31 - 1, 2**31):
        assert beyond(compact(ids), limit) == (max(ids, default=-1) >= limit)
    small = [place % 128_256 for place in range(count)]
    for limit in range(max(count - 2, 1), count + 3):
        assert beyond(compact(small), limit) == (max(small, default=-1) >= limit)


def test_one_token_that_is_too_large_is_found_at_every_place() -> None:
    for place in range(40):
        ids = [127_999] * 40
        assert not beyond(compact(ids), 128_000)
        ids[place] += 1
        assert beyond(compact(ids), 128_000)


def test_an_array_goes_as_bytes_and_a_list_is_taken_too() -> None:
    message = AddMany(nonce=1, session="s", submissions=[Submit()], tokens=[compact([3, MOST])])
    codec = Codec(AddMany)
    assert codec.decode(encode(message)) == message
    assert bytes(to_wire(compact([3]))) in encode(message)
    message.tokens = [[3, MOST]]  # type: ignore[list-item]  # as another program may send them
    decoded = codec.decode(encode(message))
    assert isinstance(decoded, AddMany) and decoded.tokens == [compact([3, MOST])]
    for wrong in ("text", [-1], [MOST + 1], ["1"], [1.5], b"123", None, {}):
        message.tokens = [wrong]  # type: ignore[list-item]
        with pytest.raises(ProtocolError):
            codec.decode(encode(message))


def test_no_other_object_goes_into_a_message() -> None:
    with pytest.raises(NotImplementedError, match="no message has a object"):
        to_wire(object())
    with pytest.raises(ValueError, match="token ids are bytes or a list, not dict"):
        from_wire(array, {})


def added(world: CoreWorld, submissions: list[Submit], tokens: list[list[int]]) -> Added:
    """Return the answer to prompts of which the arrays have some."""
    arrays = [compact(ids) for ids in tokens]
    world.engine.offline.add_many(b"o", AddMany(nonce=1, session="s", submissions=submissions, tokens=arrays))
    answer = world.answers[-1][1]
    assert isinstance(answer, Added)
    return answer


def test_prompts_in_arrays_are_those_that_lists_would_be() -> None:
    """From the message to the stages and the journal; a message may have both."""
    world = CoreWorld()
    submissions = [Submit(request="a"), Submit(prompt_token_ids=[7, 8], request="b")]
    assert added(world, submissions, [[3, 4, 5], []]).requests == ["a", "b"]
    world.engine.advance()
    world.engine.commit()
    (step,) = [step for step in world.steps if step.register]
    assert {one.request: one.tokens.tolist() for one in step.register} == {"a": [3, 4, 5], "b": [7, 8]}
    left = world.journal.restored().requests
    assert {name: entered.prompt_ids.tolist() for name, entered in left.items()} == {"a": [3, 4, 5], "b": [7, 8]}


@pytest.mark.parametrize(
    "second, tokens, error",
    [
        (Submit(), [3, VOCAB], f"prompt 1: token id {VOCAB} is not in the vocabulary (0 to {VOCAB - 1})"),
        (Submit(), [MOST], f"prompt 1: token id {MOST} is not in the vocabulary (0 to {VOCAB - 1})"),
        (Submit(prompt_token_ids=[3, -1]), [], f"prompt 1: token id -1 is not in the vocabulary (0 to {VOCAB - 1})"),
        (Submit(prompt_token_ids=[2**40]), [], f"prompt 1: token id {2**40} is not in the vocabulary"),
        (Submit(prompt_token_ids=[3]), [3], "prompt 1: give either a prompt text or prompt_token_ids"),
        (Submit(prompt="x"), [3], "prompt 1: prompt is a text; a session has token ids alone"),
        (Submit(), [], "prompt 1: give either a prompt text or prompt_token_ids"),
        (Submit(prompt_token_ids=[]), [], "prompt 1: the prompt is empty"),
        (Submit(prompt_token_ids=[-1] * 64), [], "prompt 1: the prompt has 64 tokens, max_model_len is 64"),
        (Submit(), [MOST] * 64, "prompt 1: the prompt has 64 tokens, max_model_len is 64"),
    ],
)  # fmt: skip
def test_a_wrong_prompt_is_named_and_none_is_taken(second: Submit, tokens: list[int], error: str) -> None:
    world = CoreWorld()
    answer = added(world, [Submit(), second], [[3], tokens])
    assert answer.error.startswith(error) and not answer.requests and not world.engine.requests.live()


def test_arrays_for_fewer_prompts_than_there_are_are_refused() -> None:
    world = CoreWorld()
    answer = added(world, [Submit(), Submit(prompt_token_ids=[3])], [[3]])
    assert answer.error == "2 prompts and the tokens of 1" and not world.engine.requests.live()
