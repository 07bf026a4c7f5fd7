"""Attention over a paged cache on a CPU, for decodes and chunks; reads keys and values in place.

A block's keys lie as [head_dim, block_size] and its values as [block_size, head_dim] (see
`kv_layout`): both are panels for a tile. A tile's rows are the query heads that share a key head,
for one token; or one head's queries for up to eight tokens of a chunk. Every pass over the blocks
prefetches the data of the next pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ppkernels.cpu import jit
from ppkernels.cpu.exponential import exp
from ppkernels.cpu.tiles import lanes_of, make_tile

HIGH = 8
"""Most rows of a tile."""
_tile4, _tile8 = make_tile(4, unroll=4, by_row=True), make_tile(HIGH, unroll=4, by_row=True)
_rest4, _rest8 = make_tile(4, unroll=1, by_row=True), make_tile(HIGH, unroll=1, by_row=True)


class _Queries(NamedTuple):
    """A tile of `rows` queries from `at` on; the first sees `length` tokens, each further one
    `growth` more.
    """

    at: int
    step: int
    rows: int
    length: int
    growth: int
    target: int
    """Place of the first query's result in the output."""
    target_step: int
    """Distance from there to the next query's result."""


class _Place(NamedTuple):
    """A row and a key head, whose keys and values lie together."""

    row: int
    head: int


@jit.compiled
def attend(fused: Any, kv: Any, starts: Any, ends: Any, lengths: Any, tables: Any, output: Any) -> int:
    """Set `output` [T, heads, D] to the attention of the first heads of `fused` [T, ..., D] over
    `kv`.

    Row b has tokens `[starts[b], ends[b])`; the last of them sees `lengths[b]` tokens, in the
    blocks `tables[b]`. `kv` is the cache of one layer, which `vectors.takes_cache` accepts. Returns
    -1; or, before anything is written, the first row with a block outside of the cache.
    """
    bad = bad_row(lengths, tables, kv.shape[0], kv.shape[3])
    if bad >= 0:
        return bad
    kv_heads, (heads, width) = kv.shape[2], output.shape[1:]
    group, token_step = heads // kv_heads, fused.shape[1] * width
    scores = np.empty((HIGH, tables.shape[1] * kv.shape[3]), fused.dtype)
    for row in range(len(lengths)):
        first, end, length, following = starts[row], ends[row], lengths[row], min(row + 1, len(lengths) - 1)
        for head in range(kv_heads):
            last = head == kv_heads - 1
            this, then = _Place(row, head), _Place(following, 0) if last else _Place(row, head + 1)
            if end - first == 1:
                for place in range(head * group, (head + 1) * group, HIGH):
                    queries = _Queries(
                        at=first * token_step + place * width,
                        step=width,
                        rows=min(HIGH, (head + 1) * group - place),
                        length=length,
                        growth=0,
                        target=(first * heads + place) * width,
                        target_step=width,
                    )
                    _attend(fused, queries, kv, tables, this, then, scores, output)
                continue
            for place in range(head * group, (head + 1) * group):
                for token in range(first, end, HIGH):
                    queries = _Queries(
                        at=token * token_step + place * width,
                        step=token_step,
                        rows=min(HIGH, end - token),
                        length=length - end + token + 1,
                        growth=1,
                        target=(token * heads + place) * width,
                        target_step=heads * width,
                    )
                    _attend(fused, queries, kv, tables, this, then, scores, output)
    return -1


@jit.compiled
def bad_row(lengths: Any, tables: Any, blocks: int, block_size: int) -> int:
    """Return the first row that needs a block outside of the cache of `blocks`, or -1."""
    for row in range(len(lengths)):
        for b in range((lengths[row] + block_size - 1) // block_size):
            if tables[row, b] < 0 or tables[row, b] >= blocks:
                return row
    return -1


@jit.compiled
def _attend(
    fused: Any, queries: _Queries, kv: Any, tables: Any, this: _Place, then: _Place, scores: Any, output: Any
) -> None:
    """Compute one tile of queries over `this`, and prefetch the keys of `then`."""
    _, _, kv_heads, block_size, width = kv.shape
    at, step, rows, length, growth, target, target_step = queries
    vector, size, wide = lanes_of(kv), block_size * width, scores.shape[1]
    longest = length + growth * (rows - 1)
    blocks = (longest + block_size - 1) // block_size
    for b in range(blocks):
        keys = (tables[this.row, b] * 2 * kv_heads + this.head) * size
        values = keys + kv_heads * size
        for t in range(0, block_size, vector):
            if rows <= 4:
                _tile4(fused, at, step, kv, keys + t, block_size, values + t, width,
                       scores, b * block_size + t, wide, rows, False)  # fmt: skip
            else:
                _tile8(fused, at, step, kv, keys + t, block_size, values + t, width,
                       scores, b * block_size + t, wide, rows, False)  # fmt: skip
    for r in range(rows):
        _softmax(scores, r, length + growth * r, longest, 1 / math.sqrt(width))
    for b in range(blocks):
        values = ((tables[this.row, b] * 2 + 1) * kv_heads + this.head) * size
        ahead = (tables[then.row, b] * 2 * kv_heads + then.head) * size
        weights, seen = b * block_size, min(block_size, longest - b * block_size)
        most = seen // 4 * 4
        for i in range(0, width, vector):
            if most > 0 and rows <= 4:
                _tile4(scores, weights, wide, kv, values + i, width, ahead + i, most,
                       output, target + i, target_step, rows, b > 0)  # fmt: skip
            elif most > 0:
                _tile8(scores, weights, wide, kv, values + i, width, ahead + i, most,
                       output, target + i, target_step, rows, b > 0)  # fmt: skip
            if most < seen:  # later slots are not this row's, and may be NaN
                rest, more = values + most * width + i, b > 0 or most > 0
                if rows <= 4:
                    _rest4(scores, weights + most, wide, kv, rest, width, ahead, seen - most,
                           output, target + i, target_step, rows, more)  # fmt: skip
                else:
                    _rest8(scores, weights + most, wide, kv, rest, width, ahead, seen - most,
                           output, target + i, target_step, rows, more)  # fmt: skip


@jit.compiled
def _softmax(scores: Any, row: int, length: int, end: int, scale: float) -> None:
    """Turn the first `length` scores of a row, times `scale`, into weights, others to 0."""
    zero, factor = scores.dtype.type(0), scores.dtype.type(scale)
    a = b = c = d = scores[row, 0]  # four chains: each comparison of one chain waits for the one before
    whole = length // 4 * 4
    for i in range(0, whole, 4):
        a = scores[row, i] if scores[row, i] > a else a
        b = scores[row, i + 1] if scores[row, i + 1] > b else b
        c = scores[row, i + 2] if scores[row, i + 2] > c else c
        d = scores[row, i + 3] if scores[row, i + 3] > d else d
    for i in range(whole, length):
        a = scores[row, i] if scores[row, i] > a else a
    a, c = a if a > b else b, c if c > d else d
    largest = a if a > c else c
    total = zero
    for i in range(length):
        weight = exp((scores[row, i] - largest) * factor)
        scores[row, i] = weight
        total += weight
    inverse = scores.dtype.type(1) / total
    for i in range(length):
        scores[row, i] *= inverse
    for i in range(length, end):
        scores[row, i] = zero
