"""Prompts over an engine whose chunks lie in files, each output judged by transformers: the base of store drills."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reference
from checkpoints import make_checkpoint
from operators import Operator
from ppengine.common.config import Profile

from profiles import small

CHUNK = 256
"""Tokens of a chunk, the unit of a store."""


class StoreRun:
    """A small model with `count` prompts of `low` to `high` tokens, and `steps` behind each; counts of requests."""

    def __init__(self, folder: Path, seed: int, count: int, *, low: int, high: int, most: int, steps: int) -> None:
        """`most`: tokens that the model takes."""
        self._random, self._most, self._steps = random.Random(seed), most, steps
        self._folder = make_checkpoint(folder / "model", "llama", dtype="float64", max_position_embeddings=most)
        self._files = folder / "chunks"
        self._prompts = reference.prompts(count, 100, low=low, high=high, seed=seed)
        self._expected = [reference.greedy(self._folder, prompt, steps) for prompt in self._prompts]
        self.requests = self.wrong = self.lost = 0

    def profile(self, memory: dict[str, Any]) -> Profile:
        """Return an engine with `memory` for a part of the prompts."""
        tiers = {
            "host": True, "find_ms": 5_000, "fetch_ms": 10_000,
            "backends": {"disk": {"kind": "files", "url": str(self._files), "quota_gib": 1.0, "write": "always"}},
        }  # fmt: skip
        # Steps are short and slow, so that computing is predicted to take longer than a fetch.
        scheduler = {"max_num_batched_tokens": 64}
        return small(self._folder, memory=memory, model={"max_model_len": self._most}, tiers=tiers, scheduler=scheduler)

    async def ask(self, op: Operator, chosen: Sequence[int]) -> None:
        """Submit the prompts `chosen` at once, and judge their tokens."""
        names = await op.submit_all([self._prompts[number] for number in chosen], max_tokens=self._steps)
        for number, name in zip(chosen, names, strict=True):
            self.requests += 1
            try:
                self.wrong += await op.tokens(name) != self._expected[number]
            except AssertionError:
                self.lost += 1
