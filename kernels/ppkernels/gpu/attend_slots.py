"""The loop of attention to slots of the cache that a tile of queries sees whole, with a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_slots(
    queries,
    kv,
    table,
    begin,
    end,
    kv_head,
    scale,
    inside,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return the largest score [Q], the total weight [Q] and the weighed values [Q, WIDE] of slots [begin, end).

    `queries` [Q, WIDE]; `table` is the row's block table; `inside` [WIDE] hides columns behind the head's.
    """
    SCORES: tl.constexpr = queries.shape[0]
    WIDE: tl.constexpr = queries.shape[1]
    column = tl.arange(0, WIDE)
    largest = tl.full((SCORES,), float("-inf"), tl.float32)
    total = tl.zeros((SCORES,), tl.float32)
    sums = tl.zeros((SCORES, WIDE), tl.float32)
    for first in range(begin, end, TILE):
        slot = first + tl.arange(0, TILE)
        seen = slot < end
        block = tl.load(table + slot // BLOCK_SIZE, seen, 0).to(tl.int64)
        at = (block * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        place = kv + at[:, None] + column[None, :]
        read = seen[:, None] & inside[None, :]
        # Hidden slots are not read: a weight of 0 does not hide a NaN.
        keys = tl.load(place, read, 0.0).to(DOT)
        values = tl.load(place + BLOCK_SIZE * KV_HEADS * HEAD_DIM, read, 0.0).to(DOT)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        weight = tl.exp2(scores - above[:, None])
        fade = tl.exp2(largest - above)
        total = total * fade + tl.sum(weight, 1)
        sums = tl.dot(weight.to(DOT), values, sums * fade[:, None], input_precision="ieee")
        largest = above
    return largest, total, sums


@triton.jit
def part_slots(length, parts, TILE: tl.constexpr):
    """Return the slots of each part of a context, in whole tiles."""
    return tl.cdiv(tl.cdiv(length, TILE), parts) * TILE
