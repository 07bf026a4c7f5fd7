"""Collectives between the ranks of one stage on GPUs: one kernel a call, no wait of the host.

A rank writes its part into an inbox in the memory of each other rank, and reads what came into its
own. Sums are added in rank order in float32, so that every rank has the same bits. A call may be
captured in a graph: its number comes from counters on the device.

| part | how it goes |
|---|---|
| up to `WORD_BYTES`, half precision | each 4 bytes in a word of 8 with the call's number: data is its own flag |
| more | data, then a flag of each program in each inbox |
| sums of `TWO_SHOT_BYTES` and more | two shots: each rank adds a share of the rows and sends the sums to the others |

Two inboxes alternate. A rank writes into one again in the next call but one. It has then had data of
the call between from every rank, each of which had read the older one before. A kernel begins when all
before it on its stream have ended, so rows may go to other programs in each call.

Memory and table of a rank are in `rank_memory`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ppkernels.gpu.chain import chains, follow, let_follow
from ppkernels.gpu.norms import normed
from ppkernels.gpu.rank_memory import JOINED, count_call, data_at, meet, note_second, read_words, send_words

PROGRAMS = 128
"""Most programs of a call; all of them must be resident at once."""
WORD_BYTES = 2**19
TWO_SHOT_BYTES, MANY_TWO_SHOT_BYTES = 2**24, 2**20
"""Smallest part whose sum is made in two shots, of two ranks and of more; below, their second wait costs more than the
copies they save."""
SHARE_TILE, SMALL_SHARE_TILE, SHARE_WARP = 16384, 2048, 1024
"""Elements that a program of a sum in two shots moves at once, from `TWO_SHOT_BYTES` on and below, and those of a warp.

Two tiles and not more, since each is a kernel to compile.
"""
TILE = 2048
"""Elements that a program of a gather moves at once."""
WARP, NARROW_WARP = 512, 64
"""Elements of a row that a warp adds, and in rows of less than four such warps: 64 are a word for each thread."""


def memory_bytes(size: int, part_bytes: int) -> int:
    """Return the bytes of a rank's memory in a group of `size`, for parts of at most `part_bytes` a call."""
    return _words_at(size, part_bytes) + 2 * size * WORD_BYTES * 2


def words_bytes(size: int, part_bytes: int) -> tuple[int, int]:
    """Return where the words of a rank's memory begin, and end."""
    return _words_at(size, part_bytes), memory_bytes(size, part_bytes)


def newest_of(sender: int, size: int, part_bytes: int) -> tuple[list[int], list[int]]:
    """Return where a rank's memory shows the newest call of `sender`, whichever way that went.

    First the flags of a program by shot, which are numbers of calls, then a word of each inbox, with the number in its
    upper half. A rank's own second flag has its newest call of which it had all first parts, and awaited second ones.
    """
    flags = [2 * size * part_bytes + (shot * size + sender) * PROGRAMS * 8 for shot in range(2)]
    words = [_words_at(size, part_bytes) + (parity * size + sender) * WORD_BYTES * 2 for parity in range(2)]
    return flags, words


def table_words(size: int) -> int:
    """Return the words of a rank's table."""
    return 2 + size


def own_data(rank: int, size: int, part_bytes: int) -> tuple[int, int]:
    """Return where the two places of a rank's memory begin, of `part_bytes` each, that no call reads or writes."""
    return rank * part_bytes, (size + rank) * part_bytes


def two_shots_from(size: int) -> int:
    """Return the bytes of the smallest part whose sum `size` ranks make in two shots."""
    return TWO_SHOT_BYTES if size == 2 else MANY_TWO_SHOT_BYTES


def in_two_shots(part: Tensor, size: int) -> bool:
    """Return whether the sum of parts of `size` ranks is made in two shots."""
    return part.nbytes >= two_shots_from(size)


