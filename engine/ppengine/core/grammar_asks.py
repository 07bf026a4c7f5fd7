"""Questions to a grammar process, and whether the answers fit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppengine.core.scheduler.request import Request
from ppengine.protocol.grammar_messages import Answers
from ppengine.protocol.structured_outputs import Grammar
from ppengine.protocol.token_mask import TokenMask


class Masked(NamedTuple):
    """Answer to a question: a mask, or the reason why there is none."""

    mask: TokenMask | None = None
    error: str = ""
    later: bool = False
    """Whether it may be asked again later: the grammar is not at fault."""
    forced: tuple[int, ...] = ()
    """Tokens that must follow; the mask is of the token behind them."""


@dataclass(eq=False, slots=True)
class Ask:
    """A question, until its answer. `matcher` 0: the grammar alone is compiled."""

    matcher: int
    grammar: Grammar
    tokens: list[int]
    """All tokens of the output; they do not change meanwhile."""
    held: list[int]
    """Tokens that are not allowed as long as others are."""
    end: Callable[[Masked], None]
    forced_most: int = 0
    """Most tokens to take that the grammar forces."""
    request: Request | None = None
    """The output; its masks are returned by `take` and do not go to `end`."""
    known: int = -1
    """Tokens that the process has in its matcher; -1: it has no matcher."""
    given_at: float = 0.0
    """Time at which the process got it, or at which it was queued for one that still starts."""
    compiles: bool = False
    """Whether the process may have to compile its grammar."""
    suspect: bool = False
    """Whether a process has ended while it was open."""
    ends: int = 0
    """Processes that have ended with this question alone."""


Taken = tuple[Request, TokenMask, Sequence[int]]
"""An output, its mask, and the tokens in front of it that its grammar forces."""


def fits(message: Answers, given: Mapping[int, Ask], vocabulary: int) -> bool:
    """Return whether a stage can use all masks of a message, and its answers fit the questions `given` by number.

    `vocabulary`: number of the model's logits.
    """
    places, errors = message.places, message.errors
    if len(places) != len(message.numbers) or not all(_is_mask(mask, vocabulary) for mask in message.masks):
        return False
    least = min(places, default=0)
    if least < -1 or max(places, default=-1) >= len(message.masks):
        return False
    if least < 0 or errors:
        lack = {number for number, place in zip(message.numbers, places, strict=True) if place < 0}
        if lack != errors.keys() or not lack.isdisjoint(message.forced):
            return False
    return all(_may_follow(tokens, given.get(number), vocabulary) for number, tokens in message.forced.items())


def _is_mask(mask: TokenMask, vocabulary: int) -> bool:
    """Return whether a mask has whole words of the vocabulary, and one place each if it has places."""
    size, most = len(mask.words), 4 * -(-vocabulary // 32)
    return size == most if not mask.places else size == len(mask.places) < most and size % 4 == 0


def _may_follow(forced: list[int], ask: Ask | None, vocabulary: int) -> bool:
    """Return whether forced tokens are in the vocabulary, and no more than the answer may have."""
    known = all(0 <= token < vocabulary for token in forced)
    return known and (ask is None or len(forced) <= ask.forced_most)
