"""Rotary position embedding on a CPU, in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ppkernels.cpu import jit


def rotate(fused: Tensor, count: int, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotate the first `count` heads of `fused` [T, heads, head_dim], contiguous."""
    rotate_rows(fused.numpy(), count, cos.numpy(), sin.numpy(), positions.numpy())


@jit.compiled
def rotate_rows(fused: Any, count: int, cos: Any, sin: Any, positions: Any) -> None:
    """Rotate the first `count` heads of an array `fused` [T, heads, head_dim]."""
    half = fused.shape[2] // 2
    for token in range(fused.shape[0]):
        position = positions[token]
        for head in range(count):
            for i in range(half):
                first, second = fused[token, head, i], fused[token, head, half + i]
                fused[token, head, i] = first * cos[position, i] + second * sin[position, i]
                fused[token, head, half + i] = second * cos[position, half + i] + first * sin[position, half + i]
