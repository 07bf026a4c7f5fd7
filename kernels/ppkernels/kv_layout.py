"""The layout of keys and values in a block, which depends on the device.

On a CPU the cache of one layer is [blocks, 2, kv_heads, block_size, head_dim], contiguous. Values
lie as this shape says. The keys of a block and head are transposed, [head_dim, block_size]: the
scores of a block's tokens are then computed side by side, without sums across a vector register
(vLLM 0.2 lays out its keys so for the same reason).

On a GPU it is [blocks, 2, block_size, kv_heads, head_dim], contiguous. All keys of a token are one
run of memory, which is stored at once. A tile of a head's keys is whole rows, which the matrix
units take without a change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppkernels import gpu


def token_major(device: torch.device) -> bool:
    """Return whether caches on `device` have the layout for GPUs."""
    return device.type == "cuda" or gpu.interpreted


def layout_name(device: torch.device) -> str:
    """Return the name of the layout of a block on `device`, for copies that outlive the process."""
    return "token-major-1" if token_major(device) else "head-major-1"


def cache_shape(
    blocks: int, block_size: int, kv_heads: int, head_dim: int, device: torch.device
) -> tuple[int, int, int, int, int]:
    """Return the shape of the cache of one layer on `device`."""
    if token_major(device):
        return blocks, 2, block_size, kv_heads, head_dim
    return blocks, 2, kv_heads, block_size, head_dim


def transposed(kv: Tensor) -> Tensor:
    """Return a view [blocks, 2, kv_heads, head_dim, block_size] of a CPU's cache, which is the
    layout of its keys.
    """
    return kv.view(*kv.shape[:3], kv.shape[4], kv.shape[3])


def keys(kv: Tensor) -> Tensor:
    """Return a view of the keys [blocks, kv_heads, head_dim, block_size] of a cache."""
    return kv[:, 0].permute(0, 2, 3, 1) if token_major(kv.device) else transposed(kv)[:, 0]


def values(kv: Tensor) -> Tensor:
    """Return a view of the values [blocks, kv_heads, block_size, head_dim] of a cache."""
    return kv[:, 1].transpose(1, 2) if token_major(kv.device) else kv[:, 1]