def all_reduce(part: Tensor, table: Tensor, counters: Tensor, rank: int, size: int, part_bytes: int) -> None:
    """Replace `part` [T, W], contiguous and of at most `part_bytes`, by the sum of all ranks'.

    `counters` [PROGRAMS] int64 is the number of calls so far, the same on every rank.
    """
    if not in_two_shots(part, size):
        _reduce(part, None, None, part, table, counters, rank, size, part_bytes)
        return
    tile = SHARE_TILE if part.nbytes >= TWO_SHOT_BYTES else SMALL_SHARE_TILE
    share = triton.cdiv(triton.cdiv(part.numel(), size), tile) * tile
    _reduce_shares[(min(PROGRAMS, share // tile),)](
        part, part.numel(), share, table, counters, rank, size, part_bytes, PROGRAMS, tile,
        num_warps=max(1, tile // SHARE_WARP),
    )  # fmt: skip


class NormOf(NamedTuple):
    """A norm [W]: layer norm if `centred`, otherwise RMS norm."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool


def reduce_norm(
    part: Tensor, residual: Tensor, norm: NormOf, output: Tensor, table: Tensor, counters: Tensor, rank: int, size: int,
    part_bytes: int,
) -> None:  # fmt: skip
    """Add all ranks' `part` [T, W] to `residual` [T, W] in place, and write the norm of that to `output`."""
    _reduce(part, residual, norm, output, table, counters, rank, size, part_bytes)


def all_gather(
    part: Tensor, result: Tensor, columns: Tensor, most: int, table: Tensor, counters: Tensor, rank: int, size: int,
    part_bytes: int,
) -> None:  # fmt: skip
    """Write all ranks' `part` [R, w], contiguous and of at most `part_bytes`, into `result` [R, W] side by side.

    `columns` [size + 1] int64 has the first column of each rank, and W; `most` is the largest w.
    """
    programs = max(1, min(PROGRAMS, triton.cdiv(len(part) * most, TILE)))
    _all_gather[(programs,)](
        part, result, part.shape[0], columns, table, counters, rank, size, part_bytes, PROGRAMS, TILE,
        num_warps=8,
    )  # fmt: skip


def warps_of(block: int) -> int:
    """Return the warps of a program that adds a row of `block` elements."""
    return min(max(block // WARP, min(4, block // NARROW_WARP), 1), 32)


def _words_at(size: int, part_bytes: int) -> int:
    return 2 * size * part_bytes + 2 * size * PROGRAMS * 8


def _reduce(
    part: Tensor, residual: Tensor | None, norm: NormOf | None, output: Tensor, table: Tensor, counters: Tensor,
    rank: int, size: int, part_bytes: int,
) -> None:  # fmt: skip
    rows, width = part.shape
    block = triton.next_power_of_2(width)
    weight, bias = (norm.weight, norm.bias) if norm is not None else (None, None)
    words = part.itemsize == 2 and width % 2 == 0 and part.nbytes <= WORD_BYTES
    chain = chains(part.device)
    _reduce_rows[(max(1, min(rows, PROGRAMS)),)](
        part,
        residual if residual is not None else part,
        weight if weight is not None else part,
        bias if bias is not None else part,
        output,
        rows,
        residual.stride(0) if residual is not None else 0,
        norm.eps if norm is not None else 0.0,
        table,
        counters,
        WIDTH=width,
        NORM=norm is not None,
        CENTRED=norm is not None and norm.centred,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        RANK=rank,
        SIZE=size,
        PART_BYTES=part_bytes,
        WORDS_AT=_words_at(size, part_bytes),
        WORDS=WORD_BYTES // 4 if words else 0,
        MOST=PROGRAMS,
        BLOCK=block,
        CHAIN=chain,
        num_warps=warps_of(block),
        launch_pdl=chain,
    )


@triton.jit(do_not_specialize=["rows"])
def _reduce_rows(
    part, residual, weight, bias, output, rows, residual_stride, eps, table, counters,
    WIDTH: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PART_BYTES: tl.constexpr, WORDS_AT: tl.constexpr, WORDS: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Program p takes every row of WIDTH <= BLOCK columns whose number is p modulo the programs."""
    let_follow(CHAIN)
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if WEIGHT:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    follow(CHAIN)
    joined = tl.load(table + JOINED) != 0
    number = tl.load(counters + program) + 1
    parity = number & 1
    if joined:
        if WORDS:
            send_words(part, rows, number, table, WIDTH, RANK, SIZE, WORDS_AT, WORDS, BLOCK)
        else:
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    theirs = data_at(part, table, peer, RANK, parity, SIZE, PART_BYTES)
                    for row in range(program, rows, programs):
                        at = row * WIDTH + column
                        tl.store(theirs + at, tl.load(part + at, mask=inside), mask=inside)
            meet(table, number, RANK, SIZE, SIZE * 2 * PART_BYTES, MOST)
    released = tl.zeros((), tl.int64)
    for row in range(program, rows, programs):
        at = row * WIDTH + column
        own = tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
        total = own
        if joined:
            total = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(SIZE):
                if peer == RANK:
                    total += own
                elif WORDS:
                    values, released = read_words(
                        part, row, peer, number, released, table, WIDTH, RANK, SIZE, WORDS_AT, WORDS, BLOCK
                    )
                    total += values
                else:
                    mine = data_at(part, table, RANK, peer, parity, SIZE, PART_BYTES)
                    total += tl.load(mine + at, mask=inside, other=0.0, cache_modifier=".cv").to(tl.float32)
        if NORM:
            place = residual + row * residual_stride + column
            total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            # The residual stream keeps the rounded sum, so the norm is of that.
            kept = total.to(output.dtype.element_ty)
            tl.store(place, kept, mask=inside)
            total = normed(kept.to(tl.float32), inside, WIDTH, eps, CENTRED, output.dtype.element_ty, 0)
            if WEIGHT:
                total *= scale
            if BIAS:
                total += shift
        tl.store(output + at, total.to(output.dtype.element_ty), mask=inside)
    count_call(counters, program, programs, number, MOST)


@triton.jit
def _reduce_shares(
    part, elements, share, table, counters,
    RANK: tl.constexpr, SIZE: tl.constexpr, PART_BYTES: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the rank's share of `elements`, consecutive ones, and send the sums; other ranks send those of theirs.

    An inbox has a part of the receiver's share from the first shot, and sums of the sender's share from the second, so
    that neither is written over the other.
    """
    program, programs, lanes = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILE)
    joined = tl.load(table + JOINED) != 0
    number = tl.load(counters + program) + 1
    parity = number & 1
    own, own_end = RANK * share, tl.minimum(elements, (RANK + 1) * share)
    if joined:
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                theirs = data_at(part, table, peer, RANK, parity, SIZE, PART_BYTES)
                for first in range(
                    peer * share + program * TILE, tl.minimum(elements, (peer + 1) * share), programs * TILE
                ):
                    at = first + lanes
                    tl.store(theirs + at, tl.load(part + at, mask=at < elements), mask=at < elements)
        meet(table, number, RANK, SIZE, SIZE * 2 * PART_BYTES, MOST)
        for first in range(own + program * TILE, own_end, programs * TILE):
            at = first + lanes
            total = tl.zeros((TILE,), tl.float32)
            for peer in tl.static_range(SIZE):
                if peer == RANK:
                    total += tl.load(part + at, mask=at < elements, other=0.0).to(tl.float32)
                else:
                    mine = data_at(part, table, RANK, peer, parity, SIZE, PART_BYTES)
                    total += tl.load(mine + at, mask=at < elements, other=0.0, cache_modifier=".cv").to(tl.float32)
            kept = total.to(part.dtype.element_ty)
            tl.store(part + at, kept, mask=at < elements)
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    theirs = data_at(part, table, peer, RANK, parity, SIZE, PART_BYTES)
                    tl.store(theirs + at, kept, mask=at < elements)
        note_second(table, RANK, number, RANK, SIZE * 2 * PART_BYTES + SIZE * MOST * 8, MOST)
        meet(table, number, RANK, SIZE, SIZE * 2 * PART_BYTES + SIZE * MOST * 8, MOST)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                mine = data_at(part, table, RANK, peer, parity, SIZE, PART_BYTES)
                for first in range(
                    peer * share + program * TILE, tl.minimum(elements, (peer + 1) * share), programs * TILE
                ):
                    at = first + lanes
                    sums = tl.load(mine + at, mask=at < elements, other=0.0, cache_modifier=".cv")
                    tl.store(part + at, sums, mask=at < elements)
    count_call(counters, program, programs, number, MOST)


@triton.jit
def _all_gather(
    part, result, rows, columns, table, counters,
    RANK: tl.constexpr, SIZE: tl.constexpr, PART_BYTES: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program, programs, lanes = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILE)
    joined = tl.load(table + JOINED) != 0
    number = tl.load(counters + program) + 1
    parity = number & 1
    if joined:
        count = (tl.load(columns + RANK + 1) - tl.load(columns + RANK)) * rows
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                theirs = data_at(part, table, peer, RANK, parity, SIZE, PART_BYTES)
                for first in range(program * TILE, count, programs * TILE):
                    at = first + lanes
                    tl.store(theirs + at, tl.load(part + at, mask=at < count), mask=at < count)
        meet(table, number, RANK, SIZE, SIZE * 2 * PART_BYTES, MOST)
    whole = tl.load(columns + SIZE)
    for peer in tl.static_range(SIZE):
        first_column = tl.load(columns + peer)
        width = tl.load(columns + peer + 1) - first_column
        count = width * rows
        if joined | (peer == RANK):
            for first in range(program * TILE, count, programs * TILE):
                at = (first + lanes).to(tl.int64)
                place = at // width * whole + first_column + at % width
                if peer == RANK:
                    values = tl.load(part + at, mask=at < count, other=0)
                else:
                    mine = data_at(part, table, RANK, peer, parity, SIZE, PART_BYTES)
                    values = tl.load(mine + at, mask=at < count, other=0, cache_modifier=".cv")
                tl.store(result + place, values, mask=at < count)
    count_call(counters, program, programs, number, MOST)
