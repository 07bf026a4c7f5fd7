"""Limits of answers that repeat their prompts, or have log-probabilities of them."""

from __future__ import annotations

from ppengine.http.api_errors import invalid
from ppengine.http.chat_fields import ChatRequest
from ppengine.http.request_fields import CompletionRequest
from ppengine.protocol.prompt_scores import VALUES_MOST
from ppengine.protocol.sampling import SamplingParams

ANSWER_VALUES_MOST = 2**18
"""Log-probabilities of all prompts of an answer, counted with each choice that repeats them: 13 MB of JSON."""
COPIES_MOST = 2**20
"""Tokens of all prompts of an answer, counted with each choice that repeats them: 7 MB of JSON."""


def check_size(
    request: CompletionRequest | ChatRequest, sampling: SamplingParams, prompts: list[list[int]]
) -> None:  # fmt: skip
    """Raise ApiError if an answer would have too many tokens or log-probabilities of prompts.

    It also has the limit of the core for log-probabilities of one prompt.
    """
    tokens = sum(map(len, prompts))
    if (field := request.repeating) and (copies := sampling.n * tokens) > max(COPIES_MOST, tokens):
        text = f"{field} repeats the prompt in each of {sampling.n} choices, {copies} tokens in all; an answer has"
        raise invalid(f"{text} {COPIES_MOST} at most", field)
    wanted = request.prompt_values()
    if not wanted:
        return
    field = max(wanted, key=lambda name: wanted[name])
    longest, best = max(map(len, prompts)), (sampling.prompt_logprobs or 0) + 1
    if (values := longest * best) > VALUES_MOST:
        text = f"{field} gives {best} values for each of {longest} tokens, {values} in all; a prompt has"
        raise invalid(f"{text} {VALUES_MOST} at most", field)
    if (values := sum(wanted.values()) * tokens) > ANSWER_VALUES_MOST:
        text = f"{field} gives {values} log-probabilities of prompts over all choices; an answer has"
        raise invalid(f"{text} {ANSWER_VALUES_MOST} at most", field)
