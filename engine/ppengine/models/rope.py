"""Inverse frequencies of rotary embeddings, in float32 as checkpoints were trained with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppengine.checkpoint.model_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return [head_dim / 2] for the kinds of `ppengine.checkpoint.model_spec.ROPE_KINDS`."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    length = rope.original_max_position
    wavelength = 2 * math.pi / plain
    smooth = (length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > length / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelength < length / rope.high_freq_factor, plain, stretched)


def _yarn(plain: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Dimensions that turn often are kept, those that turn seldom interpolated (YaRN, arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
