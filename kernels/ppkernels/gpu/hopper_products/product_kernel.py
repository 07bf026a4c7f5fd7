"""The kernel: a span of units for each program, barriers, and the two groups of warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ppkernels.gpu.chain import let_follow
from ppkernels.gpu.hopper_products import spans
from ppkernels.gpu.hopper_products.add_units import add_units
from ppkernels.gpu.hopper_products.copy_units import copy_units

first_unit = gluon.jit(spans.first_unit)
NUMBERS = ["rows", "outputs", "pieces", "residual_stride"]
STEP = [*NUMBERS, "bias", "residual"]
"""Arguments for whose value, or alignment, Triton must not recompile amid requests."""


@gluon.jit
def _barriers(NUMBER: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(number), count=1)
    return barriers


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=STEP)
def multiply(
    inputs,
    weight,
    bias,
    residual,
    output,
    partial,
    counters,
    rows,
    outputs,
    pieces,
    residual_stride,
    PAD: gl.constexpr,
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    RELU: gl.constexpr,
    GATED: gl.constexpr,
    RESIDUAL: gl.constexpr,
    DOT: gl.constexpr,
    CHAIN: gl.constexpr,
):
    """Write `rows` rows of outputs. `inputs` and `weight` are descriptors; `counters` are 0 before and behind it.

    The weight has `outputs` rows, or with gates twice as many: those of all gates first. There must not be more
    programs than units.
    """
    let_follow(CHAIN)
    PARTS: gl.constexpr = 2 if GATED else 1
    programs = gl.num_programs(0)
    units = gl.cdiv(outputs, TILE) * pieces
    first = first_unit(gl.program_id(0), units, programs)
    end = first_unit(gl.program_id(0) + 1, units, programs)
    weight_smem = gl.allocate_shared_memory(DOT, [STAGES * PARTS, TILE, PIECE], weight.layout)
    input_smem = gl.allocate_shared_memory(DOT, [STAGES, PAD, PIECE], inputs.layout)
    full, empty = _barriers(STAGES), _barriers(STAGES)
    fence_async_shared()
    smem = (weight_smem, input_smem)
    barriers = (full, empty)
    target = (bias, residual, output)
    gl.warp_specialize(
        [
            (
                add_units,
                (target, partial, counters, first, end, pieces, units, programs, rows, outputs, residual_stride, smem,
                 barriers, PAD, TILE, PARTS, STAGES, BIAS, RELU, RESIDUAL, DOT, CHAIN),
            ),
            (
                copy_units,
                (inputs, weight, first, end, pieces, outputs, smem, barriers, PAD, TILE, PIECE, PARTS, STAGES, CHAIN),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
