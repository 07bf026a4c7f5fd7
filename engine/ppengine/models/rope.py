"""Rotary embeddings of checkpoints: their frequencies, and the order of dimensions that kernels take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppengine.checkpoint.rope_spec import RopeSpec


def head_order(rope: RopeSpec, head_dim: int) -> tuple[int, ...]:
    """Return the checkpoint's dimension that each dimension of a head is made of; empty: they are the same.

    Kernels turn dimension i of a whole head with dimension i + `head_dim` / 2. Rows of queries and keys are loaded
    in such an order that pairs are there. Products of queries and keys do not depend on it.
    """
    if not rope.interleaved:
        return ()
    turning, still = range(rope.width or head_dim), range(rope.width or head_dim, head_dim)
    half = len(still) // 2
    return (*turning[::2], *still[:half], *turning[1::2], *still[half:])


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return [dimensions that turn / 2], float32 as in training, for `ppengine.checkpoint.rope_spec.ROPE_KINDS`."""
    head_dim = rope.width or head_dim
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
