"""The answers to one request as they grow: pieces of the core become text, up to a stop text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from ppengine.checkpoint.piece_text import PieceText
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.http.api_errors import ApiError
from ppengine.http.followed import Followed
from ppengine.http.front_link import FrontLink
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
    """Characters of the choice before its first token; `text` may begin earlier, if a stop text was possible."""
    finish_reason: str | None
    kept: int
    """Number of tokens that belong to the choice: with a stop token."""
    stop_text: str | None = None
    """The stop text that ended it."""
    stop_token: int | None = None
    """The token that ended it, which is none of `token_ids`."""
    stop_reason: str | int | None = None
    """The stop text, or a stop token of the request, that ended it."""

    @property
    def all_ids(self) -> list[int]:
        """Its tokens, with a stop token."""
        return self.token_ids if self.stop_token is None else [*self.token_ids, self.stop_token]


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
    stop_token_ids: Collection[int] = ()
    """Stop tokens of the request, beside that of the model."""
    with_stop: bool = False
    """Whether a stop text, or the text of a stop token, ends the answer."""
    prompt_logprobs: list[PromptLogprob | None] = field(default_factory=list)
    """One a token of the prompt if they are wanted, from the first part on."""
    output_tokens: int = 0
    over: bool = field(init=False, default=False)
    """Whether all choices have ended."""
    _choices: list[PieceText] = field(init=False)
    _cached: list[int] = field(init=False, default_factory=list)
    """Tokens of the prompt that were cached, of each choice whose end the core has reported."""
    _held: list[Piece] = field(init=False, default_factory=list)
    """Pieces of other samples that came before sample 0's, which has the log-probabilities of the prompt."""
    _scores_due: bool = field(init=False)
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin the texts."""
        self._choices = [
            PieceText(self.tokenizer.stream(self.prompt_ids, self.spoken), self.stops, self.min_tokens)
            for _ in self.followed.counts
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

    @property
    def even(self) -> bool:
        """Whether the next token adds its fixed text alone, if it has one, to the only choice."""
        return len(self._choices) == 1 and self._choices[0].even

    def catch_up(self, tokens: int, characters: int) -> None:
        """Count tokens that have added their fixed texts, and the characters of these."""
        self.output_tokens += tokens
        self._choices[0].catch_up(characters)

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
        part = self._part(choice, piece)
        if not choice.over:
            return part if part.text or part.token_ids else None
        if reason is not None:
            self._cached.append(piece.cached_tokens)
        else:
            self.link.end_sample(self.followed, piece.sample)
        self._left -= 1
        self.over = not self._left
        return part

    @property
    def size(self) -> int:
        """Output tokens of all choices, and log-probabilities of the prompt."""
        best = len(self.prompt_logprobs[-1].top) if self.prompt_logprobs and self.prompt_logprobs[-1] else 0
        return self.output_tokens + len(self.prompt_logprobs) * (1 + best)

    def leave(self) -> None:
        """Abort what the core still computes of it."""
        self.link.leave([self.followed])
        self.followed.leave()

    def _part(self, choice: PieceText, piece: Piece) -> Part:
        tokens, begin = piece.token_ids, choice.length
        text, spoken, kept, reason = choice.take(tokens, piece.finish_reason)
        self.output_tokens += kept
        if spoken < len(tokens):
            tokens = tokens[:spoken]
        logprobs = piece.logprobs and piece.logprobs[:spoken]
        part = Part(self.first + piece.sample, text, tokens, logprobs, begin, reason, kept)
        if reason == "stop":
            self._stop(part, choice, piece)
        return part

    def _stop(self, part: Part, choice: PieceText, piece: Piece) -> None:
        """Add to the last part of a choice how it stopped."""
        if choice.stop_text is not None:
            part.stop_text = part.stop_reason = choice.stop_text
        elif part.kept > len(part.token_ids):
            part.stop_token = token = piece.token_ids[part.kept - 1]
            part.stop_reason = token if token in self.stop_token_ids else None
        if self.with_stop:
            part.text += part.stop_text or self._text_of(part.stop_token)

    def _text_of(self, token: int | None) -> str:
        """Return the text of a stop token in an answer."""
        if token is None or self.tokenizer.is_silent(token):
            return "" if token is None else self.spoken.get(token, "")
        return self.tokenizer.token_text(token)
