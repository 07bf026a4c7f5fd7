"""The text of one request, made from the core's tokens alone: the same however they come in pieces."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ppengine.checkpoint.growing_text import GrowingText
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.text_messages import PromptContext


@dataclass(slots=True)
class SampleText:
    """One continuation. Tokens behind a stop text are counted, and do not belong to it."""

    growing: GrowingText | None
    """None: it has no text."""
    stop_ids: Collection[int]
    """Tokens that end it, without a text of their own."""
    count: int = 0
    """Tokens of the core so far."""
    kept: int = 0
    """Those of them that belong to it."""
    reason: str | None = None
    """The core's finish reason, once it has ended there."""
    answered_at: float = -math.inf
    """Time of the newest answer to a console."""

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended it, perhaps not yet in the core."""
        return self.growing is not None and self.growing.stopped

    @property
    def finish_reason(self) -> str | None:
        """The finish reason, once it has ended in the core. A stop text may come with the last allowed token."""
        return "stop" if self.reason is not None and self.stopped else self.reason

    @property
    def text(self) -> str:
        """Its text so far."""
        return "" if self.growing is None else self.growing.text

    @property
    def shown(self) -> int:
        """Number of characters that a reader may have, because they will not change."""
        return 0 if self.growing is None else self.growing.shown

    def take(self, offset: int, tokens: Sequence[int], reason: str | None) -> bool:
        """Take tokens from `offset` on, of which some may be known; `reason`: they are the last.

        Return False if tokens before them are missing.
        """
        if offset > self.count:
            return False
        if self.reason is not None:
            return True
        more = tokens[self.count - offset :]
        by_token = reason == "stop" and bool(more) and more[-1] in self.stop_ids
        if not self.stopped:
            spoken = more[:-1] if by_token else more
            found = self.growing.push_each(spoken) if self.growing is not None and spoken else None
            self.kept = self.count + (len(more) if found is None else found)
        self.count += len(more)
        if reason is not None:
            self.reason = reason
            if self.growing is not None and not self.stopped:
                self.growing.end(by_stop_token=by_token)
        return True


@dataclass(slots=True)
class RequestText:
    """All continuations of one request. `number`: its number in the core, as requests may have one name in turn."""

    number: int
    samples: list[SampleText]
    followed: bool = False
    """Whether its stop texts are looked for, so that it stays."""
    weight: int = field(init=False, default=0)
    """Tokens that the store has counted."""

    @classmethod
    def of(cls, number: int, context: PromptContext, tokenizer: Tokenizer, eos: Collection[int]) -> RequestText:
        """Return the texts of a request, without tokens so far."""
        one = (text_of(context.prompt_tail, context.sampling, tokenizer, eos, speaks=context.speaks)
               for _ in range(context.samples))  # fmt: skip
        return cls(number, list(one))

    def sample(self, index: int) -> SampleText | None:
        """Return a continuation; None if the request has not that many."""
        return self.samples[index] if 0 <= index < len(self.samples) else None


def text_of(
    prompt: Sequence[int], sampling: SamplingParams, tokenizer: Tokenizer, eos: Collection[int], *, speaks: bool
) -> SampleText:
    """Return the text of a continuation behind `prompt`, of which the last tokens do."""
    growing = GrowingText(tokenizer.stream(prompt), sampling.stop, sampling.min_tokens) if speaks else None
    # A grammar that must end has no other token.
    ends = () if sampling.ignore_eos and sampling.structured_outputs is None else eos
    return SampleText(growing, frozenset(sampling.stop_token_ids).union(ends))
