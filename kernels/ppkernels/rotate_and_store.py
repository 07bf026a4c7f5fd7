"""Rotate the queries and keys of new tokens, and write their keys and values into their slots."""

from __future__ import annotations

from torch import Tensor

from ppkernels.dispatch import choose
from ppkernels.rotary import rotate
from ppkernels.store_kv import store_kv


def rotate_and_store(
    kv: Tensor, fused: Tensor, heads: int, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """Do as `rotate` and then `store_kv`; a GPU needs one launch.

    `fused` is [T, heads + 2 * kv_heads, head_dim]. Its queries are rotated in place; its keys are
    undefined afterwards.
    """
    choose("rotate_and_store", _rotate_then_store, kv, fused)(kv, fused, heads, cos, sin, positions, slots)


def _rotate_then_store(
    kv: Tensor, fused: Tensor, heads: int, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor
) -> None:
    rotate(fused, (heads + fused.shape[1]) // 2, cos, sin, positions)
    store_kv(kv, fused, slots)
