"""Greedy tokens of a vocabulary that is split over the ranks of a stage, without whole logits: one kernel a call.

A rank finds the best logit of its columns and sends it with its token, two words a row (see `collectives`). Each rank
compares those of all ranks, and takes the lowest token among equals, as `sampling.choose` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.gpu import collectives
from ppkernels.gpu.draw import BY_ROW, ban
from ppkernels.gpu.rank_memory import JOINED, count_call, read_pair, send_pair
from ppkernels.gpu.row_passes import best_of
from ppkernels.gpu.sampling import GREEDY_BLOCK, DeviceSampling


class Columns(NamedTuple):
    """The columns of whole logits that a rank has: `width` from `first` on, of `vocabulary`."""

    first: int
    width: int
    vocabulary: int


def choose_greedy(
    logits: Tensor, columns: Columns, parameters: DeviceSampling, slots: Tensor, positions: Tensor,
    newest: Tensor | None, table: Tensor, counters: Tensor, rank: int, size: int, part_bytes: int,
) -> Tensor:  # fmt: skip
    """Return `sampling.choose` of the whole logits of greedy rows, on every rank; `logits` [R, w] are this rank's.

    There must be a row. Raises ValueError for more than `collectives.WORD_BYTES` / 8 of them.
    """
    rows = len(logits)
    if (most := collectives.WORD_BYTES // 8) < rows:
        raise ValueError(f"{rows} rows: ranks choose {most} tokens at most in a call")
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _choose_rows[(min(rows, collectives.PROGRAMS),)](
        logits,
        parameters.table,
        slots,
        positions,
        tokens,
        newest if newest is not None else tokens,
        rows,
        logits.stride(0),
        parameters.table.stride(0),
        *columns,
        table,
        counters,
        NEWEST=newest is not None,
        BANNED_WIDTH=parameters.banned,
        RANK=rank,
        SIZE=size,
        WORDS_AT=collectives.words_bytes(size, part_bytes)[0],
        WORDS=collectives.WORD_BYTES // 4,
        MOST=collectives.PROGRAMS,
        BLOCK=GREEDY_BLOCK,
        num_warps=32,
    )
    return tokens


# A number of rows of its own kind would compile the kernel again, amid requests.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=BY_ROW)
def _choose_rows(
    logits, parameters, slots, positions, tokens, newest, rows, row_stride, parameters_stride, first, width, vocabulary,
    table, counters,
    NEWEST: tl.constexpr, BANNED_WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, WORDS_AT: tl.constexpr,
    WORDS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p takes every row whose number is p modulo the programs: it sends all of them before it waits for one."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    joined = tl.load(table + JOINED) != 0
    number = tl.load(counters + program) + 1
    for row in range(program, rows, programs):
        values = logits + (tl.zeros((), tl.int64) + row) * row_stride
        own = parameters + tl.load(slots + row) * parameters_stride
        position = tl.load(positions + row).to(tl.int64)
        places, bans, saved = ban(values, own, position, first, width, BANNED_WIDTH)
        _, best, token = best_of(values, width, BLOCK)
        tl.debug_barrier()
        tl.store(values + places, saved, mask=bans)
        bits, token = best.to(tl.int32, bitcast=True), token + first
        if joined:
            send_pair(bits, token, row, number, table, RANK, SIZE, WORDS_AT, WORDS)
        tl.store(tokens + row, pair_of(bits, token))  # in the place of the row's token
    tl.debug_barrier()
    released = tl.zeros((), tl.int64)
    for row in range(program, rows, programs):
        best, chosen, released = best_of_ranks(
            tl.load(tokens + row), row, joined, number, released, table, RANK, SIZE, WORDS_AT, WORDS
        )
        if joined:
            # After a released wait it may be anything, and later kernels look it up.
            chosen = tl.minimum(tl.maximum(chosen, 0), vocabulary - 1)
        tl.debug_barrier()  # all threads have read the row's own pair
        tl.store(tokens + row, chosen.to(tl.int64))
        if NEWEST:
            tl.store(newest + tl.load(slots + row), chosen.to(newest.dtype.element_ty))
    count_call(counters, program, programs, number, MOST)


@triton.jit
def pair_of(bits, token):
    """Return the bits of a logit, and its token, in one number."""
    return (bits.to(tl.int64) << 32) | (token.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def unpaired(pair):
    """Return the logit in float32, and its token."""
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), (pair & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def best_of_ranks(
    pair, row, joined, number, released, table,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS_AT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Wait for the best logit of each rank in a row. Return the best of them with this rank's `pair`, its token, and
    the word of host memory as last seen.
    """
    own, own_token = unpaired(pair)
    best, chosen = own, own_token
    if joined:
        # In rank order, so that the lowest of equal tokens stays.
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                value, token = own, own_token
            else:
                bits, token, released = read_pair(row, peer, number, released, table, RANK, SIZE, WORDS_AT, WORDS)
                value = bits.to(tl.float32, bitcast=True)
            if peer == 0:
                best, chosen = value, token
            else:
                chosen = tl.where(value > best, token, chosen)
                best = tl.maximum(best, value)
    return best, chosen, released
