"""Attention of rows with one token, split over the context (Flash-Decoding, Dao et al. 2023).

A program takes one key head of one row with all query heads that share it, so that keys and values
are read once. If rows are too few to fill the GPU, each row's context is split into parts. Every
part writes its output and the log-sum-exp of its scores, and a second kernel combines them.

The grid depends on shapes alone, so a captured launch is right for any lengths: programs without
work return at once.

A prefix that rows share is read before, for all of them at once (`shared_decode`). Its sums are
joined with those of the rest of each row: by the row's program, or with the parts of its context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.batch import Batch
from ppkernels.gpu.attend_slots import attend_slots, part_slots
from ppkernels.gpu.chain import chains, follow, let_follow
from ppkernels.gpu.dots import LOG2_E, STEP, Tiles, dot_type, processors
from ppkernels.gpu.shared_decode import MOST_PARTS, MOST_WHOLE_PARTS, attend_shared, join_prefix, place_in_sums
from ppkernels.shared_prefixes import TILE_ROWS

LEAST_ROWS = 16
"""Rows of the smallest matrix product: fewer query heads are padded."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs for each multiprocessor; with more, parts are small and their sum costs more than it
gains.
"""
PREFIX_STEP = (*STEP, "prefix_used", "prefix_lengths", "prefix_places", "prefix_programs")


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
    chain = chains(kv.device)
    prefix = None
    used = lengths = row_places = prefix_sums = prefix_weights = output  # not used without a shared prefix
    if batch.shared is not None:
        most = MOST_WHOLE_PARTS if parts == 1 else MOST_PARTS
        prefix = attend_shared(fused, kv, batch, batch.shared, heads, tiles.slots, places, most.value)
        used, lengths, row_places = batch.shared.used, batch.shared.lengths, batch.shared.places
        prefix_sums, prefix_weights = prefix.sums, prefix.weights
    _attend[kv_heads, rows, parts](
        fused,
        kv,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start,
        output,
        partial,
        weights,
        used,
        lengths,
        row_places,
        prefix_sums,
        prefix_weights,
        places,
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
        PREFIX_ROWS=0 if prefix is None else prefix.rows,
        PREFIX_SCORES=0 if prefix is None else prefix_sums.shape[1],
        TILE_ROWS=TILE_ROWS,
        DOT=dot_type(kv.dtype),
        CHAIN=chain,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=chain,
    )
    if parts > 1:
        _weigh[heads, rows](
            partial,
            weights,
            batch.seq_lens,
            batch.query_start,
            output,
            used,
            lengths,
            row_places,
            prefix_sums,
            prefix_weights,
            places,
            parts,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            WIDE=wide,
            TILE=tiles.slots,
            PREFIX_ROWS=0 if prefix is None else prefix.rows,
            PREFIX_SCORES=0 if prefix is None else prefix_sums.shape[1],
            TILE_ROWS=TILE_ROWS,
            PARTS_WIDE=parts_wide(parts),
            CHAIN=chain,
            num_warps=4,
            launch_pdl=chain,
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
def _prefix_of(row, prefix_lengths, prefix_places, TILE_ROWS: tl.constexpr):
    """Return a row's place in the tiles of shared prefixes, and the length of its prefix; 0 without one."""
    place = tl.load(prefix_places + row).to(tl.int32)
    return place, tl.load(prefix_lengths + tl.maximum(place, 0) // TILE_ROWS, place >= 0, 0).to(tl.int32)


@triton.jit(do_not_specialize=PREFIX_STEP, do_not_specialize_on_alignment=PREFIX_STEP)
def _attend(
    query,
    kv,
    tables,
    lengths,
    query_start,
    output,
    partial,
    weights,
    prefix_used,
    prefix_lengths,
    prefix_places,
    prefix_sums,
    prefix_weights,
    prefix_programs,
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
    PREFIX_ROWS: tl.constexpr,
    PREFIX_SCORES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DOT: tl.constexpr,
    CHAIN: tl.constexpr,
):
    kv_head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.load(query_start + row).to(tl.int64)
    behind = tl.load(query_start + row + 1)
    length = tl.load(lengths + row).to(tl.int32)
    follow(CHAIN)
    if behind - token != 1:
        return
    begin, end, prefix_length, prefix_place = 0, length, 0, 0
    if PREFIX_ROWS:
        prefix_place, prefix_length = _prefix_of(row, prefix_lengths, prefix_places, TILE_ROWS)
        begin = prefix_length
    if not WHOLE:
        share = part_slots(length - prefix_length, tl.num_programs(2), TILE)
        begin = prefix_length + part * share
        end = tl.minimum(begin + share, length)
        if begin >= end:
            return

    group, column = tl.arange(0, GROUP_ROWS), tl.arange(0, WIDE)
    inside = column < HEAD_DIM
    # [GROUP_ROWS, WIDE]: the query heads that share the key head.
    shared = (kv_head * GROUP + group)[:, None] * HEAD_DIM + column[None, :]
    kept = (group < GROUP)[:, None] & inside[None, :]
    queries = tl.load(query + token * query_stride + shared, kept, 0.0).to(DOT)
    largest, total, sums = attend_slots(
        queries, kv, tables + row * table_stride, begin, end, kv_head, scale, inside,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, DOT,
    )  # fmt: skip
    if PREFIX_ROWS and WHOLE:
        first, prefix_parts = place_in_sums(
            prefix_place, prefix_length, kv_head, prefix_used, prefix_programs,
            KV_HEADS, PREFIX_ROWS, TILE_ROWS, PREFIX_SCORES, TILE, MOST_WHOLE_PARTS,
        )  # fmt: skip
        largest, total, sums = join_prefix(
            largest, total, sums, first, prefix_parts, group, column, kept, prefix_sums, prefix_weights,
            GROUP, PREFIX_SCORES, HEAD_DIM, MOST_WHOLE_PARTS,
        )  # fmt: skip
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if WHOLE:
        tl.store(output + token * (KV_HEADS * GROUP * HEAD_DIM) + shared, sums.to(output.dtype.element_ty), kept)
    else:
        index = ((row * KV_HEADS + kv_head) * GROUP + group) * tl.num_programs(2) + part
        tl.store(partial + index[:, None] * HEAD_DIM + column[None, :], sums, kept)
        tl.store(weights + index, largest + tl.log2(total), group < GROUP)


@triton.jit
def weigh_parts(partial, weights, index, column, written, inside, HEAD_DIM: tl.constexpr):
    """Return the output [WIDE] of which the `written` parts at `index` have sums and log-sum-exps.

    Also return its largest log-sum-exp, and its weight in relation to that.
    """
    scores = tl.load(weights + index, written, float("-inf"))
    largest = tl.maximum(tl.max(scores, 0), -1e38)  # finite without a part
    weight = tl.exp2(scores - largest)
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    read = written[:, None] & inside[None, :]
    sums = tl.load(partial + index[:, None] * HEAD_DIM + column[None, :], read, 0.0)
    return tl.sum(sums * weight[:, None], 0), largest, total


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=PREFIX_STEP)
def _weigh(
    partial,
    weights,
    lengths,
    query_start,
    output,
    prefix_used,
    prefix_lengths,
    prefix_places,
    prefix_sums,
    prefix_weights,
    prefix_programs,
    parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    PREFIX_SCORES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PARTS_WIDE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    let_follow(CHAIN)  # attention is over: the product behind may read its weight
    head, heads, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) - token != 1:
        return
    length = tl.load(lengths + row).to(tl.int32)
    if PREFIX_ROWS:
        prefix_place, prefix_length = _prefix_of(row, prefix_lengths, prefix_places, TILE_ROWS)
        length -= prefix_length
    part, column = tl.arange(0, PARTS_WIDE), tl.arange(0, WIDE)
    inside = column < HEAD_DIM
    written = (part < parts) & (part * part_slots(length, parts, TILE) < length)
    first = (row * heads + head) * parts
    index = first + part
    result, largest, total = weigh_parts(partial, weights, index, column, written, inside, HEAD_DIM)
    if PREFIX_ROWS:
        place, filled = place_in_sums(
            prefix_place, prefix_length, head // GROUP, prefix_used, prefix_programs,
            KV_HEADS, PREFIX_ROWS, TILE_ROWS, PREFIX_SCORES, TILE, MOST_PARTS,
        )  # fmt: skip
        prefix_part = tl.arange(0, MOST_PARTS)
        index = place + head % GROUP + prefix_part * PREFIX_SCORES
        there = prefix_part < filled
        above, top, share = weigh_parts(prefix_sums, prefix_weights, index, column, there, inside, HEAD_DIM)
        most = tl.maximum(largest, top)
        total, share = total * tl.exp2(largest - most), share * tl.exp2(top - most)
        both = total + share
        result = (result * total + above * share) / tl.where(both == 0.0, 1.0, both)
    tl.store(output + (token * heads + head) * HEAD_DIM + column, result.to(output.dtype.element_ty), inside)
