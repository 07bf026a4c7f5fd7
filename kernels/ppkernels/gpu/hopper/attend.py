"""The computing warps: scores of 64 rows with a tile of slots, their softmax, and its product with values.

The scores of the next tile and the values of the last are multiplied while exponentials are computed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ppkernels.gpu.hopper.load import wait_for_warps, word
from ppkernels.gpu.hopper.shapes import (
    BEGIN,
    END,
    HALF,
    KV_HEAD,
    LEFT,
    PART,
    ROWS,
    RUNNING,
    SEEN,
    STAGES,
    TILE,
    TOKEN,
    WORDS,
)


@gluon.jit
def _soften(scores, first, last, largest, total, scale, MASKED: gl.constexpr):
    """Return weights of `scores`, the running largest and total of each row, and the factor of its older sums."""
    if MASKED:
        slot = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(slot[None, :] <= last[:, None], scores, float("-inf"))
    largest_now = gl.maximum(largest, gl.max(scores, 1) * scale)
    base = largest_now
    if MASKED:
        base = gl.maximum(base, -1e38)  # a row may see nothing of its last part
    weight = gl.exp2(scores * scale - base[:, None])
    fade = gl.exp2(largest - base)
    return weight, largest_now, total * fade + gl.sum(weight, 1), fade


@gluon.jit
def _add_tile(
    q, k_tiles, v_tiles, weight, sums, largest, total, first, last, used, turn, scale, barriers, turns,
    GROUP_OF_WARPS: gl.constexpr, MASKED: gl.constexpr, DOT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Multiply `weight` with the values before slot `first`, and return the weights of the tile there."""
    SCORES: gl.constexpr = largest.type.layout.parent
    SUMS: gl.constexpr = sums.type.layout
    _, _, k_full, k_empty, v_full, v_empty = barriers
    stage, before = used % STAGES, (used - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
    mbarrier.wait(turns.index(GROUP_OF_WARPS), (turn + 1 - GROUP_OF_WARPS) & 1)
    none = gl.zeros([HALF, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((used - 1) // STAGES) & 1)
    sums = warpgroup_mma(weight, v_tiles.index(before), sums, is_async=True)
    mbarrier.arrive(turns.index(1 - GROUP_OF_WARPS), count=1)
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    now, largest, total, fade = _soften(scores, first, last, largest, total, scale, MASKED)
    now = gl.convert_layout(now.to(DOT), OPERAND)
    sums, weight = warpgroup_mma_wait(0, [sums, weight])
    mbarrier.arrive(v_empty.index(before), count=1)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
    return now, sums, largest, total


@gluon.jit
def _hide(values, real, HEAD_DIM: gl.constexpr):
    """Zero values from slot `real` on, which the row does not have: a weight of 0 does not hide a NaN.

    Both groups of warps do so, and write the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    slot = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    old = values.load(LAYOUT)
    values.store(gl.where((slot < real)[:, None], old, 0.0).to(old.dtype))
    fence_async_shared()
    wait_for_warps()


@gluon.jit
def _write(
    target, sums, total, largest, token, left, kv_head, part,
    GROUP_OF_WARPS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    DOT: gl.constexpr,
):  # fmt: skip
    """Write the output of this group's rows, or that of a part of their context with its weight."""
    SUMS: gl.constexpr = sums.type.layout
    output, partial, weights = target
    row = GROUP_OF_WARPS * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SUMS))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
    divisor = gl.where(total == 0.0, 1.0, total)
    sums = sums / gl.convert_layout(divisor, gl.SliceLayout(1, SUMS))[:, None]
    own = (row // GROUP < left)[:, None] & (column < HEAD_DIM)[None, :]
    if part < 0:
        head = (token + row // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
        gl.store(output + head[:, None] * HEAD_DIM + column[None, :], sums.to(DOT), own)
    else:
        score_row = GROUP_OF_WARPS * HALF + gl.arange(0, HALF, layout=total.type.layout)
        gl.store(partial + (part * ROWS + row)[:, None] * HEAD_DIM + column[None, :], sums, own)
        gl.store(weights + part * ROWS + score_row, largest + gl.log2(total), score_row // GROUP < left)


@gluon.jit
def attend_tiles(
    target,
    scale,
    smem,
    barriers,
    turns,
    GROUP_OF_WARPS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    DOT: gl.constexpr,
):
    """Attend to one tile of queries after the other; `target` is the output, partial outputs, and their weights."""
    TOKENS: gl.constexpr = ROWS // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_smem, k_smem, v_smem, words = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_tiles = q_smem._reinterpret(DOT, [4, HALF, HEAD_DIM], WHOLE)
    k_tiles = k_smem._reinterpret(DOT, [STAGES, TILE, HEAD_DIM], WHOLE)
    v_tiles = v_smem._reinterpret(DOT, [STAGES, TILE, HEAD_DIM], WHOLE)
    score_row = GROUP_OF_WARPS * HALF + gl.arange(0, HALF, layout=BY_ROW)
    taken = 0
    used = 0
    turn = 0
    running = 1
    while running > 0:
        slot = taken % 2
        mbarrier.wait(q_full.index(slot), (taken // 2) & 1)
        running = word(words, slot * WORDS + RUNNING)
        if running > 0:
            token = word(words, slot * WORDS + TOKEN)
            left = word(words, slot * WORDS + LEFT)
            seen = word(words, slot * WORDS + SEEN)
            kv_head = word(words, slot * WORDS + KV_HEAD)
            begin = word(words, slot * WORDS + BEGIN)
            end = word(words, slot * WORDS + END)
            part = word(words, slot * WORDS + PART)
            # Slots that every token of this group sees, in whole tiles.
            plain = gl.minimum((seen + GROUP_OF_WARPS * (TOKENS // 2) + 1) // TILE * TILE, end)
            last = seen + score_row // GROUP
            q = q_tiles.index(slot * 2 + GROUP_OF_WARPS)
            total = gl.zeros([HALF], gl.float32, BY_ROW)
            largest = gl.full([HALF], float("-inf"), gl.float32, BY_ROW)
            sums = gl.zeros([HALF, HEAD_DIM], gl.float32, SUMS)
            none = gl.zeros([HALF, TILE], gl.float32, SCORES)
            stage = used % STAGES
            mbarrier.wait(k_full.index(stage), (used // STAGES) & 1)
            scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            weight, largest, total, _ = _soften(scores, begin, last, largest, total, scale, True)
            weight = gl.convert_layout(weight.to(DOT), OPERAND)
            used += 1
            for first in range(begin + TILE, plain, TILE):
                weight, sums, largest, total = _add_tile(
                    q, k_tiles, v_tiles, weight, sums, largest, total, first, last, used, turn, scale, barriers, turns,
                    GROUP_OF_WARPS, False, DOT, OPERAND)  # fmt: skip
                used += 1
                turn += 1
            for first in range(gl.maximum(plain, begin + TILE), end, TILE):
                weight, sums, largest, total = _add_tile(
                    q, k_tiles, v_tiles, weight, sums, largest, total, first, last, used, turn, scale, barriers, turns,
                    GROUP_OF_WARPS, True, DOT, OPERAND)  # fmt: skip
                used += 1
                turn += 1
            mbarrier.arrive(q_empty.index(slot), count=1)
            stage = (used - 1) % STAGES
            mbarrier.wait(v_full.index(stage), ((used - 1) // STAGES) & 1)
            real = seen + left - (begin + (end - begin - 1) // TILE * TILE)
            if real < TILE:
                _hide(v_tiles.index(stage), real, HEAD_DIM)
            sums = warpgroup_mma(weight, v_tiles.index(stage), sums, is_async=True)
            sums = warpgroup_mma_wait(0, [sums])
            mbarrier.arrive(v_empty.index(stage), count=1)
            _write(target, sums, total, largest, token, left, kv_head, part,
                   GROUP_OF_WARPS, KV_HEADS, GROUP, HEAD_DIM, DOT)  # fmt: skip
        taken += 1
