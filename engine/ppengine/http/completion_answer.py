"""Answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ppengine.http import answer_fields as fields
from ppengine.http.answer_forms import ChunkedAnswer, pairs
from ppengine.http.generation import Generation, Part
from ppengine.http.request_fields import CompletionRequest
from ppengine.http.service import Service


class CompletionAnswer(ChunkedAnswer):
    """See `Answer`."""

    def __init__(
        self, name: str, service: Service, request: CompletionRequest, generations: Sequence[Generation]
    ) -> None:
        super().__init__(name, service, request, generations)
        self._wanted, self.plain = request.logprobs, True

    def chunk(self, part: Part | None, usage: fields.Usage | msgspec.UnsetType | None) -> fields.Completion:
        """See `ChunkedAnswer`."""
        return self._made([] if part is None else [self._choice([part])], usage)

    def whole(self, parts: list[list[Part]]) -> fields.Completion:
        """See `Answer`."""
        return self._made([self._choice(one) for one in parts], self.usage())

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
        for token, logprob in pairs(parts):
            text = self._tokenizer.token_text(token)
            made.tokens.append(text)
            made.token_logprobs.append(logprob.chosen)
            best = {self._tokenizer.token_text(one): value for one, value in logprob.top[: self._wanted]}
            made.top_logprobs.append(best)
            made.text_offset.append(place)
            place += len(text)
        return made
