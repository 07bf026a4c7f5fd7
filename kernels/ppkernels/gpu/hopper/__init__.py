"""Attention of chunks for Hopper cards (compute capability 9.x), in Gluon, Triton's lower language.

A program has three groups of warps. One warp copies queries, keys and values into shared memory by
the tensor memory accelerator. Two groups of four warps take 64 rows of scores each, and take turns:
one issues its products while the other computes exponentials (FlashAttention-3, arXiv 2407.08608).

A card has one program for each multiprocessor, which takes one tile of queries after the other. The
programs count the tiles on the card, because a CUDA graph does not know the rows of its next step.
If tiles are few, each one's context is split into parts, and `weigh` joins them.

| module | subject |
|---|---|
| `launch` | arguments of a launch, and its grid |
| `kernel` | tiles, parts, barriers, and the three groups of warps |
| `load` | the warp that copies |
| `attend` | the warps that compute |
| `weigh` | parts of a context |
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ppkernels.batch import Batch

MOST_ROWS = 1024
"""Rows of a step; a power of two. The programs keep the last tile of each in shared memory."""
HEAD_DIMS = (64, 128)


def serves(kv: Tensor, batch: Batch, heads: int) -> bool:
    """Return whether these kernels take a step on a cache of this shape.

    The queries have its type and begin at multiples of 16 bytes, as those of all models do.
    """
    _, _, block_size, kv_heads, head_dim = kv.shape
    if kv.device.type != "cuda" or len(batch.query_lens) > MOST_ROWS or not is_hopper(kv.device):
        return False
    return kv.dtype in (torch.bfloat16, torch.float16) and fits(block_size, heads // kv_heads, head_dim)


def fits(block_size: int, group: int, head_dim: int) -> bool:
    """Return whether a tile of 128 rows has whole tokens, and one of 128 slots whole parts of blocks."""
    return head_dim in HEAD_DIMS and group in (1, 2, 4, 8, 16, 32, 64) and block_size in (8, 16, 32, 64, 128, 256)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether `device`, of CUDA, is a Hopper card."""
    return torch.cuda.get_device_capability(device)[0] == 9
