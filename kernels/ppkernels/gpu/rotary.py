"""Rotary position embedding on a GPU, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
"""Heads of a program, all at one position."""


def rotate(fused: Tensor, count: int, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate the first `count` heads of `fused` [T, heads, head_dim], which is contiguous.

    `positions` [T] are int32 or int64, inside the tables.
    """
    tokens, _, head_dim = fused.shape
    if tokens and count:
        _rotate[(tokens, triton.cdiv(count, _HEADS))](
            fused,
            cos,
            sin,
            positions,
            count,
            fused.stride(0),
            head_dim=head_dim,
            HALF=triton.next_power_of_2(head_dim // 2),
            HEADS=_HEADS,
            num_warps=4,
        )


@triton.jit
def _rotate(
    fused, cos, sin, positions, count, token_stride, head_dim: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = head_dim // 2
    lane = tl.arange(0, HALF)
    inside = lane < half
    # The two halves of the tables differ only in the sign of the sines.
    angle = tl.load(positions + token).to(tl.int64) * head_dim + half + lane
    c = tl.load(cos + angle, mask=inside).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=inside).to(tl.float32)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = fused + token * token_stride + head[:, None] * head_dim + lane[None, :]
    inside = (head < count)[:, None] & inside[None, :]
    first = tl.load(place, mask=inside).to(tl.float32)
    second = tl.load(place + half, mask=inside).to(tl.float32)
    tl.store(place, first * c - second * s, mask=inside)
    tl.store(place + half, second * c + first * s, mask=inside)
