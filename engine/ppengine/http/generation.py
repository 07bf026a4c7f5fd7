"""The answers to one request as they grow: pieces of the core become text, up to a stop text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ppengine.checkpoint.growing_text import GrowingText
from ppengine.checkpoint.tokenizer import DetokStream, Tokenizer
from ppengine.http.api_errors import ApiError
from ppengine.http.front_link import Followed, FrontLink
from ppengine.protocol.control import Logprob
from ppengine.protocol.offline import Piece
from ppengine.protocol.prompt_scores import PromptLogprob

_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}
"""Finish reasons of the core that a client hears; any other is an error."""


class Part(msgspec.Struct, gc=False):
    """Text and tokens that one piece of the core adds to a choice."""

    choice: int
    text: str
    token_ids: list[int]
    """Tokens that have a text: without a stop token."""
    logprobs: list[Logprob]
    """One a token where they were asked for."""
    offset: int
    """Characters of the choice's text before it."""
    finish_reason: str | None
    stop_text: str | None = None
    """The stop text that ended it."""


@dataclass(slots=True)
class _Choice:
    """One continuation."""

    stream: DetokStream
    growing: GrowingText | None
    """Its text, if a stop text may end it; otherwise all text is given out and none is kept."""
    given: int = 0
    """Characters that were given out."""
    over: bool = False


@dataclass(eq=False, slots=True)
class Generation:
    """All continuations of one prompt. `take` its pieces to the end, then `leave`; leaving before aborts it."""

    link: FrontLink
    tokenizer: Tokenizer
    followed: Followed
    prompt_ids: list[int]
    first: int
    """Number of its first choice in the answer."""
    stops: list[str]
    min_tokens: int
    spoken: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that have a text in the answer."""
    scored: bool = False
    """Whether the log-probabilities of the prompt are wanted."""
    prompt_logprobs: list[PromptLogprob | None] = field(default_factory=list)
    """One a token of the prompt if they are wanted, from the first part on."""
    output_tokens: int = 0
    over: bool = field(init=False, default=False)
    """Whether all choices have ended."""
    _choices: list[_Choice] = field(init=False)
    _cached: list[int] = field(init=False, default_factory=list)
    """Tokens of the prompt that were cached, of each choice whose end the core has reported."""
    _held: list[Piece] = field(init=False, default_factory=list)
    """Pieces of other samples that came before sample 0's, which has the log-probabilities of the prompt."""
    _scores_due: bool = field(init=False)
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin the texts."""
        streams = [self.tokenizer.stream(self.prompt_ids, self.spoken) for _ in self.followed.counts]
        self._choices = [
            _Choice(stream, GrowingText(stream, self.stops, self.min_tokens) if self.stops else None)
            for stream in streams
        ]
        self._left = len(self._choices)
        self._scores_due = self.scored and len(self.prompt_ids) > 1

    @property
    def choices(self) -> int:
        """Number of continuations."""
        return len(self._choices)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the first choice to be computed found in the cache; it shares its own."""
        return min(self._cached, default=0)

    def ready(self, piece: Piece) -> list[Piece]:
        """Return the pieces to `take` now, `piece` among them unless it must wait for those of sample 0."""
        if self._scores_due and piece.sample and not self.followed.error:
            self._held.append(piece)
            return []
        if not self._scores_due:
            return [piece]
        held, self._held, self._scores_due = self._held, [], False
        return [piece, *held]

    def take(self, piece: Piece) -> Part | None:
        """Return the part that a piece adds; None if it adds nothing. Raises ApiError if the request cannot go on."""
        if self.followed.error:
            raise ApiError(503, "service_unavailable_error", self.followed.error)
        choice, reason = self._choices[piece.sample], piece.finish_reason
        if choice.over:
            return None
        if reason is not None and reason not in _REASONS:
            raise ApiError(500, "server_error", f"the request was {reason}: {piece.loss or 'the engine ended it'}")
        if piece.prompt_logprobs:
            self.prompt_logprobs = piece.prompt_logprobs
        elif self.scored and not self.prompt_logprobs and len(self.prompt_ids) > 1 and piece.token_ids:
            text = "the log-probabilities of the prompt are lost, by a restart of the engine's core or an abort"
            raise ApiError(503, "service_unavailable_error", f"{text}; send it again")
        if choice.growing is None:
            part = self._free(choice, piece)
            if reason is None:
                return part if part.token_ids else None
        else:
            part = self._part(choice, choice.growing, piece)
        if reason is not None:
            self._cached.append(piece.cached_tokens)
        choice.over = part.finish_reason is not None
        self._left -= choice.over
        self.over = not self._left
        if choice.over and reason is None:
            self.link.end_sample(self.followed, piece.sample)
        return part if part.text or part.token_ids or choice.over else None

    @property
    def size(self) -> int:
        """Output tokens of all choices, and log-probabilities of the prompt."""
        best = len(self.prompt_logprobs[-1].top) if self.prompt_logprobs and self.prompt_logprobs[-1] else 0
        return self.output_tokens + len(self.prompt_logprobs) * (1 + best)

    def leave(self) -> None:
        """Abort what the core still computes of it."""
        self.link.leave([self.followed])

    def _free(self, choice: _Choice, piece: Piece) -> Part:
        """Return the part of a piece that no stop text can end."""
        tokens, reason, stream, begin = piece.token_ids, piece.finish_reason, choice.stream, choice.given
        self.output_tokens += len(tokens)
        by_token = reason == "stop" and bool(tokens)
        if by_token:
            tokens = tokens[:-1]
        text = stream.push(tokens[0]) if len(tokens) == 1 else "".join(map(stream.push, tokens))
        if reason is not None and not by_token:
            text += stream.flush()
        choice.given = begin + len(text)
        logprobs = piece.logprobs and piece.logprobs[: len(tokens)]
        return Part(self.first + piece.sample, text, tokens, logprobs, begin, reason)

    def _part(self, choice: _Choice, growing: GrowingText, piece: Piece) -> Part:
        tokens, reason, begin = piece.token_ids, piece.finish_reason, choice.given
        by_token = reason == "stop" and bool(tokens)
        texts = tokens[:-1] if by_token else tokens
        for count, token in enumerate(texts, 1):
            if growing.push(token):
                texts, by_token, reason = texts[:count], False, "stop"
                break
        self.output_tokens += len(texts) + by_token
        if reason is not None:
            growing.end(by_stop_token=by_token)
        choice.given = growing.shown
        text = growing.text[begin : choice.given]
        logprobs = piece.logprobs[: len(texts)]
        return Part(self.first + piece.sample, text, texts, logprobs, begin, reason, growing.stop_text)
