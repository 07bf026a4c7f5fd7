"""Refusals of texts in an engine without a tokenizer."""

from __future__ import annotations

from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit

WITHOUT_TOKENIZER = "this engine was started without a tokenizer: give prompt_token_ids"
"""Refusal of a prompt text."""


def check_without_tokenizer(submit: Submit) -> None:
    """Raise ValueError for a submission whose texts only a tokenizer could make tokens of, or find."""
    if submit.prompt is not None:
        raise ValueError(WITHOUT_TOKENIZER)
    if submit.chat:
        raise ValueError("a chat is a prompt text, without prompt_token_ids")
    check_sampling_without_tokenizer(submit.sampling)


def check_sampling_without_tokenizer(sampling: SamplingParams) -> None:
    """Raise ValueError for texts among sampling parameters."""
    if sampling.stop:
        raise ValueError("stop texts need a tokenizer; this engine was started without one: use stop_token_ids")
    if sampling.structured_outputs is not None:
        raise ValueError("structured_outputs need a tokenizer; this engine was started without one")
    if sampling.bad_words:
        raise ValueError("bad_words need a tokenizer; this engine was started without one: use bad_words_ids")
