"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split form of Llama checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppkernels import gpu, jit


def rotary_tables(inverse_frequencies: Tensor, length: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, head_dim] for positions `[0, length)`.

    Angles are taken in float32 for every dtype: checkpoints were trained with its rounding. The first half of the
    sines is negated, so that `rotate` needs no second sign.
    """
    positions = torch.arange(length, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies.float())
    cos, sin = angles.cos() * scale, angles.sin() * scale
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(dtype), tables[1].to(dtype)


def rotate(fused: Tensor, count: int, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate the first `count` heads of `fused` [T, heads, head_dim] in place, each token by its position.

    `cos` and `sin` are `rotary_tables`; `positions` is [T].
    """
    if gpu.serves(fused) and fused.is_contiguous():
        from ppkernels.gpu import rotary

        rotary.rotate(fused, count, cos, sin, positions)
    elif jit.serves(fused) and fused.is_contiguous():
        rotate_rows(fused.numpy(), count, cos.numpy(), sin.numpy(), positions.numpy())
    else:
        rotate_reference(fused, count, cos, sin, positions)


def rotate_reference(fused: Tensor, count: int, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Torch version of `rotate`."""
    heads = fused[:, :count]
    swapped = torch.roll(heads, heads.shape[-1] // 2, -1)
    heads.mul_(cos[positions].unsqueeze(1)).addcmul_(swapped, sin[positions].unsqueeze(1))


@jit.compiled
def rotate_rows(fused: Any, count: int, cos: Any, sin: Any, positions: Any) -> None:
    """As `rotate`, on arrays."""
    half = fused.shape[2] // 2
    for token in range(fused.shape[0]):
        position = positions[token]
        for head in range(count):
            for i in range(half):
                first, second = fused[token, head, i], fused[token, head, half + i]
                fused[token, head, i] = first * cos[position, i] + second * sin[position, i]
                fused[token, head, half + i] = second * cos[position, half + i] + first * sin[position, half + i]
