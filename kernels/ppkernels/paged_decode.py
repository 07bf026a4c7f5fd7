"""The CPU kernel for decodes: reads keys and values in their blocks, in one pass over each row's table.

Sizes that are known when it is compiled make its inner loops straight-line vector code, so there is one kernel for
each type, block size and head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ppkernels import jit

_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
         6.931472028550421e-1, 1.0)  # fmt: skip
"""2^f for f in [-0.5, 0.5], error below 2e-8 (coefficients of the Cephes library's exp2f, S. Moshier)."""
_LOWEST = -80.0
"""exp of less is taken as exp(-80), 2e-35: nothing beside the largest score's 1."""


@functools.cache
def decode_kernel(dtype: torch.dtype, block_size: int, head_dim: int) -> Callable[..., int]:
    """Return `kernel(fused, tokens, keys, values, tables, lengths, output)` of numpy arrays.

    Row r attends from token `tokens[r]` of `fused` [T, ..., head_dim] to the first `lengths[r]` slots of `tables[r]`,
    into `output` [T, heads, head_dim]. `keys` [blocks, 2, kv_heads, head_dim, block_size] and `values` [blocks, 2,
    kv_heads, block_size, head_dim] are one cache (see `kv_layout`). Returns the first row with a block outside of the
    cache, which is not computed, or -1.
    """
    real: Any = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
    zero, scale = real(0), real(1 / math.sqrt(head_dim))
    exponentials = _exponentials32 if dtype == torch.float32 else _exponentials64

    def kernel(fused: Any, tokens: Any, keys: Any, values: Any, tables: Any, lengths: Any, output: Any) -> int:
        blocks, kv_heads, group = keys.shape[0], keys.shape[2], output.shape[1] // keys.shape[2]
        width = tables.shape[1] * block_size
        scores, powers = np.empty((group, width), real), np.empty(width, np.int32)
        for row in range(len(tokens)):
            token, length = tokens[row], lengths[row]
            whole, used = length // block_size, (length + block_size - 1) // block_size
            for b in range(used):
                if tables[row, b] < 0 or tables[row, b] >= blocks:
                    return row
            for head in range(kv_heads):
                for b in range(used):
                    block = tables[row, b]
                    for g in range(group):
                        for t in range(block_size):
                            score = zero
                            for i in range(head_dim):
                                score += fused[token, head * group + g, i] * keys[block, 0, head, i, t]
                            scores[g, b * block_size + t] = score
                for g in range(group):
                    exponentials(scores, g, length, scale, powers)
                    for i in range(head_dim):
                        output[token, head * group + g, i] = zero
                for b in range(whole):
                    block = tables[row, b]
                    for g in range(group):
                        for i in range(head_dim):
                            total = output[token, head * group + g, i]
                            for t in range(block_size):
                                total += scores[g, b * block_size + t] * values[block, 1, head, t, i]
                            output[token, head * group + g, i] = total
                if whole < used:  # the rest of the last block is not this row's
                    block = tables[row, whole]
                    for g in range(group):
                        for t in range(length - whole * block_size):
                            weight = scores[g, whole * block_size + t]
                            for i in range(head_dim):
                                output[token, head * group + g, i] += weight * values[block, 1, head, t, i]
        return -1

    return jit.compiled(kernel)


@jit.compiled
def _exponentials64(scores: Any, g: int, length: int, scale: Any, powers: Any) -> None:
    """Turn the first `length` scores of query head `g` into softmax weights."""
    largest = scores[g, 0]
    for i in range(length):
        largest = max(largest, scores[g, i])
    total = scores.dtype.type(0)
    for i in range(length):
        scores[g, i] = math.exp((scores[g, i] - largest) * scale)
        total += scores[g, i]
    for i in range(length):
        scores[g, i] /= total


@jit.compiled
def _exponentials32(scores: Any, g: int, length: int, scale: Any, powers: Any) -> None:
    """As `_exponentials64`, by vector code: 2^f by a polynomial, 2^n by the bits of a float."""
    one = np.float32(1)
    largest = scores[g, 0]
    for i in range(length):
        largest = max(largest, scores[g, i])
    total = np.float32(0)
    factor = np.float32(scale * np.float32(1.4426950408889634))
    lowest = np.float32(_LOWEST)
    for i in range(length):
        x = max((scores[g, i] - largest) * factor, lowest)
        n = np.floor(x + np.float32(0.5))
        f = x - n
        y = np.float32(_EXP2[0])
        y = y * f + np.float32(_EXP2[1])
        y = y * f + np.float32(_EXP2[2])
        y = y * f + np.float32(_EXP2[3])
        y = y * f + np.float32(_EXP2[4])
        y = y * f + np.float32(_EXP2[5])
        scores[g, i] = y * f + np.float32(_EXP2[6])
        powers[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    bits = powers.view(np.float32)
    for i in range(length):
        scores[g, i] *= bits[i]
        total += scores[g, i]
    inverse = one / total
    for i in range(length):
        scores[g, i] *= inverse
