"""Attention of chunks of prompts, all rows of a step in one launch (FlashAttention-2, arXiv
2307.08691).

A program takes a tile of one row's tokens with one key head and all query heads that share it, and
reads the row's blocks up to its own last token. The grid depends on shapes alone: row b's tiles
begin at `query_start[b] // tokens a tile + b`, which is enough for each row. Programs beyond a
row's last token return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ppkernels.batch import Batch
from ppkernels.gpu.dots import LOG2_E, STEP, Tiles, dot_type, processors


def choose_tiles(wide: int, element_size: int, queries: int, places: int) -> Tiles:
    """Return tiles for heads of `wide` elements, a power of two, that fit into one of `places` processors.

    `queries` are tokens times heads of the step. Few of them get smaller tiles, so that no processor idles.
    """
    if element_size == 4:  # without matrix units: larger tiles spill registers
        return Tiles(64, 32, 8, 2) if wide <= 64 else Tiles(16, 16, 4, 2)
    if wide > 128:
        return Tiles(64, 64, 8, 2)
    return Tiles(128, 64, 4, 3) if queries >= 128 * 2 * places else Tiles(64, 64, 4, 3)


def attend_chunks(fused: Tensor, kv: Tensor, batch: Batch, heads: int, output: Tensor) -> None:
    """Write attention of the rows with more than one token to `output` [T, heads * head_dim]."""
    _, _, block_size, kv_heads, head_dim = kv.shape
    group = heads // kv_heads
    wide = max(16, triton.next_power_of_2(head_dim))
    tiles = choose_tiles(wide, kv.element_size(), len(fused) * heads, processors(kv.device))
    rows_wide = max(tiles.queries, triton.next_power_of_2(group))
    tile_tokens = rows_wide // group
    rows = len(batch.query_lens)
    _attend[kv_heads, len(fused) // tile_tokens + rows](
        fused,
        kv,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start,
        output,
        rows,
        fused.stride(0),
        batch.block_tables.stride(0),
        head_dim**-0.5 * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WIDE=wide,
        BLOCK_SIZE=block_size,
        QUERIES=rows_wide,
        TOKENS=tile_tokens,
        TILE=tiles.slots,
        DOT=dot_type(kv.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit
def _row_of(tile, query_start, rows, TOKENS: tl.constexpr):
    """Return the row of `tile`."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _add_tile(
    first,
    queries,
    last,
    kv_head,
    kv,
    table,
    length,
    scale,
    largest,
    total,
    sums,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add slots [first, first + TILE) to each query's running softmax; `last` [queries] is its last
    visible slot.
    """
    slot, column = first + tl.arange(0, TILE), tl.arange(0, WIDE)
    if MASKED:
        block = tl.load(table + slot // BLOCK_SIZE, slot < length, 0).to(tl.int64)
    else:
        block = tl.load(table + slot // BLOCK_SIZE).to(tl.int64)
    at = (block * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    place = kv + at[:, None] + column[None, :]
    beside = place + BLOCK_SIZE * KV_HEADS * HEAD_DIM
    # Hidden slots are not read: a weight of 0 does not hide a NaN.
    if MASKED:
        read = (slot < length)[:, None] & (column < HEAD_DIM)[None, :]
        keys, values = tl.load(place, read, 0.0), tl.load(beside, read, 0.0)
    elif WIDE != HEAD_DIM:
        keys = tl.load(place, (column < HEAD_DIM)[None, :], 0.0)
        values = tl.load(beside, (column < HEAD_DIM)[None, :], 0.0)
    else:
        keys, values = tl.load(place), tl.load(beside)
    scores = tl.dot(queries, tl.trans(keys.to(DOT)), input_precision="ieee")
    if MASKED:
        scores = tl.where(slot[None, :] <= last[:, None], scores, float("-inf"))
    above = tl.maximum(largest, tl.max(scores, 1) * scale)
    weight = tl.exp2(scores * scale - above[:, None])
    fade = tl.exp2(largest - above)
    total = total * fade + tl.sum(weight, 1)
    sums = tl.dot(weight.to(DOT), values.to(DOT), sums * fade[:, None], input_precision="ieee")
    return above, total, sums


@triton.jit(do_not_specialize=STEP, do_not_specialize_on_alignment=STEP)
def _attend(
    query,
    kv,
    tables,
    lengths,
    query_start,
    output,
    rows,
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the end of a prompt has the most work: it starts first
    row = _row_of(tile, query_start, rows, TOKENS)
    start = tl.load(query_start + row).to(tl.int32)
    count = tl.load(query_start + row + 1).to(tl.int32) - start
    skipped = (tile - start // TOKENS - row) * TOKENS
    if (count == 1) | (skipped >= count):
        return
    length = tl.load(lengths + row).to(tl.int32)
    before = length - count

    column = tl.arange(0, WIDE)
    inside = column < HEAD_DIM
    member = tl.arange(0, QUERIES)
    index = skipped + member // GROUP  # of the row's tokens
    kept = ((index < count) & (member < TOKENS * GROUP))[:, None] & inside[None, :]
    head = kv_head * GROUP + member % GROUP
    token = (start + index).to(tl.int64)
    queries = tl.load(query + token[:, None] * query_stride + head[:, None] * HEAD_DIM + column[None, :], kept, 0.0)
    queries = queries.to(DOT)
    last = before + index
    end = tl.minimum(before + skipped + TOKENS, length)
    plain = (before + skipped + 1) // TILE * TILE  # slots that every token of the tile sees
    table = tables + row.to(tl.int64) * table_stride

    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, WIDE), tl.float32)
    for first in range(0, plain, TILE):
        largest, total, sums = _add_tile(first, queries, last, kv_head, kv, table, length, scale, largest, total, sums,
            False, KV_HEADS, HEAD_DIM, WIDE, BLOCK_SIZE, TILE, DOT)  # fmt: skip
    for first in range(plain, end, TILE):
        largest, total, sums = _add_tile(first, queries, last, kv_head, kv, table, length, scale, largest, total, sums,
            True, KV_HEADS, HEAD_DIM, WIDE, BLOCK_SIZE, TILE, DOT)  # fmt: skip

    place = output + token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(place, (sums / total[:, None]).to(output.dtype.element_ty), kept)
