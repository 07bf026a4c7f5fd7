"""Attention of rows with one token, split over the context (Flash-Decoding, Dao et al. 2023).

A program takes one key head of one row with all query heads that share it, so that keys and values
are read once. If rows are too few to fill the GPU, each row's context is split into parts. Every
part writes its output and the log-sum-exp of its scores, and a second kernel combines them.

The grid depends on shapes alone, so a captured launch is right for any lengths: programs without
work return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.batch import Batch
from ppkernels.gpu.dots import LOG2_E, STEP, Tiles, dot_type, processors

LEAST_ROWS = 16
"""Rows of the smallest matrix product: fewer query heads are padded."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs for each multiprocessor; with more, parts are small and their sum costs more than it
gains.
"""


def attend_decodes(fused: Tensor, kv: Tensor, batch: Batch, heads: int, output: Tensor) -> None:
    """Write attention of the rows of `batch` with one token to `output` [T, heads * head_dim]; skip
    other rows.

    A row of length 0 becomes 0 and reads nothing of the cache.
    """
    _, _, block_size, kv_heads, head_dim = kv.shape
    rows, width = batch.block_tables.shape
    group, wide = heads // kv_heads, max(LEAST_ROWS, triton.next_power_of_2(head_dim))
    places = PROGRAMS_PER_PROCESSOR * processors(kv.device)
    tiles = choose_tiles(group, wide, kv.element_size(), rows * kv_heads <= places)
    parts = split_count(rows * kv_heads, -(-width * block_size // tiles.slots), places)
    partial = weights = output  # not used if the whole context is one part
    if parts > 1:
        partial = torch.empty((rows, heads, parts, head_dim), dtype=torch.float32, device=kv.device)
        weights = torch.empty((rows, heads, parts), dtype=torch.float32, device=kv.device)
    _attend[kv_heads, rows, parts](
        fused,
        kv,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start,
        output,
        partial,
        weights,
        fused.stride(0),
        batch.block_tables.stride(0),
        head_dim**-0.5 * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_ROWS=tiles.queries,
        HEAD_DIM=head_dim,
        WIDE=wide,
        BLOCK_SIZE=block_size,
        TILE=tiles.slots,
        WHOLE=parts == 1,
        DOT=dot_type(kv.dtype),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if parts > 1:
        _weigh[heads, rows](
            partial,
            weights,
            batch.seq_lens,
            batch.query_start,
            output,
            parts,
            HEAD_DIM=head_dim,
            WIDE=wide,
            TILE=tiles.slots,
            PARTS_WIDE=parts_wide(parts),
            num_warps=4,
        )


def choose_tiles(group: int, wide: int, element_size: int, few: bool) -> Tiles:
    """Return tiles for `group` query heads a key head of `wide` elements, a power of two; measured
    on an H200.

    With `few` programs, each has more of the cache in flight.
    """
    queries = max(LEAST_ROWS, triton.next_power_of_2(group))
    if element_size == 4:  # without matrix units: larger tiles spill registers
        return Tiles(queries, min(64, 4096 // wide), 4, 3)
    return Tiles(queries, min(64, 8192 // wide) * (2 if few else 1), 4, 3)


def split_count(programs: int, tiles: int, places: int) -> int:
    """Return how many parts a context of at most `tiles` has if rows need `programs`."""
    return max(1, min(places // programs, tiles))


def parts_wide(parts: int) -> int:
    """Return the width of the tile that joins `parts` of a context.

    There are few widths up to 64, so that a step of any shape finds its kernel compiled.
    """
    return next((wide for wide in (16, 64) if parts <= wide), triton.next_power_of_2(parts))


@triton.jit
def _share(length, parts, TILE: tl.constexpr):
    """Return the slots of each part of a context, in whole tiles."""
    return tl.cdiv(tl.cdiv(length, TILE), parts) * TILE


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
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT: tl.constexpr,
):
    kv_head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) - token != 1:
        return
    length = tl.load(lengths + row).to(tl.int32)
    begin, end = 0, length
    if not WHOLE:
        share = _share(length, tl.num_programs(2), TILE)
        begin = part * share
        end = tl.minimum(begin + share, length)
        if begin >= end:
            return

    group, column = tl.arange(0, GROUP_ROWS), tl.arange(0, WIDE)
    inside = column < HEAD_DIM
    # [GROUP_ROWS, WIDE]: the query heads that share the key head.
    shared = (kv_head * GROUP + group)[:, None] * HEAD_DIM + column[None, :]
    kept = (group < GROUP)[:, None] & inside[None, :]
    queries = tl.load(query + token * query_stride + shared, kept, 0.0).to(DOT)
    largest = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    sums = tl.zeros((GROUP_ROWS, WIDE), tl.float32)
    for first in range(begin, end, TILE):
        slot = first + tl.arange(0, TILE)
        seen = slot < end
        block = tl.load(tables + row * table_stride + slot // BLOCK_SIZE, seen, 0).to(tl.int64)
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

    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if WHOLE:
        tl.store(output + token * (KV_HEADS * GROUP * HEAD_DIM) + shared, sums.to(output.dtype.element_ty), kept)
    else:
        index = ((row * KV_HEADS + kv_head) * GROUP + group) * tl.num_programs(2) + part
        tl.store(partial + index[:, None] * HEAD_DIM + column[None, :], sums, kept)
        tl.store(weights + index, largest + tl.log2(total), group < GROUP)


@triton.jit
def weigh_parts(partial, weights, first, part, column, written, inside, HEAD_DIM: tl.constexpr):
    """Return the output [WIDE] of which `written` parts, from index `first` on, have sums and log-sum-exps."""
    scores = tl.load(weights + first + part, written, float("-inf"))
    largest = tl.maximum(tl.max(scores, 0), -1e38)  # finite without a part
    weight = tl.exp2(scores - largest)
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    read = written[:, None] & inside[None, :]
    sums = tl.load(partial + (first + part)[:, None] * HEAD_DIM + column[None, :], read, 0.0)
    return tl.sum(sums * weight[:, None], 0)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=STEP)
def _weigh(
    partial,
    weights,
    lengths,
    query_start,
    output,
    parts,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
):
    head, heads, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) - token != 1:
        return
    length = tl.load(lengths + row).to(tl.int32)
    part, column = tl.arange(0, PARTS_WIDE), tl.arange(0, WIDE)
    inside = column < HEAD_DIM
    written = (part < parts) & (part * _share(length, parts, TILE) < length)
    first = (row * heads + head) * parts
    result = weigh_parts(partial, weights, first, part, column, written, inside, HEAD_DIM)
    tl.store(output + (token * heads + head) * HEAD_DIM + column, result.to(output.dtype.element_ty), inside)
