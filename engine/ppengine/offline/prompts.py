"""Prompts of the offline API, and their submissions: token ids in arrays, and texts to tokenize."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, NotRequired, TypedDict

from ppengine.protocol.error_text import shown
from ppengine.protocol.frames import check_utf8
from ppengine.protocol.kinds import check_kind
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.token_ids import TokenIds, compact, compact_if_good
from ppengine.protocol.verbs import Submit, check_salt

PORTION_CHARACTERS = 100_000
"""Characters that are tokenized before the engine begins with them: a million take half a second."""
PORTION_PROMPTS = 1000
"""Prompts that go at once: the core takes some 15 ms for them, and its steps wait meanwhile."""

KINDS = 'a text, token ids, {"prompt": ...} or {"prompt_token_ids": [...]}'


class TextPrompt(TypedDict):
    """A prompt that is a text."""

    prompt: str
    cache_salt: NotRequired[str | None]
    """Only prompts with the same salt share cached blocks."""


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """Its text, for `RequestOutput.prompt` alone."""
    cache_salt: NotRequired[str | None]
    """Only prompts with the same salt share cached blocks."""


Prompt = str | list[int] | TextPrompt | TokensPrompt


class Submission(NamedTuple):
    """One prompt."""

    verb: Submit
    tokens: TokenIds
    """Empty if the verb has them as numbers, or if they are not made yet."""
    text: str | None
    """Text of the prompt, if it has one."""
    is_text: bool
    """Whether its tokens follow from its text, and are not made yet."""


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return several prompts, or the only one in a list: a text, a mapping, or the token ids of one prompt.

    Raises ValueError for a value that is no prompts.
    """
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {shown(prompts)}; it must be {KINDS}, or a list of these")
    several: list[Any] = list(prompts)
    return [several] if several and all(isinstance(one, int) for one in several) else several


def params_of(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts; None: the defaults. Raises ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise ValueError(f"sampling_params is {shown(params)}; it must be SamplingParams, or a list with one a prompt")
    several = list(params)
    check_params(several)
    if len(several) != count:
        raise ValueError(f"{count} prompts and {len(several)} sampling params; give one, or one a prompt")
    return several


def check_params(params: Sequence[SamplingParams]) -> None:
    """Raise ValueError with the first that is no SamplingParams."""
    for number, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise ValueError(f"prompt {number}: sampling params are SamplingParams, not {shown(one)}")


def check_priority(priority: Sequence[int] | None, count: int) -> None:
    """Raise ValueError unless there is a priority for each of `count` prompts, or for none."""
    if priority is None:
        return
    if not isinstance(priority, Sized):
        raise ValueError(f"priority is {shown(priority)}; it must be a list with one number a prompt")
    if len(priority) != count:
        raise ValueError(f"{count} prompts and {len(priority)} priorities; give one a prompt")


def content_of(prompt: object) -> tuple[Any, Any]:
    """Return the text and the token ids of a prompt, None for one that it lacks; both None: it is no prompt."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list):
        return None, prompt
    if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "prompt_token_ids", "cache_salt"}:
        return prompt.get("prompt"), prompt.get("prompt_token_ids")
    return None, None


def portions(submissions: Sequence[Submission]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the submissions to send at once: the engine computes them while texts are tokenized."""
    begin = size = 0
    for number, submission in enumerate(submissions):
        size += len(submission.text or "") if submission.is_text else 0
        if size >= PORTION_CHARACTERS or number + 1 - begin >= PORTION_PROMPTS:
            yield begin, number + 1
            begin, size = number + 1, 0
    if begin < len(submissions):
        yield begin, len(submissions)


def submissions_of(
    prompts: Sequence[Prompt], params: Sequence[SamplingParams], ids: Sequence[str], priority: Sequence[int] | None
) -> list[Submission]:
    """Return the submissions of several prompts. Raises ValueError as `_submission`."""
    count = len(prompts)
    check_params(params)
    check_kind("request_id", list(ids), list[str])
    check_priority(priority, count)
    if priority is None:
        priority = [0] * count
    fields: dict[str, Sequence[Any]] = {"sampling": params, "request": ids or [None] * count, "priority": priority}
    return [
        _submission(number, prompt, **{name: values[number] for name, values in fields.items()})
        for number, prompt in enumerate(prompts)
    ]


def _submission(number: int, prompt: Prompt, **fields: Any) -> Submission:
    """Return the submission of a prompt. Raises ValueError for a prompt of another kind, or a text with surrogates."""
    text, ids = content_of(prompt)
    if not isinstance(text, str | None) or (text is None and ids is None):
        raise ValueError(f"prompt {number}: a prompt is {KINDS}, not {str(prompt)[:80]}")
    if text is not None:
        check_utf8(f"prompt {number}", text)
    if isinstance(prompt, Mapping) and (salt := prompt.get("cache_salt")) is not None:
        fields["cache_salt"] = _checked_salt(number, salt)
    if ids is None:
        return Submission(Submit(**fields), compact(), text, is_text=True)
    try:
        if tokens := compact_if_good(list(ids)):
            return Submission(Submit(**fields), tokens, text, is_text=False)
        # Also from arrays, whose numbers are not Python's.
        numbers = [operator.index(token) for token in ids]
    except TypeError:
        raise ValueError(f"prompt {number}: token ids are whole numbers, not {str(ids)[:80]}") from None
    if wrong := next((token for token in numbers if not -(2**63) <= token < 2**63), None):
        # No message has such a number. The core names others that are not in the vocabulary.
        raise ValueError(f"prompt {number}: token id {str(wrong)[:80]} is not in the vocabulary")
    return Submission(Submit(prompt_token_ids=numbers, **fields), compact(), text, is_text=False)


def _checked_salt(number: int, salt: object) -> str:
    """Return the salt of a prompt. Raises ValueError with the prompt's number."""
    try:
        check_kind("cache_salt", salt, str)
        check_utf8("cache_salt", str(salt))
        check_salt(str(salt))
    except ValueError as error:
        raise ValueError(f"prompt {number}: {error}") from None
    return str(salt)
