"""Tokens drawn below top-k from a vocabulary that is split over the ranks of a stage, without whole logits: one kernel
a call.

| phase | a rank sends, for each row | and then knows |
|---|---|---|
| 1 | its best logit and that token | the best logit of all, and with it the weights; the token of a greedy row |
| 2 | its top-k tokens by weight, and their logits | all tokens that top-k of whole logits keeps |
| 3 | nothing | the token that `sampling.choose` draws, by the same code |

Top-k cuts scaled logits, and different logits may be equal once they are scaled. So a rank cannot know its candidates
before it knows the best logit of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.gpu import collectives
from ppkernels.gpu.dots import processors
from ppkernels.gpu.draw import (
    BY_ROW,
    SAMPLE,
    SEED,
    TEMPERATURE,
    TINY,
    TOP_K,
    TOP_P,
    ban,
    cut_to_number,
    draw_from,
    float_of,
    gather_from,
    random_number,
)
from ppkernels.gpu.greedy_ranks import Columns, best_of_ranks, pair_of, unpaired
from ppkernels.gpu.rank_memory import JOINED, count_call, note_second, read_pairs, send_pair, send_pairs
from ppkernels.gpu.row_passes import best_of, cut_at, gather, order_of, place_of
from ppkernels.gpu.sampling import CANDIDATES, DRAW_BLOCK, DeviceSampling

MOST = 64
"""Largest top-k."""
WARPS = 16
LANES = 32 * WARPS
"""One for each thread: those behind a row's top-k have nothing. With fewer, warps would share the words of a wait."""


def fits(rows: int, most: int) -> bool:
    """Return whether a call can have these rows, of which none has a larger top-k than `most`."""
    return most <= MOST and rows * (1 + most) <= collectives.WORD_BYTES // 8


def choose_below(
    logits: Tensor, columns: Columns, parameters: DeviceSampling, slots: Tensor, positions: Tensor, most: int,
    newest: Tensor | None, table: Tensor, counters: Tensor, rank: int, size: int, part_bytes: int,
) -> Tensor:  # fmt: skip
    """Return `sampling.choose` of the whole logits, on every rank; `logits` [R, w] are this rank's.

    A row is greedy, or its top-k is 1 to `most`. A row whose best logit is not finite has a void token, the same on all
    ranks. There must be a row. Raises ValueError for more than fit.
    """
    rows, device = len(logits), logits.device
    if not fits(rows, most):
        raise ValueError(f"{rows} rows with a top-k of up to {most} do not fit a call")
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    room = rows, CANDIDATES + size * MOST
    # A program has a multiprocessor for itself, and waits on it for others.
    _choose_rows[(min(rows, collectives.PROGRAMS, processors(device)),)](
        logits,
        parameters.table,
        slots,
        positions,
        tokens,
        newest if newest is not None else tokens,
        torch.empty(room, dtype=logits.dtype, device=device),
        torch.empty(room, dtype=torch.int32, device=device),
        rows,
        most,
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
        PROGRAMS=collectives.PROGRAMS,
        LANES=LANES,
        MERGED=triton.next_power_of_2(size * MOST),
        ROOM=room[1],
        CAPACITY=CANDIDATES,
        BLOCK=DRAW_BLOCK,
        num_warps=WARPS,
    )
    return tokens


