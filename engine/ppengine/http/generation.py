"""The answers to one request as they grow: pieces of the core become text, up to a stop text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ppengine.checkpoint.growing_text import GrowingText
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.http.api_errors import ApiError
from ppengine.http.front_link import Followed, FrontLink
from ppengine.protocol.control import Logprob
from ppengine.protocol.offline import Piece
from ppengine.protocol.prompt_scores import PromptLogprob

_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}
"""Finish reasons of the core that a client hears; any other is an error."""


class Part(NamedTuple):
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

    growing: GrowingText
    given: int = 0
    """Characters that were given out."""
    over: bool = False


@dataclass(eq=False)
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
    cached_tokens: int = 0
    _choices: list[_Choice] = field(init=False)
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin the texts."""
        stream = self.tokenizer.stream
        self._choices = [
            _Choice(GrowingText(stream(self.prompt_ids, self.spoken), self.stops, self.min_tokens))
            for _ in self.followed.counts
        ]
        self._left = len(self._choices)

    @property
    def choices(self) -> int:
        """Number of continuations."""
        return len(self._choices)

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        return self._left == 0

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
            text = "the log-probabilities of the prompt are lost, as the engine's core was restarted; send it again"
            raise ApiError(503, "service_unavailable_error", text)
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        part = self._part(choice, piece.sample, piece.token_ids, piece.logprobs, reason)
        choice.over = part.finish_reason is not None
        self._left -= choice.over
        if choice.over and reason is None:
            self.link.end_sample(self.followed, piece.sample)
        return part if part.text or part.token_ids or choice.over else None

    def leave(self) -> None:
        """Abort what the core still computes of it."""
        self.link.leave([self.followed])

    def _part(
        self, choice: _Choice, sample: int, tokens: list[int], logprobs: list[Logprob], reason: str | None
    ) -> Part:
        growing, begin = choice.growing, choice.given
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
        return Part(self.first + sample, text, texts, logprobs[: len(texts)], begin, reason, growing.stop_text)
