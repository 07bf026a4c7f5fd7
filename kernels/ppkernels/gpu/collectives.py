"""Collectives between the ranks of one stage on GPUs: one kernel a call, no wait of the host.

Each rank copies its part into its own shared memory, raises a flag in the memory of every other rank,
waits for theirs, and reads all parts. Sums are added in rank order in float32, so that every rank has
the same bits. A call may be captured in a graph: its number comes from a counter on the device.

Tile t is the work of program t modulo `PROGRAMS` on every rank and in every call. So a program waits
for the same program of the other ranks alone. Two buffers alternate: a program writes one again only
after the others have raised the flag of the call between, which they do once they have read it.

Table of a rank, int64 on its device:

    0                   1: the ranks have joined; 0: a call returns this rank's own part
    1                   address of a word of host memory; `RELEASED` or more lets waits end, results are void
    2 ... 2 + size      address of each rank's parts: two buffers of `part_bytes`
    2 + size ...        address of each rank's flags: int64 [size][PROGRAMS], by the rank that raises them
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 32
TILE = 2048
RELEASED = 1 << 62
_JOINED, _RELEASE_WORD, _PARTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_RELEASED = tl.constexpr(RELEASED)
_LOOKS = tl.constexpr(256)
"""Looks at a flag between two looks at host memory, which take a microsecond each."""


def flag_bytes(size: int) -> int:
    """Return the bytes of a rank's flags in a group of `size`."""
    return size * PROGRAMS * 8


def table_words(size: int) -> int:
    """Return the words of a rank's table."""
    return 2 + 2 * size


def all_reduce(part: Tensor, table: Tensor, counters: Tensor, rank: int, size: int, part_bytes: int) -> None:
    """Replace contiguous `part`, of at most `part_bytes`, by the sum of all ranks'.

    `counters` [PROGRAMS] int64 is the number of calls so far, the same on every rank.
    """
    _all_reduce[(PROGRAMS,)](part, part.numel(), table, counters, rank, size, part_bytes, PROGRAMS, TILE, num_warps=8)


def all_gather(
    part: Tensor, result: Tensor, columns: Tensor, table: Tensor, counters: Tensor, rank: int, size: int,
    part_bytes: int,
) -> None:  # fmt: skip
    """Write all ranks' `part` [R, w], contiguous and of at most `part_bytes`, into `result` [R, W] side by side.

    `columns` [size + 1] int64 has the first column of each rank, and W.
    """
    _all_gather[(PROGRAMS,)](
        part, result, part.shape[0], columns, table, counters, rank, size, part_bytes, PROGRAMS, TILE, num_warps=8
    )


@triton.jit
def _all_reduce(
    part, count, table, counters,
    RANK: tl.constexpr, SIZE: tl.constexpr, PART_BYTES: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if tl.load(table + _JOINED) != 0:
        offset = _share(part, count, table, counters, RANK, SIZE, PART_BYTES, PROGRAMS, TILE)
        lanes = tl.arange(0, TILE)
        for first in range(tl.program_id(0) * TILE, count, PROGRAMS * TILE):
            at = first + lanes
            total = tl.zeros((TILE,), tl.float32)
            for peer in tl.static_range(SIZE):
                theirs = _buffer(part, table, peer, offset)
                total += tl.load(theirs + at, mask=at < count, other=0.0, cache_modifier=".cv").to(tl.float32)
            tl.store(part + at, total.to(part.dtype.element_ty), mask=at < count)


@triton.jit
def _all_gather(
    part, result, rows, columns, table, counters,
    RANK: tl.constexpr, SIZE: tl.constexpr, PART_BYTES: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    joined = tl.load(table + _JOINED)
    own = (tl.load(columns + RANK + 1) - tl.load(columns + RANK)) * rows
    offset = tl.zeros((), tl.int64)
    if joined != 0:
        offset = _share(part, own, table, counters, RANK, SIZE, PART_BYTES, PROGRAMS, TILE)
    whole = tl.load(columns + SIZE)
    lanes = tl.arange(0, TILE)
    for peer in tl.static_range(SIZE):
        first_column = tl.load(columns + peer)
        width = tl.load(columns + peer + 1) - first_column
        count = width * rows
        if (joined != 0) | (peer == RANK):
            for first in range(tl.program_id(0) * TILE, count, PROGRAMS * TILE):
                at = (first + lanes).to(tl.int64)
                place = at // width * whole + first_column + at % width
                if joined != 0:
                    values = tl.load(
                        _buffer(part, table, peer, offset) + at, mask=at < count, other=0, cache_modifier=".cv"
                    )
                else:
                    values = tl.load(part + at, mask=at < count, other=0)
                tl.store(result + place, values, mask=at < count)


@triton.jit
def _buffer(part, table, rank: tl.constexpr, offset):
    """Return where a rank's part of this call begins."""
    address = tl.load(table + _PARTS + rank) + offset
    return tl.multiple_of(address, 16).to(tl.pointer_type(part.dtype.element_ty))


@triton.jit
def _share(
    part, count, table, counters,
    RANK: tl.constexpr, SIZE: tl.constexpr, PART_BYTES: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write this rank's part, raise its flags, wait for those of the others; return the buffer's offset in bytes."""
    program = tl.program_id(0)
    number = tl.load(counters + program) + 1
    offset = (number & 1) * PART_BYTES
    mine, lanes = _buffer(part, table, RANK, offset), tl.arange(0, TILE)
    for first in range(program * TILE, count, PROGRAMS * TILE):
        at = first + lanes
        tl.store(mine + at, tl.load(part + at, mask=at < count), mask=at < count)
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flags = tl.load(table + _PARTS + SIZE + peer).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags + RANK * PROGRAMS + program, number, sem="release", scope="sys")
    flags = tl.load(table + _PARTS + SIZE + RANK).to(tl.pointer_type(tl.int64))
    word = tl.load(table + _RELEASE_WORD).to(tl.pointer_type(tl.int64))
    released = tl.zeros((), tl.int64)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag, looks = flags + peer * PROGRAMS + program, tl.zeros((), tl.int32)
            raised = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while (raised < number) & (released < _RELEASED):
                raised = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                looks += 1
                if looks % _LOOKS == 0:
                    released = tl.load(word, volatile=True)
    tl.debug_barrier()
    tl.store(counters + program, number)
    return offset
