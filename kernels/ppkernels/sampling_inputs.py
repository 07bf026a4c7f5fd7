"""The parameters of sampling, and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ppkernels.token_masks import TokenMask

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Adjustment:
    """Changes of one row's logits before its token is chosen; see `ppkernels.adjust`."""

    prompt: Ints
    output: Ints
    """Tokens before the one to choose."""
    min_p: float = 0.0
    """0: none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """1: none."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that the output must not have."""
    allowed: Sequence[int] | None = None
    """Tokens that may be chosen; None: all."""


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
    adjustments: dict[int, Adjustment] = field(default_factory=dict)
    """By row; the other rows' logits are taken as they are."""
    masks: dict[int, TokenMask] = field(default_factory=dict)
    """Tokens that may be chosen, by row: see `ppkernels.token_masks`. The other rows may choose any."""


@dataclass(frozen=True)
class SamplingOutput:
    """Chosen tokens [R] int64, and log-probabilities of the unmodified distribution."""

    tokens: Tensor
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]]
    """Chosen token's and best ones as (token, value), by row; best first, ties by id."""
