"""The kernel: tiles of queries, parts of their contexts, and three groups of warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ppkernels.gpu.hopper.attend import attend_tiles
from ppkernels.gpu.hopper.load import load_tiles
from ppkernels.gpu.hopper.shapes import HALF, ROWS, STAGES, TILE, WORDS

STEP = ["tables", "lengths", "query_start", "table_stride", "rows", "most", "dynamic"]
"""Arguments that change from step to step: Triton must not recompile for a value of 1, or a multiple of 16."""


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(number), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=STEP, do_not_specialize_on_alignment=STEP)
def attend(
    queries,
    cache,
    tables,
    lengths,
    query_start,
    output,
    partial,
    weights,
    pairs,
    counter,
    rows,
    most,
    dynamic,
    table_stride,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    MOST_ROWS: gl.constexpr,
    DOT: gl.constexpr,
):
    """Attend to the chunks of a step. `queries` and `cache` are descriptors, `pairs` is for `weigh`.

    `most` is the largest number of parts. `dynamic`: tiles are counted by `counter`, which begins at 0.
    """
    TOKENS: gl.constexpr = ROWS // GROUP
    PIECE: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    HALVES: gl.constexpr = HEAD_DIM // HALF
    COPIES: gl.constexpr = STAGES * HALVES * (TILE // PIECE)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BY_ROW: gl.constexpr = gl.BlockedLayout([MOST_ROWS // 128], [32], [4], [0])
    row = gl.arange(0, MOST_ROWS, layout=BY_ROW)
    start = gl.load(query_start + row, row < rows, 0).to(gl.int32)
    count = gl.load(query_start + row + 1, row < rows, 0).to(gl.int32) - start
    own = gl.where((row < rows) & (count > 1), gl.cdiv(count, TOKENS), 0)
    tiles = gl.sum(own, 0)
    # A split fills the card once: each part is the only work of its program.
    parts = gl.minimum(gl.maximum(gl.num_programs(0) // gl.maximum(tiles * KV_HEADS, 1), 1), most)
    last_tiles = gl.allocate_shared_memory(gl.int32, [MOST_ROWS], NUMBERS)
    last_tiles.store(gl.associative_scan(own, 0, _add))
    last_tiles = last_tiles._reinterpret(gl.int32, [MOST_ROWS, 1], NUMBERS)

    q_smem = gl.allocate_shared_memory(DOT, [4 * HALVES, TOKENS // 2, GROUP, HALF], queries.layout)
    k_smem = gl.allocate_shared_memory(DOT, [COPIES, PIECE, HALF], cache.layout)
    v_smem = gl.allocate_shared_memory(DOT, [COPIES, PIECE, HALF], cache.layout)
    words = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], NUMBERS)
    q_full, k_full, v_full = _barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 1)
    q_empty, k_empty, v_empty = _barriers(2, 2), _barriers(STAGES, 2), _barriers(STAGES, 2)
    turns = _barriers(2, 1)
    fence_async_shared()

    smem = (q_smem, k_smem, v_smem, words)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    target = (output, partial, weights)
    gl.warp_specialize(
        [
            (attend_tiles, (target, scale, smem, barriers, turns, 0, KV_HEADS, GROUP, HEAD_DIM, DOT)),
            (attend_tiles, (target, scale, smem, barriers, turns, 1, KV_HEADS, GROUP, HEAD_DIM, DOT)),
            (
                load_tiles,
                (queries, cache, tables, lengths, query_start, counter, pairs, rows, table_stride, tiles, parts,
                 dynamic, last_tiles, smem, barriers, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE),
            ),
        ],
        [4, 1],
        [240, 24],  # registers of a thread, of 168 on average
    )  # fmt: skip
