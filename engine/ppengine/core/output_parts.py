"""Answers to those who read an output by offset: consoles of an engine without a tokenizer, and the texts of others."""

from __future__ import annotations

from ppengine.core.output_state import Output
from ppengine.protocol.control import Fetch, Fetched
from ppengine.protocol.text_messages import OutputPart, PromptContext, ReadOutput

TAIL = 16
"""Tokens of the prompt in front of an output that may belong to its first character."""
LOGPROBS_MOST = 16_384
"""Log-probabilities of one answer, of some 300 bytes: a gateway takes a message of 16 MiB. Their reader asks again."""


def wrong_offsets(question: Fetch | ReadOutput) -> str:
    """Return why a question is refused; empty if it is not."""
    if isinstance(question, ReadOutput):
        lowest = min(question.offset, question.since)
        return "" if lowest >= 0 else f"offset {question.offset}, since {question.since}; both must be 0 or more"
    if min(question.offset, question.text_offset) >= 0:
        return ""
    return f"offset {question.offset}, text_offset {question.text_offset}; both must be 0 or more"


def news(question: Fetch | ReadOutput, output: Output, tokens: int) -> bool:
    """Return whether a sample with `tokens` tokens, which goes on, has what the question waits for."""
    if isinstance(question, Fetch):
        return tokens > question.offset
    return question.number != output.number or tokens > max(question.offset, question.since)


def answer(question: Fetch | ReadOutput, output: Output) -> Fetched | OutputPart:
    """Return the answer to a question about an output that has its sample."""
    return _fetched(question, output) if isinstance(question, Fetch) else _part(question, output)


def _fetched(question: Fetch, output: Output) -> Fetched:
    """Return the tokens for a console, without text: the engine has no tokenizer."""
    sample, first = output.samples[question.sample], question.offset
    tokens, logprobs = sample.tokens[first:], sample.logprobs[first : first + LOGPROBS_MOST]
    if logprobs:
        tokens = tokens[: len(logprobs)]
    ended = sample.finish_reason is not None and first + len(tokens) >= len(sample.tokens)
    return Fetched(
        nonce=question.nonce, request=output.request, sample=question.sample, offset=question.offset,
        token_ids=tokens.tolist(), text_offset=question.text_offset, text="", finished=ended,
        finish_reason=sample.finish_reason if ended else None, logprobs=logprobs, prompt_tokens=len(output.prompt_ids),
        samples=len(output.samples), loss="" if sample.ending is None else sample.ending.info.loss,
    )  # fmt: skip


def _part(question: ReadOutput, output: Output) -> OutputPart:
    """Return the tokens of which the process of texts makes the text."""
    sample, known = output.samples[question.sample], question.number == output.number
    offset = min(question.offset, question.since) if known else 0
    logprobs = sample.logprobs[question.since : question.since + LOGPROBS_MOST] if question.console else []
    return OutputPart(
        nonce=question.nonce, request=output.request, sample=question.sample, number=output.number, offset=offset,
        token_ids=sample.tokens[offset:], logprobs=logprobs,
        finish_reason=sample.finish_reason, prompt_tokens=len(output.prompt_ids),
        loss="" if sample.ending is None else sample.ending.info.loss, context=None if known else _context(output),
    )  # fmt: skip


def _context(output: Output) -> PromptContext:
    return PromptContext(
        prompt_tail=output.prompt_ids[-TAIL:].tolist(), sampling=output.sampling, samples=len(output.samples),
        speaks=bool(output.session) or output.sampling.detokenize,
    )  # fmt: skip
