"""Answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from typing_extensions import override

from ppengine.http import answer_fields as fields
from ppengine.http.answer_forms import ChunkedAnswer, ending_of, pairs, prompt_tokens
from ppengine.http.generation import Generation, Part
from ppengine.http.request_fields import CompletionRequest
from ppengine.http.service import Service


class CompletionAnswer(ChunkedAnswer):
    """See `Answer`. With `echo`, the first part of a choice begins with the prompt."""

    plain_without_text = True

    def __init__(
        self, name: str, service: Service, request: CompletionRequest, generations: Sequence[Generation]
    ) -> None:
        super().__init__(name, service, request, generations)
        self._wanted, self.plain = request.logprobs, not self._with_ids
        self._scored, self._prompt_alone = request.prompt_logprobs, request.prompt_alone
        self._prompts = _texts(request, generations, service) if request.echo else {}
        self._begun: set[int] = set()
        self._echoes: dict[int, fields.CompletionLogprobs] = {}
        """Log-probabilities of the prompts, by generation: its choices share them."""
        self._tokens: dict[int, fields.PromptTokens] = {}
        """The same in vLLM's form."""

    def chunk(self, part: Part | None, usage: fields.Usage | msgspec.UnsetType | None) -> fields.Completion:
        """See `ChunkedAnswer`."""
        return self._made([] if part is None else [self._choice([part])], usage)

    def whole(self, parts: list[list[Part]]) -> fields.Completion:
        """See `Answer`."""
        return self._made([self._choice(one) for one in parts], self.usage())

    @override
    def usage(self) -> fields.Usage:
        usage = super().usage()
        if self._prompt_alone:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _made(
        self, choices: list[fields.CompletionChoice], usage: fields.Usage | msgspec.UnsetType | None
    ) -> fields.Completion:
        return fields.Completion(id=self._name, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice(self, parts: list[Part]) -> fields.CompletionChoice:
        number, reason = parts[0].choice, parts[-1].finish_reason
        generation = self._generations[number // self._generations[0].choices]
        begins, prompt = number not in self._begun, self._prompts.get(id(generation), "")
        self._begun.add(number)
        if self._prompt_alone:
            parts, reason = [], "length" if reason == "stop" else reason
        logprobs = None
        if self._wanted is not None:
            logprobs = fields.CompletionLogprobs([], [], [], [])
            if self._prompts and begins:
                echo = self._echo(generation, self._wanted)
                logprobs = fields.CompletionLogprobs(*(list(each) for each in msgspec.structs.astuple(echo)))
            self._add_output(logprobs, parts, len(prompt), self._wanted)
        choice = fields.CompletionChoice(
            index=number, text=(prompt if begins else "") + "".join(part.text for part in parts), logprobs=logprobs,
            finish_reason=reason,
        )  # fmt: skip
        ending_of(choice, parts, ids=self._with_ids)
        if self._with_ids and begins:
            choice.prompt_token_ids = generation.prompt_ids
        if self._scored is not None:
            if id(generation) not in self._tokens:
                self._tokens[id(generation)] = prompt_tokens(generation, self._tokenizer, self._scored)
            choice.prompt_logprobs = self._tokens[id(generation)]
        return choice

    def _echo(self, generation: Generation, wanted: int) -> fields.CompletionLogprobs:
        """Return the tokens of the prompt. The first has no log-probability: no token is before it."""
        if id(generation) in self._echoes:
            return self._echoes[id(generation)]
        made = self._echoes[id(generation)] = fields.CompletionLogprobs([], [], [], [])
        known, place = generation.prompt_logprobs or [None] * len(generation.prompt_ids), 0
        for token, scores in zip(generation.prompt_ids, known, strict=True):
            text = self._tokenizer.token_text(token)
            made.tokens.append(self._token_text(token))
            made.text_offset.append(place)
            made.token_logprobs.append(None if scores is None else scores.logprob)
            if scores is None:
                made.top_logprobs.append(None)
            else:
                best = {self._token_text(one): value for one, value in scores.top[:wanted]}
                made.top_logprobs.append({self._token_text(token): scores.logprob} | best)
            place += 0 if self._tokenizer.is_silent(token) else len(text)
        return made

    def _add_output(self, made: fields.CompletionLogprobs, parts: Sequence[Part], before: int, wanted: int) -> None:
        """Add the tokens of `parts`; `before`: characters of the prompt in front of the output."""
        for part in parts:
            place = before + part.offset
            for token, logprob in pairs([part]):
                text = self._tokenizer.token_text(token)
                best = {self._token_text(one): value for one, value in logprob.top[:wanted]}
                made.tokens.append(self._token_text(token))
                made.token_logprobs.append(logprob.chosen)
                made.top_logprobs.append(best)
                made.text_offset.append(place)
                place += 0 if self._tokenizer.is_silent(token) else len(text)


def _texts(request: CompletionRequest, generations: Sequence[Generation], service: Service) -> Mapping[int, str]:
    """Return the prompts as texts, by generation: as they came, or the text of their tokens."""
    texts = {}
    for one, given in zip(generations, request.prompts(), strict=True):
        whole = isinstance(given, str) and request.truncate_prompt_tokens is None
        texts[id(one)] = given if isinstance(given, str) and whole else service.tokenizer.decode(one.prompt_ids)
    return texts
