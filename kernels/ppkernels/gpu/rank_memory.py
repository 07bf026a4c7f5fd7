"""Memory and table of a rank, as the kernels of `collectives` see them: where data lies, and waits for other ranks.

Memory of a rank, on its device:

    data        [2][size][part_bytes], by call and sender
    flags       int64 [2][size][PROGRAMS], by shot and sender; the rank's own of the second shot: see `note_second`
    words       int64 [2][size][WORD_BYTES / 4], by call and sender; zero before the ranks join

Table of a rank, int64 on its device:

    0                   1: the ranks have joined; 0: a call returns this rank's own part
    1                   address of a word of host memory; `RELEASED` or more lets waits end, results are void
    2 ... 2 + size      address of each rank's memory
"""

from __future__ import annotations

import triton
import triton.language as tl

RELEASED = 1 << 62
JOINED, _RELEASE_WORD, _MEMORY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_RELEASED = tl.constexpr(RELEASED)
_MISSING = tl.constexpr(1)
_LOOKS = tl.constexpr(8192)
"""Looks at a flag between two looks at host memory, some milliseconds apart.

A look at host memory takes 0.6 µs for each warp of the card, one after the other. With 256 looks between them a rank
that waited was late for the next call, so that the other waited, and so on: a call took 0.2 to 2 ms.
"""


@triton.jit
def data_at(
    part, table, owner: tl.constexpr, sender: tl.constexpr, parity, SIZE: tl.constexpr, PART_BYTES: tl.constexpr
):
    """Return where the part of `sender` is in the memory of `owner`."""
    address = tl.load(table + _MEMORY + owner) + (parity * SIZE + sender) * PART_BYTES
    # Said of the pointer: from a number, the compiler takes no alignment over, and moves element by element.
    return tl.multiple_of(address.to(tl.pointer_type(part.dtype.element_ty)), 16)


