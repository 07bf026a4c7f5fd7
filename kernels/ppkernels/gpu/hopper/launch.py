"""Arguments of a launch, and its grid: one program for each multiprocessor."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ppkernels.batch import Batch
from ppkernels.gpu.dots import LOG2_E, processors
from ppkernels.gpu.hopper import MOST_ROWS
from ppkernels.gpu.hopper.kernel import attend
from ppkernels.gpu.hopper.shapes import HALF, HEADER, PAIR_WORDS, ROWS, TILE, tile_tokens
from ppkernels.gpu.hopper.weigh import weigh

_HALF, _ROWS, _HEADER, _PAIR_WORDS = HALF.value, ROWS.value, HEADER.value, PAIR_WORDS.value
_MOST_CACHE_ROWS = 2**31 - 1
"""Rows of tokens that a descriptor of the cache allows. The cache grows under graphs that hold the descriptor."""
_WEIGHED = 8
"""Rows that a program joins."""


def attend_chunks(fused: Tensor, kv: Tensor, batch: Batch, heads: int, output: Tensor) -> None:
    """Write attention of the rows with more than one token to `output` [T, heads * head_dim].

    `fused` [T, at least heads, head_dim] begins with the queries. `serves` must allow the step.
    """
    _, _, block_size, kv_heads, head_dim = kv.shape
    group, tokens, places = heads // kv_heads, len(fused), processors(kv.device)
    dot = gl.bfloat16 if kv.dtype == torch.bfloat16 else gl.float16
    # Tiles of queries if all tokens are of one row; of a graph's step, many may be decodes, which have none.
    pairs = tokens // tile_tokens(group) * kv_heads
    split = pairs <= places // 2
    words = torch.empty(_HEADER + _PAIR_WORDS * places, dtype=torch.int32, device=kv.device)
    counter = words if split else torch.zeros(1, dtype=torch.int32, device=kv.device)
    parts = places if split else 0
    partial = torch.empty(parts * _ROWS * head_dim, dtype=torch.float32, device=kv.device)
    weights = torch.empty(parts * _ROWS, dtype=torch.float32, device=kv.device)
    attend[(places,)](
        _describe_queries(fused, group),
        _describe_cache(kv),
        batch.block_tables,
        batch.seq_lens,
        batch.query_start,
        output,
        partial,
        weights,
        words,
        counter,
        len(batch.query_lens),
        places if split else 1,
        0 if split else 1,
        batch.block_tables.stride(0),
        head_dim**-0.5 * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        MOST_ROWS=MOST_ROWS,
        DOT=dot,
        num_warps=4,
    )
    if split:
        weigh[places // 2, _ROWS // _WEIGHED](
            partial, weights, words, output, HEADS=heads, GROUP=group, HEAD_DIM=head_dim, TILE_ROWS=_ROWS,
            ROWS=_WEIGHED, HEADER=_HEADER, PAIR_WORDS=_PAIR_WORDS, num_warps=4,
        )  # fmt: skip


def _describe_queries(fused: Tensor, group: int) -> TensorDescriptor:
    """Return how half a tile's queries, 128 bytes of each, are copied from `fused`."""
    strides = [fused.stride(0), fused.stride(1), 1]
    half = [tile_tokens(group) // 2, group, _HALF]
    return TensorDescriptor(fused, list(fused.shape), strides, half, gl.NVMMASharedLayout(128, 16, 3))


def _describe_cache(kv: Tensor) -> TensorDescriptor:
    """Return how 128 bytes of a head's keys, or values, are copied for each token of a block."""
    _, _, block_size, kv_heads, head_dim = kv.shape
    wide = kv_heads * head_dim
    piece = [min(block_size, TILE.value), _HALF]
    return TensorDescriptor(kv, [_MOST_CACHE_ROWS, wide], [wide, 1], piece, gl.NVMMASharedLayout(128, 16, 2))
