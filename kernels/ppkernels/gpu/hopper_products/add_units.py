"""The computing warps: sums of a span of units, tile after tile, and outputs of whole tiles.

If several programs have units of a tile, each writes its sums to memory. The last one of them to do
so adds all in the order of units, whichever came last: results do not depend on the timing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ppkernels.gpu.chain import follow
from ppkernels.gpu.hopper.load import wait_for_warps
from ppkernels.gpu.hopper_products import spans

place_of, program_of = gluon.jit(spans.place_of), gluon.jit(spans.program_of)


@gluon.jit
def _write(
    target, sums, ups, tile, rows, outputs, residual_stride,
    PAD: gl.constexpr, TILE: gl.constexpr, BIAS: gl.constexpr, RELU: gl.constexpr, GATED: gl.constexpr,
    RESIDUAL: gl.constexpr, DOT: gl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile for `rows` rows, from its sums [TILE, PAD]."""
    bias, residual, output = target
    SUMS: gl.constexpr = sums.type.layout
    number = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, SUMS))
    row = gl.arange(0, PAD, layout=gl.SliceLayout(0, SUMS))
    real = number < outputs
    kept = real[:, None] & (row < rows)[None, :]
    if BIAS:
        sums += gl.load(bias + number, real, 0.0).to(gl.float32)[:, None]
        if GATED:
            ups += gl.load(bias + outputs + number, real, 0.0).to(gl.float32)[:, None]
    if GATED:
        sums = sums / (1.0 + gl.exp(-sums)) * ups
    if RELU:
        sums = gl.where(sums < 0.0, 0.0, sums)  # a maximum would make 0 of NaN
    if RESIDUAL:
        sums += gl.load(residual + row[None, :] * residual_stride + number[:, None], kept, 0.0).to(gl.float32)
    gl.store(output + row[None, :] * outputs + number[:, None], sums.to(DOT), kept)


@gluon.jit
def _part(partial, at, program, number, contributors, SIZE: gl.constexpr):
    """Return the sums of contributor `number` of a tile, from the cache of all multiprocessors; zeros behind all."""
    there = (at >= 0) & (number < contributors)
    return gl.load(partial + place_of(program + number, number) * SIZE + at, there, 0.0, cache_modifier=".cg")


@gluon.jit
def _add_partial(partial, at, program, contributors, sums, SIZE: gl.constexpr):
    """Return the sums of a tile, whose contributors are consecutive programs from `program` on.

    Four are read before any is added, because each read is a wait.
    """
    total = gl.zeros_like(sums)
    for number in range(0, contributors, 4):
        first = _part(partial, at, program, number, contributors, SIZE)
        second = _part(partial, at, program, number + 1, contributors, SIZE)
        third = _part(partial, at, program, number + 2, contributors, SIZE)
        fourth = _part(partial, at, program, number + 3, contributors, SIZE)
        total = total + first + second + third + fourth
    return total


@gluon.jit
def add_units(
    target, partial, counters, first, end, pieces, units, programs, rows, outputs, residual_stride, smem, barriers,
    PAD: gl.constexpr, TILE: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr,
    RELU: gl.constexpr, RESIDUAL: gl.constexpr, DOT: gl.constexpr, CHAIN: gl.constexpr,
):  # fmt: skip
    """Multiply and add units [first, end); `target` is bias, residual and output."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAD, 16])
    SIZE: gl.constexpr = TILE * PAD * PARTS
    GATED: gl.constexpr = PARTS == 2
    weight_smem, input_smem = smem
    full, empty = barriers
    own = gl.program_id(0)
    element = gl.arange(0, TILE, layout=gl.SliceLayout(1, SUMS))[:, None] * PAD
    at = element + gl.arange(0, PAD, layout=gl.SliceLayout(0, SUMS))[None, :]
    follow(CHAIN)
    unit = first
    used = 0
    while unit < end:
        tile = unit // pieces
        tile_end = (tile + 1) * pieces
        stop = gl.minimum(end, tile_end)
        sums = gl.zeros([TILE, PAD], gl.float32, SUMS)
        ups = gl.zeros([TILE, PAD], gl.float32, SUMS)
        for _ in range(unit, stop):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            x = input_smem.index(stage).permute((1, 0))
            sums = warpgroup_mma(weight_smem.index(stage * PARTS), x, sums, is_async=True)
            if GATED:
                ups = warpgroup_mma(weight_smem.index(stage * PARTS + 1), x, ups, is_async=True)
                sums, ups = warpgroup_mma_wait(0, [sums, ups])
            else:
                sums = warpgroup_mma_wait(0, [sums])
            mbarrier.arrive(empty.index(stage), count=1)
            used += 1
        if stop - unit == pieces:
            _write(
                target, sums, ups, tile, rows, outputs, residual_stride, PAD, TILE, BIAS, RELU, GATED, RESIDUAL, DOT
            )  # fmt: skip
        else:
            program = program_of(tile * pieces, units, programs)
            contributors = program_of(tile_end - 1, units, programs) - program + 1
            mine = partial + place_of(own, own - program) * SIZE + at
            gl.store(mine, sums)
            if GATED:
                gl.store(mine + TILE * PAD, ups)
            wait_for_warps()  # one thread counts for all
            before = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            if before == contributors - 1:
                gl.store(counters + tile, 0)
                sums = _add_partial(partial, at, program, contributors, sums, SIZE)
                if GATED:
                    ups = _add_partial(partial + TILE * PAD, at, program, contributors, ups, SIZE)
                _write(
                    target, sums, ups, tile, rows, outputs, residual_stride, PAD, TILE, BIAS, RELU, GATED, RESIDUAL,
                    DOT)  # fmt: skip
        unit = stop
