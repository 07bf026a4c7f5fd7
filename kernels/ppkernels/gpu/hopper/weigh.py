"""Parts of a context joined: their outputs, each weighed by its share of the softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh(
    partial,
    weights,
    pairs,
    output,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    HEADER: tl.constexpr,
    PAIR_WORDS: tl.constexpr,
):
    """Join `ROWS` rows of a tile of queries and key head; the grid is (pairs, TILE_ROWS / ROWS)."""
    pair = tl.program_id(0)
    if pair >= tl.load(pairs):
        return
    words = pairs + HEADER + pair * PAIR_WORDS
    token, left, used, kv_head = tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    own = row < left * GROUP
    if used == 0:  # its context is one part
        return
    column = tl.arange(0, HEAD_DIM)
    place = pair * tl.load(pairs + 1) * TILE_ROWS + row
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for part in range(used):
        largest = tl.maximum(largest, tl.load(weights + place + part * TILE_ROWS, own, 0.0))
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for part in range(used):
        at = place + part * TILE_ROWS
        weight = tl.exp2(tl.load(weights + at, own, 0.0) - largest)
        total += weight
        sums += weight[:, None] * tl.load(partial + at[:, None] * HEAD_DIM + column[None, :], own[:, None], 0.0)
    head = (token + row // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
    result = (sums / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + head[:, None] * HEAD_DIM + column[None, :], result, own[:, None])
