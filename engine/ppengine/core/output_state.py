"""The output of one request: the tokens and the text of each continuation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ppengine.checkpoint.tokenizer import DetokStream
from ppengine.core.stop_text import find_stop, may_begin
from ppengine.protocol.control import Logprob
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.sampling import SamplingParams


class Ending(NamedTuple):
    """The detail of a request at its end, that time of the clock, and its figures."""

    at: float
    detail: RequestDetail
    info: FinishedInfo


@dataclass(slots=True)
class Sample:
    """One continuation as it grows."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stream: DetokStream | None = None
    held_back: int = 0
    """Trailing characters, not shown yet, that may begin a stop text."""
    ending: Ending | None = None
    stopped: bool = False
    """The text was cut at a stop text."""

    late: int = 0
    """Leading tokens, those of a core before this one, whose text is not made yet."""

    @property
    def shown(self) -> int:
        """Number of characters that a reader may have, because they will not change."""
        return len(self.text) - self.held_back

    def push(self, token: int, sampling: SamplingParams, ended: bool) -> bool:
        """Append one token; return whether the text now ends in a stop text. `ended`: a stop token, no text."""
        self.tokens.append(token)
        return self.stream is not None and not ended and self._add_text(token, len(self.tokens), sampling)

    def finish(self, reason: str) -> None:
        """Set the finish reason, and end the text."""
        if self.stopped:
            # Also if the stop text came with the last allowed token.
            reason = "stop"
        elif self.stream is not None and reason != "stop":
            self.text += self.stream.flush()
        self.finish_reason, self.held_back, self.stream = reason, 0, None

    def catch_up(self, sampling: SamplingParams) -> None:
        """Make the text of the tokens that came from a core before this one."""
        tokens, self.late = self.tokens[: self.late], 0
        by_stop = self.finish_reason == "stop"
        if self.stream is not None and not sampling.stop:
            self.text += self.stream.extend(tokens[:-1] if by_stop else tokens)
        elif self.stream is not None:
            for count, token in enumerate(tokens, 1):
                before = self.text
                if self._add_text(token, count, sampling):
                    break
                if by_stop and count == len(tokens):
                    self.text = before  # A stop token has no text.
        if self.finish_reason is not None:
            self.finish(self.finish_reason)

    def _add_text(self, token: int, count: int, sampling: SamplingParams) -> bool:
        """Append the text of token number `count`; return whether it completes a stop text."""
        assert self.stream is not None, "a sample without text has no stop texts"
        piece = self.stream.push(token)
        self.text += piece
        stops = sampling.stop
        if not stops or not piece:
            return False
        if count >= sampling.min_tokens:
            at = find_stop(self.text, stops, len(piece))
            if at is not None:
                self.text, self.held_back, self.stopped = self.text[:at], 0, True
                return True
        self.held_back = may_begin(self.text, stops)
        return False


@dataclass(slots=True)
class Output:
    """All continuations of one request."""

    request: str
    session: str
    prompt_ids: list[int]
    sampling: SamplingParams
    samples: list[Sample]
    number: int = 0
    """Number of its first sample in order of arrival."""
    deaths: int = 0
    """Ends of a core of which it may be the reason, without a token between them."""
    changed: int = 0
    read_at: float | None = None
    """When its end was first answered, on the hub's clock; the answer may have been lost on its way."""

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)
