"""Seeds of requests that have none of their own, from the seed of the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from ppengine.common.config import ConfigError
from ppengine.protocol.sampling import SamplingParams


def checked_seed(seed: int | None) -> int | None:
    """Return the seed of an engine. Raises ConfigError for one that is none."""
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ConfigError(f"LLM: seed is {str(seed)[:80]!r}; it must be a whole number, or None")
    return seed


def seeded(params: Sequence[SamplingParams], seed: int | None, first: int) -> Sequence[SamplingParams]:
    """Return sampling parameters that have seeds: those without one get it from `seed` and their number.

    `first` is the number of the first; `seed` None: they stay as they are, and the core draws their seeds.
    """
    if seed is None:
        return params
    return [
        msgspec.structs.replace(one, seed=_seed_of(seed, number)) if one.seed is None and not one.greedy else one
        for number, one in enumerate(params, first)
    ]


def _seed_of(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
