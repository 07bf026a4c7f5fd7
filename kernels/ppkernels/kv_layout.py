"""How a block holds its keys and values.

The cache of one layer is [blocks, 2, kv_heads, block_size, head_dim], contiguous. Values lie as its shape says. The
keys of a block and head are transposed, [head_dim, block_size]: the scores of a block's tokens are then computed side
by side, without adding up across a vector register (vLLM 0.2 laid its keys out so for the same reason).
"""

from __future__ import annotations

from torch import Tensor


def transposed(kv: Tensor) -> Tensor:
    """Return a cache as [blocks, 2, kv_heads, head_dim, block_size], the shape in which its keys lie, as a view."""
    return kv.view(*kv.shape[:3], kv.shape[4], kv.shape[3])


def keys(kv: Tensor) -> Tensor:
    """Return the keys [blocks, kv_heads, head_dim, block_size] of a cache, as a view."""
    return transposed(kv)[:, 0]


def values(kv: Tensor) -> Tensor:
    """Return the values [blocks, kv_heads, block_size, head_dim] of a cache, as a view."""
    return kv[:, 1]
