"""Attention of chunks of prompts, all rows of a step in one launch (FlashAttention-2, arXiv
2307.08691).

A program takes a tile of one row's tokens with one key head and all query heads that share it, and
reads the row's blocks up to its own last token. The grid depends on shapes alone: row b's tiles
begin at `query_start[b] // tokens a tile + b`, which is enough for each row. Programs beyond a
row's last token return at once.

A few tokens behind a long context are few tiles, so each tile's context is split into parts, as
`paged_decode` does for single tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.batch import Batch
from ppkernels.gpu.dots import LOG2_E, STEP, Tiles, dot_type, processors
from ppkernels.gpu.paged_decode import PROGRAMS_PER_PROCESSOR, weigh_parts

LEAST_PART = 512
"""Slots of the smallest part of a context."""
MOST_PARTS = 32
"""Parts of a context; a power of two, the same for all shapes, so that no kernel is compiled amid requests."""


def choose_tiles(wide: int, element_size: int, queries: int, places: int) -> Tiles:
    """Return tiles for heads of `wide` elements, a power of two, that fit into one of `places` processors.

    `queries` are tokens times heads of the step. Few of them get smaller tiles, so that no processor idles.
    """
    if element_size == 4:  # without matrix units: larger tiles spill registers
        return Tiles(64, 32, 8, 2) if wide <= 64 else Tiles(16, 16, 4, 2)
    if wide > 128:
        return Tiles(64, 64, 8, 2)
    return Tiles(128, 64, 4, 3) if queries >= 128 * 2 * places else Tiles(64, 64, 4, 3)


def split_count(programs: int, slots: int, places: int) -> int:
    """Return how many parts a context of at most `slots` has.

    `programs`: those that the tokens of a step need if all are of one row.
    """
    return max(1, min(places // programs, -(-slots // LEAST_PART), MOST_PARTS))


def attend_chunks(fused: Tensor, kv: Tensor, batch: Batch, heads: int, output: Tensor) -> None:
    """Write attention of the rows with more than one token to `output` [T, heads * head_dim]."""
    _, _, block_size, kv_heads, head_dim = kv.shape
    group, tokens = heads // kv_heads, len(fused)
    wide = max(16, triton.next_power_of_2(head_dim))
    places = processors(kv.device)
    tiles = choose_tiles(wide, kv.element_size(), tokens * heads, places)
    rows_wide = max(tiles.queries, triton.next_power_of_2(group))
    tile_tokens = rows_wide // group
    rows, slots = len(batch.query_lens), batch.block_tables.shape[1] * block_size
    programs = kv_heads * max(1, tokens // tile_tokens)
    parts = split_count(programs, slots, PROGRAMS_PER_PROCESSOR * places)
    partial = weights = output  # not used if the whole context is one part
    if parts > 1:
        partial = torch.empty((tokens, heads, parts, head_dim), dtype=torch.float32, device=kv.device)
        weights = torch.empty((tokens, heads, parts), dtype=torch.float32, device=kv.device)
    grid = kv_heads, tokens // tile_tokens + rows
    _attend[*grid, parts](
        fused,
        kv,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start,
        output,
        partial,
        weights,
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
        LEAST=LEAST_PART,
        WHOLE=parts == 1,
        DOT=dot_type(kv.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if parts > 1:
        _weigh[heads, tokens](
            partial,
            weights,
            batch.seq_lens,
            batch.query_start,
            output,
            rows,
            parts,
            HEAD_DIM=head_dim,
            WIDE=wide,
            TOKENS=tile_tokens,
            TILE=tiles.slots,
            LEAST=LEAST_PART,
            PARTS_WIDE=MOST_PARTS,
            num_warps=4,
        )


@triton.jit
def _row_of(tile, query_start, rows, TOKENS: tl.constexpr):
    """Return the row of `tile`; if `TOKENS` is 0, of the token `tile`."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start + middle)
        if TOKENS:
            first = first // TOKENS + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _share(end, parts, TILE: tl.constexpr, LEAST: tl.constexpr):
    """Return the slots of each part of a context, in whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(end, TILE), parts) * TILE, LEAST)


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
    WHOLE: tl.constexpr,
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
    base = above
    if MASKED and not WHOLE:
        base = tl.maximum(above, -1e38)  # A token may see nothing of the last part.
    weight = tl.exp2(scores * scale - base[:, None])
    fade = tl.exp2(largest - base)
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
    partial,
    weights,
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
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT: tl.constexpr,
):
    kv_head, part = tl.program_id(0), tl.program_id(2)
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
    own = (index < count) & (member < TOKENS * GROUP)
    kept = own[:, None] & inside[None, :]
    head = kv_head * GROUP + member % GROUP
    token = (start + index).to(tl.int64)
    end = tl.minimum(before + skipped + TOKENS, length)
    plain = (before + skipped + 1) // TILE * TILE  # slots that every token of the tile sees
    begin = 0
    if not WHOLE:
        share = _share(end, tl.num_programs(2), TILE, LEAST)
        begin, several = part * share, share < end
        if begin >= end:
            return
        end = tl.minimum(begin + share, end)
        plain = tl.minimum(plain, end)
    queries = tl.load(query + token[:, None] * query_stride + head[:, None] * HEAD_DIM + column[None, :], kept, 0.0)
    queries = queries.to(DOT)
    last = before + index
    table = tables + row.to(tl.int64) * table_stride

    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, WIDE), tl.float32)
    for first in range(begin, plain, TILE):
        largest, total, sums = _add_tile(first, queries, last, kv_head, kv, table, length, scale, largest, total, sums,
            False, WHOLE, KV_HEADS, HEAD_DIM, WIDE, BLOCK_SIZE, TILE, DOT)  # fmt: skip
    for first in range(tl.maximum(begin, plain), end, TILE):
        largest, total, sums = _add_tile(first, queries, last, kv_head, kv, table, length, scale, largest, total, sums,
            True, WHOLE, KV_HEADS, HEAD_DIM, WIDE, BLOCK_SIZE, TILE, DOT)  # fmt: skip

    place = token * (KV_HEADS * GROUP) + head
    if not WHOLE:  # noqa: SIM102 (the compiler drops this branch, where `several` is not defined)
        if several:
            place = place * tl.num_programs(2) + part
            at = partial + place[:, None] * HEAD_DIM + column[None, :]
            tl.store(at, sums / tl.where(total == 0.0, 1.0, total)[:, None], kept)
            tl.store(weights + place, largest + tl.log2(total), own)
            return
    at = output + place[:, None] * HEAD_DIM + column[None, :]
    tl.store(at, (sums / total[:, None]).to(output.dtype.element_ty), kept)


@triton.jit(do_not_specialize=[*STEP, "parts"], do_not_specialize_on_alignment=STEP)
def _weigh(
    partial,
    weights,
    lengths,
    query_start,
    output,
    rows,
    parts,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
):
    head, heads, token = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    row = _row_of(token, query_start, rows, 0)
    start = tl.load(query_start + row).to(tl.int32)
    count = tl.load(query_start + row + 1).to(tl.int32) - start
    length = tl.load(lengths + row).to(tl.int32)
    # The end of the tile that the token is in.
    end = tl.minimum(length - count + ((token - start) // TOKENS + 1) * TOKENS, length)
    share = _share(end, parts, TILE, LEAST)
    if (count == 1) | (token - start >= count) | (share >= end):
        return
    part, column = tl.arange(0, PARTS_WIDE), tl.arange(0, WIDE)
    inside, written = column < HEAD_DIM, (part < parts) & (part * share < end)
    place = token.to(tl.int64) * heads + head
    result, _, _ = weigh_parts(partial, weights, place * parts + part, column, written, inside, HEAD_DIM)
    tl.store(output + place * HEAD_DIM + column, result.to(output.dtype.element_ty), inside)
