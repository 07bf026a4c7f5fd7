"""Prompts of the offline API, and their submissions: texts, or token ids in arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

from ppengine.protocol.frames import check_utf8
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.token_ids import TokenIds, compact, compact_if_good
from ppengine.protocol.verbs import Submit

PORTION_CHARACTERS = 100_000
"""Half a second a million of them, on a slow core."""


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt


class Submission(NamedTuple):
    """One prompt as it is sent."""

    verb: Submit
    tokens: TokenIds
    """Empty if the verb has the prompt."""


def portions(submissions: Sequence[Submission]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the submissions to send at once: the core has more to do than to tokenize text."""
    begin = size = 0
    for number, submission in enumerate(submissions):
        size += len(submission.verb.prompt or "")
        if size >= PORTION_CHARACTERS:
            yield begin, number + 1
            begin, size = number + 1, 0
    if begin < len(submissions):
        yield begin, len(submissions)


def submissions_of(
    prompts: Sequence[Prompt], params: Sequence[SamplingParams], ids: Sequence[str], priority: Sequence[int] | None
) -> list[Submission]:
    """Return the submissions of several prompts. Raises ValueError as `_submission`."""
    count = len(prompts)
    if priority is None:
        priority = [0] * count
    if len(priority) != count:
        raise ValueError(f"{count} prompts and {len(priority)} priorities; give one a prompt")
    fields: dict[str, Sequence[Any]] = {"sampling": params, "request": ids or [None] * count, "priority": priority}
    return [
        _submission(number, prompt, **{name: values[number] for name, values in fields.items()})
        for number, prompt in enumerate(prompts)
    ]


def _submission(number: int, prompt: Prompt, **fields: Any) -> Submission:
    """Return the submission of a prompt. Raises ValueError for a prompt of another kind, or a text with surrogates."""
    if isinstance(prompt, str):
        check_utf8(f"prompt {number}", prompt)
        return Submission(Submit(prompt=prompt, **fields), compact())
    if not isinstance(prompt, dict) or list(prompt) != ["prompt_token_ids"]:
        raise ValueError(
            f'prompt {number}: a prompt is a text or {{"prompt_token_ids": [...]}}, not {str(prompt)[:80]}'
        )
    ids = list(prompt["prompt_token_ids"])
    if tokens := compact_if_good(ids):
        return Submission(Submit(**fields), tokens)
    # Also from arrays, whose numbers are not Python's.
    return Submission(Submit(prompt_token_ids=[int(token) for token in ids], **fields), compact())
