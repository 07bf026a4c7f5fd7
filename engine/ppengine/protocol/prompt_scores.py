"""Log-probabilities of the tokens of a prompt, each after the tokens before it."""

from __future__ import annotations

import msgspec

VALUES_MOST = 2**17
"""Log-probabilities of one prompt: its tokens, times the best ones of each and the token's own."""

HELD_MOST = 2**22
"""Those of all open requests together: 130 to 170 bytes each, 0.7 GB at most."""


def values_of(tokens: int, best: int | None) -> int:
    """Return how many log-probabilities a prompt has: of each token, its own and the `best` ones; None: of none."""
    return 0 if best is None else tokens * (best + 1)


class PromptLogprob(msgspec.Struct, array_like=True):
    """One token of a prompt."""

    logprob: float
    rank: int
    """1: no token was more likely."""
    top: list[tuple[int, float]] = []
    """The most likely tokens, as (token, log-probability)."""


class PromptScores(msgspec.Struct, array_like=True):
    """The prompt's tokens at positions `[first, first + len)`; the first token of all has none before it."""

    request: str
    first: int
    logprobs: list[PromptLogprob]
