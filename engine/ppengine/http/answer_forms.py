"""Answers of completions and chats, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.http import answer_fields as fields
from ppengine.http.client_stats import Call
from ppengine.http.generation import Generation, Part
from ppengine.http.merging import merged
from ppengine.http.request_fields import ChatRequest, CommonFields, CompletionRequest
from ppengine.http.service import Service
from ppengine.protocol.control import Logprob

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """The form of an answer: a chunk for a part, or the whole for all of them."""

    def chunk(self, part: Part | None, usage: fields.Usage | msgspec.UnsetType | None) -> msgspec.Struct:
        """Return an event; without a part it has the usage alone."""
        ...

    def whole(self, parts: list[list[Part]], usage: fields.Usage) -> msgspec.Struct:
        """Return the answer to a request that is not streamed; `parts` by choice."""
        ...


async def stream(
    answer: Answer, generations: Sequence[Generation], request: CommonFields, call: Call
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed answer. Raises ApiError."""
    options = request.stream_options
    at_end = options is not None and options.include_usage
    always = options is not None and options.continuous_usage_stats
    async with aclosing(merged([one.parts() for one in generations])) as parts:
        async for part in parts:
            call.part(part.choice, len(part.token_ids))
            usage = usage_of(generations) if always else None if at_end else msgspec.UNSET
            yield event(answer.chunk(part, usage))
    if at_end:
        yield event(answer.chunk(None, usage_of(generations)))
    yield DONE


async def whole(answer: Answer, generations: Sequence[Generation], request: CommonFields, call: Call) -> msgspec.Struct:
    """Return the answer once all choices have ended. Raises ApiError."""
    parts: list[list[Part]] = [[] for _ in range(len(generations) * (request.n or 1))]
    async with aclosing(merged([one.parts() for one in generations])) as found:
        async for part in found:
            call.part(part.choice, len(part.token_ids))
            parts[part.choice].append(part)
    return answer.whole(parts, usage_of(generations))


def event(message: msgspec.Struct) -> bytes:
    """Return a server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(message)


def usage_of(generations: Sequence[Generation]) -> fields.Usage:
    """Return the tokens of all prompts and choices so far."""
    prompt = sum(len(one.prompt_ids) for one in generations)
    output = sum(one.output_tokens for one in generations)
    cached = sum(one.cached_tokens for one in generations)
    return fields.Usage(
        prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output,
        prompt_tokens_details=fields.PromptDetails(cached),
    )  # fmt: skip


class CompletionAnswer:
    """See `Answer`."""

    def __init__(self, name: str, service: Service, request: CompletionRequest) -> None:
        self._name, self._created, self._model = name, service.now(), service.model
        self._tokenizer, self._wanted = service.tokenizer, request.logprobs

    def chunk(self, part: Part | None, usage: fields.Usage | msgspec.UnsetType | None) -> msgspec.Struct:
        """See `Answer`."""
        return self._made([] if part is None else [self._choice([part])], usage)

    def whole(self, parts: list[list[Part]], usage: fields.Usage) -> msgspec.Struct:
        """See `Answer`."""
        return self._made([self._choice(one) for one in parts], usage)

    def _made(
        self, choices: list[fields.CompletionChoice], usage: fields.Usage | msgspec.UnsetType | None
    ) -> fields.Completion:
        return fields.Completion(id=self._name, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice(self, parts: list[Part]) -> fields.CompletionChoice:
        return fields.CompletionChoice(
            index=parts[0].choice, text="".join(part.text for part in parts),
            logprobs=None if self._wanted is None else self._logprobs(parts), finish_reason=parts[-1].finish_reason,
        )  # fmt: skip

    def _logprobs(self, parts: list[Part]) -> fields.CompletionLogprobs:
        made, place = fields.CompletionLogprobs([], [], [], []), parts[0].offset
        for token, logprob in _pairs(parts):
            text = self._tokenizer.token_text(token)
            made.tokens.append(text)
            made.token_logprobs.append(logprob.chosen)
            best = {self._tokenizer.token_text(one): value for one, value in logprob.top[: self._wanted]}
            made.top_logprobs.append(best)
            made.text_offset.append(place)
            place += len(text)
        return made


class ChatAnswer:
    """See `Answer`."""

    def __init__(self, name: str, service: Service, request: ChatRequest) -> None:
        self._name, self._created, self._model = name, service.now(), service.model
        self._tokenizer, self._wanted = service.tokenizer, request.wanted_logprobs()
        self._begun: set[int] = set()

    def chunk(self, part: Part | None, usage: fields.Usage | msgspec.UnsetType | None) -> msgspec.Struct:
        """See `Answer`. The role comes with the first token: a chunk before it would be counted as the first token."""
        choices = []
        if part is not None:
            delta = fields.ChatDelta(content=part.text if part.text else msgspec.UNSET)
            if part.choice not in self._begun:
                self._begun.add(part.choice)
                delta.role, delta.content = "assistant", part.text
            choices.append(
                fields.ChatChunkChoice(
                    index=part.choice, delta=delta, logprobs=self._logprobs([part]), finish_reason=part.finish_reason
                )
            )
        return fields.ChatChunk(id=self._name, created=self._created, model=self._model, choices=choices, usage=usage)

    def whole(self, parts: list[list[Part]], usage: fields.Usage) -> msgspec.Struct:
        """See `Answer`."""
        choices = [
            fields.ChatChoice(
                index=index, message=fields.ChatMessage(content="".join(part.text for part in one)),
                logprobs=self._logprobs(one), finish_reason=one[-1].finish_reason,
            )
            for index, one in enumerate(parts)
        ]  # fmt: skip
        return fields.ChatCompletion(
            id=self._name, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def _logprobs(self, parts: list[Part]) -> fields.ChatLogprobs | None:
        if self._wanted is None:
            return None
        return fields.ChatLogprobs([_token_logprob(self._tokenizer, *pair, self._wanted) for pair in _pairs(parts)])


def _pairs(parts: list[Part]) -> list[tuple[int, Logprob]]:
    return [pair for part in parts for pair in zip(part.token_ids, part.logprobs, strict=False)]


def _token_logprob(tokenizer: Tokenizer, token: int, logprob: Logprob, most: int) -> fields.TokenLogprob:
    text = tokenizer.token_text(token)
    top = [
        fields.TopLogprob(word := tokenizer.token_text(one), value, list(word.encode()))
        for one, value in logprob.top[:most]
    ]
    return fields.TokenLogprob(text, logprob.chosen, list(text.encode()), top)
