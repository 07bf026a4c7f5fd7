"""Answers, whole or as events: the work that all forms share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.http import answer_fields as fields
from ppengine.http.api_errors import ApiError
from ppengine.http.generation import Generation, Part
from ppengine.http.request_fields import CommonFields
from ppengine.http.service import Service
from ppengine.protocol.control import Logprob

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_MARK = "\ufdd0text\ufdd0"
"""A text that no id and no name of a model has: U+FDD0 is no character."""


class Answer(Protocol):
    """The form of an answer: bytes of events for each part, or the whole for all of them."""

    def begin(self) -> bytes:
        """Return the events before the first part."""
        ...

    def part(self, part: Part) -> bytes:
        """Return the events of a part, which may be none."""
        ...

    def frame(self, choice: int) -> tuple[bytes, bytes] | None:
        """Return the bytes around the text of the next events of a choice; None: they may differ in more than that."""
        ...

    def end(self) -> bytes:
        """Return the events after the last part."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Return the events that end an answer which cannot go on."""
        ...

    def whole(self, parts: list[list[Part]]) -> msgspec.Struct:
        """Return the answer to a request that is not streamed; `parts` by choice."""
        ...

    def refusal(self, error: ApiError) -> bytes:
        """Return the body of an answer that is an error."""
        ...


def event(message: msgspec.Struct) -> bytes:
    """Return a server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(message)


def named_event(name: str, message: object) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(message))


def usage_of(generations: Sequence[Generation]) -> fields.Usage:
    """Return the tokens of all prompts and choices so far."""
    prompt = sum(len(one.prompt_ids) for one in generations)
    output = sum(one.output_tokens for one in generations)
    cached = sum(one.cached_tokens for one in generations)
    return fields.Usage(
        prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output,
        prompt_tokens_details=fields.PromptDetails(cached),
    )  # fmt: skip


def pairs(parts: Sequence[Part]) -> list[tuple[int, Logprob]]:
    """Return the tokens of `parts` with their log-probabilities."""
    return [pair for part in parts for pair in zip(part.token_ids, part.logprobs, strict=False)]


def prompt_tokens(generation: Generation, tokenizer: Tokenizer, wanted: int) -> fields.PromptTokens:
    """Return the log-probabilities of a prompt in vLLM's form: at each position its own token, and the best ones."""
    known = generation.prompt_logprobs or [None] * len(generation.prompt_ids)
    found: fields.PromptTokens = []
    for token, scores in zip(generation.prompt_ids, known, strict=True):
        if scores is None:
            found.append(None)
            continue
        best = [(one, value, rank) for rank, (one, value) in enumerate(scores.top[:wanted], 1)]
        both = {one: (value, rank) for one, value, rank in [*best, (token, scores.logprob, scores.rank)]}
        found.append({
            str(one): fields.PromptToken(logprob=value, rank=rank, decoded_token=tokenizer.token_text(one))
            for one, (value, rank) in both.items()
        })  # fmt: skip
    return found


def ending_of(
    choice: fields.CompletionChoice | fields.ChatChoice | fields.ChatChunkChoice, parts: Sequence[Part], *, ids: bool
) -> None:
    """Add vLLM's fields to a choice: how it stopped, and with `ids` its token ids."""
    if parts and (reason := parts[-1].stop_reason) is not None:
        choice.stop_reason = reason
    if ids:
        choice.token_ids = [token for part in parts for token in part.all_ids]


def _id_text(token: int) -> str:
    """Return the name of a token without its text, as vLLM writes it."""
    return f"token_id:{token}"


class ChunkedAnswer(ABC):
    """See `Answer`. A form whose events are chunks of the whole, up to `[DONE]`: completions and chats."""

    plain = False
    """Whether the event of a part depends on that part alone, unless it is the first of its choice."""
    plain_without_text = False
    """Whether such an event has the same form if its text is empty."""

    def __init__(self, name: str, service: Service, request: CommonFields, generations: Sequence[Generation]) -> None:
        self._name, self._created, self._model = name, service.now(), service.model
        self._tokenizer, self._generations = service.tokenizer, generations
        self._with_ids = bool(request.return_token_ids)
        self._token_text = _id_text if request.return_tokens_as_token_ids else service.tokenizer.token_text
        options = request.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._frames: dict[int, tuple[bytes, bytes] | None] = {}
        """Bytes around the text of a plain event, by choice; None before the second event, for the first has more."""

    @abstractmethod
    def chunk(self, part: Part | None, usage: fields.Usage | msgspec.UnsetType | None) -> msgspec.Struct | None:
        """Return an event, None for a part that shows nothing yet; without a part it has the usage alone."""

    def begin(self) -> bytes:
        """See `Answer`. Clients measure the time to the first event, so it comes with the first token."""
        return b""

    def part(self, part: Part) -> bytes:
        """See `Answer`. A plain event differs from the last one in its text alone."""
        if not (part.text or self.plain_without_text) or part.finish_reason is not None or part.logprobs:
            return self._made_of(part)
        frame = self._frames.get(part.choice)
        if frame is not None:
            return b"%b%b%b" % (frame[0], _encode(part.text), frame[1])
        if self.plain and not self._usage_always:
            if part.choice in self._frames:
                head, tail = self._made_of(msgspec.structs.replace(part, text=_MARK)).split(_encode(_MARK))
                self._frames[part.choice] = head, tail
                return head + _encode(part.text) + tail
            self._frames[part.choice] = None
        return self._made_of(part)

    def frame(self, choice: int) -> tuple[bytes, bytes] | None:
        """See `Answer`."""
        return self._frames.get(choice)

    def end(self) -> bytes:
        """See `Answer`."""
        made = self.chunk(None, self.usage()) if self._usage_at_end else None
        return DONE if made is None else event(made) + DONE

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return b"data: %b\n\n%b" % (error.encode(), DONE)

    def refusal(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return error.encode()

    def _made_of(self, part: Part) -> bytes:
        usage = self.usage() if self._usage_always else None if self._usage_at_end else msgspec.UNSET
        made = self.chunk(part, usage)
        return b"" if made is None else event(made)

    def usage(self) -> fields.Usage:
        """Return the tokens so far."""
        return usage_of(self._generations)
