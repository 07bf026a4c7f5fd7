"""Attention of decodes to the prefixes that they share: read once for a tile of rows.

A program takes a key head of a tile, or a part of it, and a part of the prefix. It leaves outputs
and log-sum-exps, which `paged_decode` joins with those of the rest of each row. Tiles are counted
on the card, since a graph serves any number of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.batch import Batch
from ppkernels.gpu.attend_slots import attend_slots, part_slots
from ppkernels.gpu.dots import LOG2_E, STEP, dot_type
from ppkernels.shared_prefixes import TILE_ROWS, SharedPrefixes, most_tiles

MOST_PARTS = tl.constexpr(64)
"""Parts of a prefix."""
MOST_WHOLE_PARTS = tl.constexpr(4)
"""Parts of a prefix if the rest of each row is one part, whose program joins them by itself."""
_STEP = (*STEP, "used", "members", "programs")


class SharedSums(NamedTuple):
    """The part of each row's softmax that lies in its shared prefix."""

    sums: Tensor
    """[items, scores, head_dim] float32: outputs, by program and row of its scores."""
    weights: Tensor
    """[items, scores] float32: their log-sum-exps."""
    rows: int
    """Rows of a program, a divisor of TILE_ROWS; `scores` is this number times the query heads of a key head."""


def program_rows(group: int, element_size: int) -> int:
    """Return the rows of a program whose key heads have `group` query heads, padded to a power of two."""
    most = 128 if element_size == 2 else 32  # without matrix units: larger tiles spill registers
    wide: int = triton.next_power_of_2(group)
    return max(1, min(TILE_ROWS, most // wide))


def attend_shared(
    fused: Tensor, kv: Tensor, batch: Batch, shared: SharedPrefixes, heads: int, slots: int, programs: int, most: int
) -> SharedSums:
    """Return the sums over shared prefixes, each in at most `most` parts, whole tiles of `slots`.

    `programs` fill the card.
    """
    _, _, block_size, kv_heads, head_dim = kv.shape
    group, wide = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    rows = program_rows(group, kv.element_size())
    scores = rows * triton.next_power_of_2(group)
    pairs = most_tiles(len(batch.query_lens)) * (TILE_ROWS // rows) * kv_heads
    items = max(programs, pairs)
    sums = torch.empty((items, scores, head_dim), dtype=torch.float32, device=kv.device)
    weights = torch.empty((items, scores), dtype=torch.float32, device=kv.device)
    _attend[(items,)](
        fused,
        kv,
        batch.block_tables,
        batch.query_start,
        shared.used,
        shared.lengths,
        shared.members,
        sums,
        weights,
        programs,
        fused.stride(0),
        batch.block_tables.stride(0),
        head_dim**-0.5 * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=rows,
        TILE_ROWS=TILE_ROWS,
        SCORES=scores,
        HEAD_DIM=head_dim,
        WIDE=wide,
        BLOCK_SIZE=block_size,
        TILE=slots,
        MOST=most,
        DOT=dot_type(kv.dtype),
        num_warps=8 if scores * wide >= 128 * 128 else 4,
        num_stages=3 if wide <= 128 else 2,  # with wider heads, some cards have no shared memory for more
    )
    return SharedSums(sums, weights, rows)


@triton.jit
def prefix_parts(used, programs, PAIRS: tl.constexpr, MOST: tl.constexpr):
    """Return into how many parts each prefix is split if `used` tiles have `PAIRS` programs each."""
    return tl.minimum(tl.maximum(programs // tl.maximum(used * PAIRS, 1), 1), MOST)


@triton.jit(do_not_specialize=_STEP, do_not_specialize_on_alignment=_STEP)
def _attend(
    query,
    kv,
    tables,
    query_start,
    used,
    lengths,
    members,
    sums_out,
    weights_out,
    programs,
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SCORES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
    DOT: tl.constexpr,
):
    item, tiles = tl.program_id(0), tl.load(used).to(tl.int32)
    PAIRS: tl.constexpr = (TILE_ROWS // ROWS) * KV_HEADS
    parts = prefix_parts(tiles, programs, PAIRS, MOST)
    if item >= tiles * PAIRS * parts:
        return
    part, pair = item % parts, item // parts
    kv_head, first_member = pair % KV_HEADS, pair // KV_HEADS * ROWS
    tile = first_member // TILE_ROWS
    length = tl.load(lengths + tile).to(tl.int32)
    share = part_slots(length, parts, TILE)
    begin = part * share
    end = tl.minimum(begin + share, length)
    score, column = tl.arange(0, SCORES), tl.arange(0, WIDE)
    member, head = score // (SCORES // ROWS), score % (SCORES // ROWS)
    row = tl.load(members + first_member + member).to(tl.int32)
    if (begin >= end) | (tl.max(row, 0) < 0):
        return
    kept, inside = (row >= 0) & (head < GROUP), column < HEAD_DIM
    token = tl.load(query_start + row, kept, 0).to(tl.int64)
    own = query + token * query_stride + (kv_head * GROUP + head) * HEAD_DIM
    queries = tl.load(own[:, None] + column[None, :], kept[:, None] & inside[None, :], 0.0).to(DOT)
    # The table of the tile's first row is that of all as far as the prefix goes.
    table = tables + tl.load(members + tile * TILE_ROWS).to(tl.int64) * table_stride
    largest, total, sums = attend_slots(
        queries, kv, table, begin, end, kv_head, scale, inside, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, DOT
    )
    real = kept[:, None] & inside[None, :]
    index = item * SCORES + score
    tl.store(sums_out + index[:, None] * HEAD_DIM + column[None, :], sums / total[:, None], real)
    tl.store(weights_out + index, largest + tl.log2(total), kept)


@triton.jit
def place_in_sums(
    place,
    length,
    kv_head,
    used,
    programs,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SCORES: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Return where the sums of a row begin, for the first query head of a key head, and how many parts its prefix has.

    `place` is the row's in the tiles, and `length` that of its prefix. Parts are SCORES apart.
    """
    PAIRS: tl.constexpr = (TILE_ROWS // ROWS) * KV_HEADS
    parts = prefix_parts(tl.load(used).to(tl.int32), programs, PAIRS, MOST)
    filled = tl.cdiv(length, tl.maximum(part_slots(length, parts, TILE), 1))
    return (place // ROWS * KV_HEADS + kv_head) * parts * SCORES + place % ROWS * (SCORES // ROWS), filled


@triton.jit
def join_prefix(
    largest,
    total,
    sums,
    first,
    parts,
    group,
    column,
    kept,
    prefix_sums,
    prefix_weights,
    GROUP: tl.constexpr,
    SCORES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MOST: tl.constexpr,
):
    """Add the parts of a prefix to a row's running softmax [heads of a group]; `first` is from `place_in_sums`."""
    for part in tl.static_range(MOST):  # all at once: one behind the other would wait for memory each
        index = first + part * SCORES + group
        there = part < parts
        weight = tl.load(prefix_weights + index, there & (group < GROUP), float("-inf"))
        part_sums = tl.load(prefix_sums + index[:, None] * HEAD_DIM + column[None, :], there & kept, 0.0)
        above = tl.maximum(tl.maximum(largest, weight), -1e38)  # finite for a row without a slot
        fade, share = tl.exp2(largest - above), tl.exp2(weight - above)
        total = total * fade + share
        sums = sums * fade[:, None] + part_sums * share[:, None]
        largest = above
    return largest, total, sums
