"""The parameters of sampling, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class SamplingInputs:
    """Parameters of R rows."""

    temperature: list[float]
    """0: greedy."""
    top_p: list[float]
    top_k: list[int]
    """0 or less: all tokens."""
    seed: list[int]
    sample: list[int]
    position: list[int]
    """Position of the token to choose, counted from the first prompt token."""
    banned: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that must not be chosen in this step, by row."""
    logprobs: list[int] = field(default_factory=list)
    """-1: none; 0: the chosen token's; n: also the n best. Empty: none for all."""


@dataclass(frozen=True)
class SamplingOutput:
    """Chosen tokens [R] int64, and log-probabilities of the unmodified distribution."""

    tokens: Tensor
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]]
    """Chosen token's and best ones as (token, value), by row; best first, ties by id."""
