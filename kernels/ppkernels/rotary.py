"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split form of Llama checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(inverse_frequencies: Tensor, length: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, 1, head_dim] for positions `[0, length)`.

    Angles are taken in float32 for every dtype: checkpoints were trained with its rounding. The first half of the
    sines is negated, so that `rotate` needs no second sign.
    """
    positions = torch.arange(length, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies.float())
    cos, sin = angles.cos() * scale, angles.sin() * scale
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(dtype).unsqueeze(1), tables[1].to(dtype).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `heads` [T, n, head_dim] in place by `cos` and `sin` [T, 1, head_dim] of their positions."""
    rotate_reference(heads, cos, sin)


def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Torch version of `rotate`."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)