# A number of its own kind would compile the kernel again, amid requests.
@triton.jit(do_not_specialize=["rows", "most"], do_not_specialize_on_alignment=BY_ROW)
def _choose_rows(
    logits, parameters, slots, positions, tokens, newest, candidates, ids, rows, most, row_stride, parameters_stride,
    first, width, vocabulary, table, counters,
    NEWEST: tl.constexpr, BANNED_WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, WORDS_AT: tl.constexpr,
    WORDS: tl.constexpr, PROGRAMS: tl.constexpr, LANES: tl.constexpr, MERGED: tl.constexpr, ROOM: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p takes every row whose number is p modulo the programs. In each phase it sends all before it waits.

    Words of a call: the pair of each row, then `most` pairs of each row. `candidates` and `ids` have room for CAPACITY
    >= BLOCK tokens a row, and behind them for those of all ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    joined = tl.load(table + JOINED) != 0
    number = tl.load(counters + program) + 1
    for row in range(program, rows, programs):
        place = tl.zeros((), tl.int64) + row
        values, own = logits + place * row_stride, parameters + tl.load(slots + row) * parameters_stride
        position = tl.load(positions + row).to(tl.int64)
        places, bans, saved = ban(values, own, position, first, width, BANNED_WIDTH)
        highest, best, token = best_of(values, width, BLOCK)
        tl.store(candidates + place * ROOM + tl.arange(0, BLOCK), highest.to(values.dtype.element_ty))
        tl.debug_barrier()
        tl.store(values + places, saved, mask=bans)
        bits, token = best.to(tl.int32, bitcast=True), token + first
        if joined:
            send_pair(bits, token, row, number, table, RANK, SIZE, WORDS_AT, WORDS)
        tl.store(tokens + row, pair_of(bits, token))  # in the place of the row's token
    tl.debug_barrier()
    released = tl.zeros((), tl.int64)
    for row in range(program, rows, programs):
        best, token, released = best_of_ranks(
            tl.load(tokens + row), row, joined, number, released, table, RANK, SIZE, WORDS_AT, WORDS
        )
        tl.debug_barrier()  # all threads have read the row's own pair
        tl.store(tokens + row, pair_of(best.to(tl.int32, bitcast=True), token))
        tl.debug_barrier()
        best, _ = unpaired(tl.load(tokens + row))  # after a released wait, warps may have seen different words
        place = tl.zeros((), tl.int64) + row
        values, own = logits + place * row_stride, parameters + tl.load(slots + row) * parameters_stride
        temperature, top_k = float_of(tl.load(own + TEMPERATURE)), _number_of(own, most)
        if (temperature > 0) & _finite(best):
            position = tl.load(positions + row).to(tl.int64)
            places, bans, saved = ban(values, own, position, first, width, BANNED_WIDTH)
            kept = place * ROOM + CAPACITY + RANK * top_k
            x, columns = _top(
                values, width, best, tl.maximum(temperature, TINY), top_k, candidates + place * ROOM,
                ids + place * ROOM, candidates + kept, ids + kept, CAPACITY, LANES, BLOCK,
            )  # fmt: skip
            chosen = columns + first
            tl.debug_barrier()
            tl.store(values + places, saved, mask=bans)
            if joined:
                bits, at = x.to(tl.int32, bitcast=True), rows + row * most
                send_pairs(bits, chosen, at, top_k, number, table, RANK, SIZE, WORDS_AT, WORDS, LANES)
            lanes = tl.arange(0, LANES)
            tl.store(candidates + kept + lanes, x.to(values.dtype.element_ty), mask=lanes < top_k)
            tl.store(ids + kept + lanes, chosen, mask=lanes < top_k)
    tl.debug_barrier()
    if joined:
        for peer in tl.static_range(SIZE):
            note_second(table, peer, number, RANK, WORDS_AT - SIZE * PROGRAMS * 8, PROGRAMS)
    for row in range(program, rows, programs):
        best, token = unpaired(tl.load(tokens + row))
        slot, position = tl.load(slots + row), tl.load(positions + row).to(tl.int64)
        own, place = parameters + slot * parameters_stride, tl.zeros((), tl.int64) + row
        temperature, top_k = float_of(tl.load(own + TEMPERATURE)), _number_of(own, most)
        if temperature > 0:
            token = vocabulary - 1
            if _finite(best):
                merged, merged_ids = candidates + place * ROOM + CAPACITY, ids + place * ROOM + CAPACITY
                start, released = _merge(
                    merged, merged_ids, row, top_k, rows + row * most, joined, number, released, table,
                    RANK, SIZE, WORDS_AT, WORDS, LANES,
                )  # fmt: skip
                draw = random_number(tl.load(own + SEED), tl.load(own + SAMPLE), position)
                chosen = draw_from(
                    merged, SIZE * top_k, best, tl.maximum(temperature, TINY), start, order_of(best, logits) + 1, True,
                    top_k, float_of(tl.load(own + TOP_P)), 0, draw, MERGED,
                )  # fmt: skip
                token = tl.load(merged_ids + chosen)
        # After a released wait it may be anything, and later kernels look it up.
        token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
        tl.debug_barrier()  # all threads have read the row's pair
        tl.store(tokens + row, token.to(tl.int64))
        if NEWEST:
            tl.store(newest + slot, token.to(newest.dtype.element_ty))
    count_call(counters, program, programs, number, PROGRAMS)


@triton.jit
def _number_of(own, most):
    """Return a row's top-k in int32."""
    return tl.minimum(tl.maximum(tl.load(own + TOP_K), 0), most).to(tl.int32)


@triton.jit
def _finite(best):
    return (best > float("-inf")) & (best < float("inf"))


@triton.jit
def _top(
    values, width, best, temperature, top_k, candidates, ids, kept, kept_ids,
    CAPACITY: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the `top_k` <= LANES best logits by weight and their places, by ascending place, of equals the lowest.

    With fewer tokens the others are of no weight. `best` is the logit that has the weight 1, `candidates` has the best
    logit of each of BLOCK lanes. `kept` and `kept_ids` are room for `top_k` tokens.
    """
    start, end = order_of(best * 0 + float("-inf"), values), order_of(best, values) + 1
    # A goal that the best of each lane reach, all logits reach: the cut is not below theirs.
    start = cut_at(candidates, BLOCK, best, temperature, start, end, top_k, False, BLOCK)
    tl.debug_barrier()
    row, count, gathered = gather_from(start, values, width, best, temperature, candidates, ids, CAPACITY, BLOCK)
    edge, _, ties, equal = cut_to_number(row, count, best, temperature, start, end, top_k, BLOCK)
    last = count
    if (ties > 0) & (ties < equal):
        last = place_of(row, count, best, temperature, edge, count, ties - 1, True, BLOCK)
    found = gather(row, count, best, temperature, edge, last, kept, kept_ids, top_k, BLOCK)
    tl.debug_barrier()
    lanes = tl.arange(0, LANES)
    inside = lanes < tl.minimum(found, top_k)
    x = tl.load(kept + lanes, mask=inside, other=float("-inf")).to(tl.float32)
    place = tl.load(kept_ids + lanes, mask=inside, other=0)
    if gathered:
        place = tl.load(ids + place)
    return x, tl.where(inside, place, 0)


@triton.jit
def _merge(
    merged, merged_ids, row, top_k, at, joined, number, released, table,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS_AT: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the candidates of the other ranks beside those of this one. Return an order that top-k's cut is not below,
    and the word of host memory as last seen.
    """
    lanes = tl.arange(0, LANES)
    start = order_of(tl.full((), float("-inf"), tl.float32), merged)
    for peer in tl.static_range(SIZE):
        place = peer * top_k + lanes
        if peer == RANK:
            x = tl.load(merged + place, mask=lanes < top_k, other=0.0).to(tl.float32)
        else:
            x, token = tl.full((LANES,), float("-inf"), tl.float32), lanes * 0
            if joined:
                bits, token, released = read_pairs(
                    at, top_k, peer, number, released, table, RANK, SIZE, WORDS_AT, WORDS, LANES
                )
                x = bits.to(tl.float32, bitcast=True)
            tl.store(merged + place, x.to(merged.dtype.element_ty), mask=lanes < top_k)
            tl.store(merged_ids + place, token, mask=lanes < top_k)
        # A rank has top-k logits of at least its lowest.
        start = tl.maximum(start, order_of(tl.min(tl.where(lanes < top_k, x, float("inf"))), merged))
    tl.debug_barrier()
    return start, released
