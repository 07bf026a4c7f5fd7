"""The loading warp: it finds each tile of queries, and copies its queries, keys and values into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ppkernels.gpu.hopper.shapes import (
    BEGIN,
    END,
    HALF,
    HEADER,
    KV_HEAD,
    LEAST_PART,
    LEFT,
    PAIR_WORDS,
    PART,
    ROWS,
    RUNNING,
    SEEN,
    STAGES,
    TILE,
    TOKEN,
    WORDS,
)

wait_for_warps = getattr(gl, "thread_barrier", None) or gl.barrier
"""A barrier of the group of warps; Triton 3.7 has another name for it."""


@gluon.jit
def word(words, at):
    """Return number `at` of `words` [n, 1], in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(words.index(at).load(LAYOUT), 0)


@gluon.jit
def _put(words, at, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    words.index(at).store(gl.full([1], value, gl.int32, LAYOUT))


@gluon.jit
def _row_of(tile, last_tiles, rows):
    """Return the row of `tile`: the first whose last tile is behind it."""
    low = 0
    high = rows - 1
    while low < high:
        middle = (low + high) // 2
        if word(last_tiles, middle) > tile:
            high = middle
        else:
            low = middle + 1
    return low


@gluon.jit
def _copy_slots(
    cache, table, first, last, kv_head, beside, full, smem, stage,
    HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy keys, or values `beside` them, of slots [first, first + TILE); block `last` for those behind the row's."""
    PIECE: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    PIECES: gl.constexpr = TILE // PIECE
    for piece in gl.static_range(PIECES):
        slot = first + piece * PIECE
        block = gl.load(table + gl.minimum(slot // BLOCK_SIZE, last)).to(gl.int32)
        place = block * (2 * BLOCK_SIZE) + beside + slot % BLOCK_SIZE
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                cache, [place, (kv_head * HALVES + half) * HALF], full,
                smem.index((stage * HALVES + half) * PIECES + piece),
            )  # fmt: skip


@gluon.jit
def _say(words, slot, token, left, seen, kv_head, begin, end, part):
    """Say which tile of queries has its copies in `slot`."""
    _put(words, slot * WORDS + TOKEN, token)
    _put(words, slot * WORDS + LEFT, left)
    _put(words, slot * WORDS + SEEN, seen)
    _put(words, slot * WORDS + KV_HEAD, kv_head)
    _put(words, slot * WORDS + BEGIN, begin)
    _put(words, slot * WORDS + END, end)
    _put(words, slot * WORDS + PART, part)
    _put(words, slot * WORDS + RUNNING, 1)
    wait_for_warps()


@gluon.jit
def _copy_queries(
    queries, token, kv_head, full, smem, slot, GROUP: gl.constexpr, TOKENS: gl.constexpr, HALVES: gl.constexpr
):
    """Copy the queries of a tile, for each group of warps its own half of the rows."""
    for group in gl.static_range(2):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                queries, [token + group * (TOKENS // 2), kv_head * GROUP, half * HALF], full,
                smem.index((slot * 2 + group) * HALVES + half),
            )  # fmt: skip


@gluon.jit
def _copy_keys_and_values(
    cache, table, begin, end, last, kv_head, loaded, k_full, k_empty, v_full, v_empty, k_smem, v_smem,
    HEAD_DIM: gl.constexpr, HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of slots [begin, end), each once its stage is free; return the number of all so far."""
    for first in range(begin, end, TILE):
        stage = loaded % STAGES
        phase = (loaded // STAGES + 1) & 1
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), TILE * HEAD_DIM * 2)
        _copy_slots(cache, table, first, last, kv_head, 0, k_full.index(stage), k_smem, stage, HALVES, BLOCK_SIZE)
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), TILE * HEAD_DIM * 2)
        _copy_slots(
            cache, table, first, last, kv_head, BLOCK_SIZE, v_full.index(stage), v_smem, stage, HALVES, BLOCK_SIZE
        )
        loaded += 1
    return loaded


@gluon.jit
def _write_pair(pair_words, token, left, used, kv_head):
    """Write the words of a pair of tile and KV head, of which `used` parts have work."""
    gl.store(pair_words, token)
    gl.store(pair_words + 1, left)
    gl.store(pair_words + 2, used)
    gl.store(pair_words + 3, kv_head)


@gluon.jit
def load_tiles(
    queries,
    cache,
    tables,
    lengths,
    query_start,
    counter,
    pairs,
    rows,
    table_stride,
    tiles,
    parts,
    dynamic,
    last_tiles,
    smem,
    barriers,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Copy what one tile of queries after the other needs, and say which it is."""
    TOKENS: gl.constexpr = ROWS // GROUP
    HALVES: gl.constexpr = HEAD_DIM // HALF
    q_smem, k_smem, v_smem, words = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    programs = gl.num_programs(0)
    number = gl.program_id(0)
    if number == 0:
        gl.store(pairs, gl.where(parts > 1, tiles * KV_HEADS, 0))
        gl.store(pairs + 1, parts)
    taken = 0
    loaded = 0
    turn = 0
    first_tile = tiles
    start = 0
    count = 0
    length = 0
    table = tables
    while number < tiles * KV_HEADS * parts:
        part = number % parts
        pair = number // parts
        kv_head = pair % KV_HEADS
        tile = tiles - 1 - pair // KV_HEADS  # the end of a prompt has the most work: it starts first
        if tile < first_tile:  # not of the row before
            row = _row_of(tile, last_tiles, rows)
            start = gl.load(query_start + row).to(gl.int32)
            count = gl.load(query_start + row + 1).to(gl.int32) - start
            length = gl.load(lengths + row).to(gl.int32)
            table = tables + row.to(gl.int64) * table_stride
            first_tile = word(last_tiles, row) - gl.cdiv(count, TOKENS)
        skipped = (tile - first_tile) * TOKENS
        seen = length - count + skipped
        end = gl.minimum(seen + TOKENS, length)
        share = gl.maximum(gl.cdiv(gl.cdiv(end, TILE), parts) * TILE, LEAST_PART)
        several = share < end
        begin = part * share
        if (part == 0) & (parts > 1):
            used = gl.where(several & (end > 0), gl.cdiv(end, share), 0)
            _write_pair(pairs + HEADER + pair * PAIR_WORDS, start + skipped, count - skipped, used, kv_head)
        if begin < end:
            end = gl.minimum(begin + share, end)
            slot = taken % 2
            mbarrier.wait(q_empty.index(slot), (taken // 2 + 1) & 1)
            _say(
                words, slot, start + skipped, count - skipped, seen, kv_head, begin, end, gl.where(several, number, -1)
            )
            mbarrier.expect(q_full.index(slot), ROWS * HEAD_DIM * 2)
            _copy_queries(queries, start + skipped, kv_head, q_full.index(slot), q_smem, slot, GROUP, TOKENS, HALVES)
            taken += 1
            last = (length - 1) // BLOCK_SIZE
            loaded = _copy_keys_and_values(
                cache, table, begin, end, last, kv_head, loaded, k_full, k_empty, v_full, v_empty, k_smem, v_smem,
                HEAD_DIM, HALVES, BLOCK_SIZE,
            )  # fmt: skip
        if dynamic > 0:
            number = gl.atomic_add(counter, 1) + programs
        else:  # to and fro, so that no program has the longest tile of each round
            turn += 1
            own = gl.program_id(0)
            number = turn * programs + gl.where(turn % 2 == 0, own, programs - 1 - own)
    slot = taken % 2
    mbarrier.wait(q_empty.index(slot), (taken // 2 + 1) & 1)
    _put(words, slot * WORDS + RUNNING, 0)
    wait_for_warps()
    mbarrier.arrive(q_full.index(slot), count=1)
