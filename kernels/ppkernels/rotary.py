"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split as in Llama."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ppkernels.dispatch import choose


def rotary_tables(
    inverse_frequencies: Tensor, length: int, scale: float, dtype: torch.dtype, head_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, head_dim] for positions `[0, length)`.

    Frequencies are those of the first pairs of a head; pairs beyond them are not turned. `head_dim`
    None: there are none.

    Angles are float32 for every dtype: checkpoints were trained with its rounding. The first half
    of the sines is negated, so that `rotate` needs no second sign.
    """
    positions = torch.arange(length, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies.float())
    still = 0 if head_dim is None else head_dim // 2 - len(inverse_frequencies)
    cos = functional.pad(angles.cos() * scale, (0, still), value=1.0)
    sin = functional.pad(angles.sin() * scale, (0, still))
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(dtype), tables[1].to(dtype)


def rotate(fused: Tensor, count: int, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate the first `count` heads of `fused` [T, heads, head_dim] in place, each token by its
    position.

    `cos` and `sin` are `rotary_tables`; `positions` is [T].
    """
    choose("rotate", rotate_reference, fused)(fused, count, cos, sin, positions)


def rotate_reference(fused: Tensor, count: int, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Do as `rotate`, by torch."""
    heads = fused[:, :count]
    swapped = torch.roll(heads, heads.shape[-1] // 2, -1)
    heads.mul_(cos[positions].unsqueeze(1)).addcmul_(swapped, sin[positions].unsqueeze(1))