@triton.jit
def _words(table, owner: tl.constexpr, sender: tl.constexpr, number, SIZE: tl.constexpr, AT: tl.constexpr,
           WORDS: tl.constexpr):  # fmt: skip
    address = tl.load(table + _MEMORY + owner) + AT + ((number & 1) * SIZE + sender) * (WORDS * 8)
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def send_words(
    part, rows, number, table,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write this program's rows to the other ranks: 4 bytes of data below, the number of the call above them."""
    pair = tl.arange(0, BLOCK // 2)
    inside = pair < WIDTH // 2
    flag = (number & 0xFFFFFFFF) << 32
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * (WIDTH // 2) + pair
        data = tl.load(part.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
        word = (data.to(tl.int64) & 0xFFFFFFFF) | flag
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                tl.store(_words(table, peer, RANK, number, SIZE, AT, WORDS) + at, word, mask=inside)


@triton.jit
def read_words(
    part, row, peer: tl.constexpr, number, released, table,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait for a row of `peer`; return it in float32 [BLOCK], and the word of host memory as last seen."""
    pair = tl.arange(0, BLOCK // 2)
    inside = pair < WIDTH // 2
    place = _words(table, RANK, peer, number, SIZE, AT, WORDS) + row * (WIDTH // 2) + pair
    word, released = _arrived(place, inside, number, released, table)
    kind = part.dtype.element_ty
    even = (word & 0xFFFF).to(tl.int16).to(kind, bitcast=True)
    odd = ((word >> 16) & 0xFFFF).to(tl.int16).to(kind, bitcast=True)
    return tl.interleave(even.to(tl.float32), odd.to(tl.float32)), released


@triton.jit
def send_pair(
    first, second, row, number, table, RANK: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, WORDS: tl.constexpr
):
    """Write two numbers of 4 bytes to the other ranks, as words of a row."""
    half = tl.arange(0, 2)
    data = tl.where(half == 0, first.to(tl.int64), second.to(tl.int64)) & 0xFFFFFFFF
    word = data | (number & 0xFFFFFFFF) << 32
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(_words(table, peer, RANK, number, SIZE, AT, WORDS) + 2 * row + half, word)


@triton.jit
def read_pair(
    row, peer: tl.constexpr, number, released, table,
    RANK: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Wait for the pair of a row of `peer`; return it in int32, and the word of host memory as last seen."""
    half = tl.arange(0, 2)
    place = _words(table, RANK, peer, number, SIZE, AT, WORDS) + 2 * row + half
    word, released = _arrived(place, half < 2, number, released, table)
    data = word & 0xFFFFFFFF
    first = tl.sum(tl.where(half == 0, data, 0)).to(tl.int32)
    return first, tl.sum(tl.where(half == 1, data, 0)).to(tl.int32), released


@triton.jit
def send_pairs(
    first, second, at, count, number, table,
    RANK: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write `count` <= LANES pairs of two numbers of 4 bytes to the other ranks, from the pair `at` on."""
    lane, half = tl.arange(0, LANES)[:, None], tl.arange(0, 2)[None, :]
    word = (tl.join(first, second).to(tl.int64) & 0xFFFFFFFF) | (number & 0xFFFFFFFF) << 32
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            place = _words(table, peer, RANK, number, SIZE, AT, WORDS) + 2 * (at + lane) + half
            tl.store(place, word, mask=(lane < count) & (half < 2))


@triton.jit
def read_pairs(
    at, count, peer: tl.constexpr, number, released, table,
    RANK: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Wait for `count` pairs of `peer`; return them in int32 [LANES], and the word of host memory as last seen."""
    lane, half = tl.arange(0, LANES)[:, None], tl.arange(0, 2)[None, :]
    place = _words(table, RANK, peer, number, SIZE, AT, WORDS) + 2 * (at + lane) + half
    word, released = _arrived(place, (lane < count) & (half < 2), number, released, table)
    first, second = tl.split((word & 0xFFFFFFFF).to(tl.int32))
    return first, second, released


@triton.jit
def _arrived(place, inside, number, released, table):
    """Wait until the words at `place` have this call's number; return them, and the word of host memory as last seen.

    With a word that is `RELEASED` they are anything. All words must fit a warp, or be as many as the threads at least.
    Otherwise several warps read the same words, each at its own time, and one ends the wait for those that read before.
    """
    flag = (number & 0xFFFFFFFF) << 32
    host = tl.load(table + _RELEASE_WORD).to(tl.pointer_type(tl.int64))
    looks = tl.zeros((), tl.int32)
    word = tl.load(place, mask=inside, other=0, volatile=True)
    state = _state(word, inside, flag, released)
    while state == _MISSING:
        word = tl.load(place, mask=inside, other=0, volatile=True)
        looks += 1
        if looks % _LOOKS == 0:
            released = tl.load(host, volatile=True)
        state = _state(word, inside, flag, released)
    return word, released


@triton.jit
def _state(word, inside, flag, released):
    """Return `_MISSING` if a word has not arrived and no thread has seen a release; otherwise a wait is over.

    Each warp reads the word of host memory at its own time. All must end a wait together: reductions have barriers.
    """
    missing = (inside & ((word ^ flag) >> 32 != 0)).to(tl.int32)
    return tl.max(missing | tl.where(released < _RELEASED, 0, 2))


@triton.jit
def meet(table, number, RANK: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, MOST: tl.constexpr):
    """Raise this program's flag at every rank once its data is there, and wait for the same program of theirs."""
    program = tl.program_id(0)
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flags = (tl.load(table + _MEMORY + peer) + AT).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags + RANK * MOST + program, number, sem="release", scope="sys")
    flags = (tl.load(table + _MEMORY + RANK) + AT).to(tl.pointer_type(tl.int64))
    host = tl.load(table + _RELEASE_WORD).to(tl.pointer_type(tl.int64))
    released = tl.zeros((), tl.int64)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag, looks = flags + peer * MOST + program, tl.zeros((), tl.int32)
            raised = tl.load(flag, volatile=True)
            while (raised < number) & (released < _RELEASED):
                raised = tl.load(flag, volatile=True)
                looks += 1
                if looks % _LOOKS == 0:
                    released = tl.load(host, volatile=True)
            tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def note_second(table, owner: tl.constexpr, number, RANK: tl.constexpr, AT: tl.constexpr, MOST: tl.constexpr):
    """Note at `owner` that this rank has sent its second part of a call; `AT`: flags of the second shot.

    No kernel waits for it. In its own memory it says that this rank has all first parts, and waits for the second ones.
    """
    if tl.program_id(0) == 0:
        flags = (tl.load(table + _MEMORY + owner) + AT).to(tl.pointer_type(tl.int64))
        tl.store(flags + RANK * MOST, number)


@triton.jit
def count_call(counters, program, programs, number, MOST: tl.constexpr):
    """Note the call, also for programs that it did not have: each counter has one program that writes it."""
    lane = tl.arange(0, MOST)
    tl.store(counters + lane, number, mask=lane % programs == program)
