"""Write the keys and values of new tokens into their slots."""

from __future__ import annotations

from torch import Tensor

from ppkernels.dispatch import choose
from ppkernels.kv_layout import keys, values


def store_kv(kv: Tensor, fused: Tensor, slots: Tensor) -> None:
    """Write the last 2 * kv_heads heads of `fused` [T, heads, head_dim], keys first, into `kv` (see
    `kv_layout`).

    `slots` [T] are block * block_size + offset. A slot outside of the cache raises IndexError and
    nothing is written. On a GPU, where raising would wait for the device, such a token is not
    stored.
    """
    choose("store_kv", store_kv_reference, kv, fused)(kv, fused, slots)


def store_kv_reference(kv: Tensor, fused: Tensor, slots: Tensor) -> None:
    """Do as `store_kv`, by torch."""
    _, kv_heads, block_size, _ = values(kv).shape
    blocks, offsets = slots // block_size, slots % block_size
    keys(kv)[blocks, :, :, offsets] = fused[:, -2 * kv_heads : -kv_heads]
    values(kv)[blocks, :, offsets] = fused[:, -kv_heads:]
