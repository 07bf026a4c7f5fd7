"""A whole layer of a Llama-like model in one call: small steps spend more time between kernels than
in them.

The layer calls the same compiled functions as the single operations, which run wherever this layer
does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ppkernels.cpu import jit
from ppkernels.cpu.activation import silu_and_mul_rows
from ppkernels.cpu.linear import multiply
from ppkernels.cpu.norms import rms_norm_rows
from ppkernels.cpu.paged_tiles import attend, bad_row
from ppkernels.cpu.rotary import rotate_rows
from ppkernels.cpu.store_kv import all_inside, store_rows

DONE, BAD_SLOT = -1, -2


class LayerWeights(NamedTuple):
    """Arrays of one layer. Matrices are packed; biases, and norms of heads and of outputs, may be
    `absent`.
    """

    input_norm: Any
    qkv: Any
    qkv_bias: Any
    q_norm: Any
    k_norm: Any
    out: Any
    out_bias: Any
    out_norm: Any
    mlp_norm: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any
    down_norm: Any


class Rows(NamedTuple):
    """Arrays of one step: the arguments of `rotate`, `store_kv` and `attend`."""

    cos: Any
    sin: Any
    positions: Any
    slots: Any
    starts: Any
    ends: Any
    lengths: Any
    tables: Any


def absent(like: Any) -> Any:
    """Return an array in place of weights that a model does not have.

    With None instead, numba would compile the layer once for each set of absent weights.
    """
    return np.empty(0, like.dtype)


@jit.compiled
def llama_layer(residual: Any, weights: Any, kv: Any, rows: Any, heads: int, eps: float) -> int:
    """Add attention and MLP to `residual` [T, H] in place; keys and values go into `kv`, the
    layer's cache.

    Returns DONE; or, before anything is written, BAD_SLOT or the first row with a block outside of
    the cache.
    """
    if not all_inside(rows.slots, kv.shape[0] * kv.shape[3]):
        return BAD_SLOT
    bad = bad_row(rows.lengths, rows.tables, kv.shape[0], kv.shape[3])
    if bad >= 0:
        return bad
    tokens, kv_heads, width = len(residual), kv.shape[2], kv.shape[4]
    both = heads + kv_heads
    normed = np.empty_like(residual)
    rms_norm_rows(residual, weights.input_norm, eps, normed)
    fused = np.empty((tokens, both + kv_heads, width), residual.dtype)
    _linear(normed, weights.qkv, weights.qkv_bias, fused.reshape(tokens, -1), False)
    _norm_heads(fused, 0, heads, weights.q_norm, eps)
    _norm_heads(fused, heads, both, weights.k_norm, eps)
    rotate_rows(fused, both, rows.cos, rows.sin, rows.positions)
    store_rows(kv.reshape(kv.shape[0], 2, kv_heads, width, kv.shape[3]), kv, fused, rows.slots)
    attended = np.empty((tokens, heads, width), residual.dtype)
    attend(fused, kv, rows.starts, rows.ends, rows.lengths, rows.tables, attended)
    _add(attended.reshape(tokens, -1), weights.out, weights.out_bias, weights.out_norm, eps, normed, residual)

    rms_norm_rows(residual, weights.mlp_norm, eps, normed)
    inner = weights.gate_up.shape[0] * weights.gate_up.shape[2]
    gate_up = np.empty((tokens, inner), residual.dtype)
    _linear(normed, weights.gate_up, weights.gate_up_bias, gate_up, False)
    gated = np.empty((tokens, inner // 2), residual.dtype)
    silu_and_mul_rows(gate_up, gated)
    _add(gated, weights.down, weights.down_bias, weights.down_norm, eps, normed, residual)
    return DONE


@jit.compiled
def _add(x: Any, weight: Any, bias: Any, norm: Any, eps: float, scratch: Any, residual: Any) -> None:
    if len(norm) == 0:
        _linear(x, weight, bias, residual, True)
    else:
        _linear(x, weight, bias, scratch, False)
        rms_norm_rows(scratch, norm, eps, scratch)
        for row in range(len(residual)):
            for i in range(residual.shape[1]):
                residual[row, i] += scratch[row, i]


@jit.compiled
def _linear(x: Any, weight: Any, bias: Any, y: Any, add: bool) -> None:
    multiply(x, weight, y, add)
    if len(bias) > 0:
        for row in range(len(y)):
            for i in range(y.shape[1]):
                y[row, i] += bias[i]


@jit.compiled
def _norm_heads(fused: Any, first: int, end: int, weight: Any, eps: float) -> None:
    if len(weight) > 0:
        for token in range(len(fused)):
            rms_norm_rows(fused[token, first:end], weight, eps, fused[token, first:end])
