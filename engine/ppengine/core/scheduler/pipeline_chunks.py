"""How many prompt tokens a step takes, so that a pipeline fills and drains soon.

A stage begins a step when the stage before it has ended it. So P stages need W + (P - 1) W / n token times for W tokens
in n equal steps, and n times the fixed part of a step. The sum is least for n = sqrt(W (P - 1) / F), if a stage
computes F tokens in the time of a fixed part. In a stream of prompts W is large, and steps reach the profile's limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppengine.core.scheduler.request import Request

FIXED_TOKENS = 256
"""Tokens that a stage computes in the time of a step's fixed part.

An H200 computes 155 in bfloat16 while it reads the weights once; launches and small tiles come on top.
"""
LEAST_TOKENS = 512
"""Steps of fewer tokens use a card badly."""
ROUND = 64
SEEN_MOST = 16
"""Waiting requests whose tokens are counted; the others count as these do."""
_KEEP = 0.95
"""Weight that each start leaves to those before it."""


def prompt_tokens_of_step(left: int, stages: int, most: int) -> int:
    """Return how many of `left` prompt tokens a step of at most `most` tokens takes, with two stages or more."""
    steps = max(1, min(math.isqrt(left * (stages - 1) // FIXED_TOKENS), round(left / LEAST_TOKENS)))
    return min(most, max(LEAST_TOKENS, -(-left // (steps * ROUND)) * ROUND))


@dataclass(eq=False)
class PromptSupply:
    """Tokens of prompts that are left to compute, and how many of them a step takes."""

    _stages: int
    _most: int
    _left: int = field(init=False, default=0)
    """Tokens left before the newest step, and its limit."""
    _limit: int = field(init=False, default=0)
    _tokens: float = field(init=False, default=0.0)
    """Those of the newest requests that started, and how many of them the prefix cache had."""
    _found: float = field(init=False, default=0.0)

    def started(self, tokens: int, found: int) -> None:
        """Note a request that starts with `tokens`, of which the prefix cache has the first `found`."""
        self._tokens = _KEEP * self._tokens + tokens
        self._found = _KEEP * self._found + found

    def limit(self, prefilling: Sequence[Request], waiting: Sequence[Request], may_start: int) -> int:
        """Return how many tokens a step takes of prompts that run, and of the first `may_start` that wait.

        While there are ever fewer, steps have the same size.
        """
        left = self._count(prefilling, waiting, may_start)
        if left >= self._left:
            self._limit = prompt_tokens_of_step(left, self._stages, self._most)
        self._left = left
        return self._limit

    def _count(self, prefilling: Sequence[Request], waiting: Sequence[Request], may_start: int) -> int:
        """Return about how many tokens are left."""
        left = sum(request.num_tokens - request.num_computed for request in prefilling)
        seen = waiting[: max(0, min(may_start, SEEN_MOST))]
        if seen:
            share = 1.0 - self._found / self._tokens if self._tokens else 1.0
            tokens = sum(request.num_tokens for request in seen) * min(may_start, len(waiting)) / len(seen)
            left += round(tokens * share)
        return left
