"""The copying warp: tiles of the weight and the inputs of a span of units, into a ring of stages.

The weight is constant, so its first tiles are copied before the kernel before this one has ended.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ppkernels.gpu.chain import follow


@gluon.jit
def _copy_weight(
    weight, unit, pieces, outputs, full, smem, stage,
    PAD: gl.constexpr, TILE: gl.constexpr, PIECE: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of `unit`, behind a word of how many bytes will come: those of the inputs, too."""
    mbarrier.expect(full, (TILE * PARTS + PAD) * PIECE * 2)
    row = unit // pieces * TILE
    for part in gl.static_range(PARTS):
        tile = smem.index(stage * PARTS + part)
        tma.async_copy_global_to_shared(weight, [row + part * outputs, unit % pieces * PIECE], full, tile)


@gluon.jit
def copy_units(
    inputs, weight, first, end, pieces, outputs, smem, barriers,
    PAD: gl.constexpr, TILE: gl.constexpr, PIECE: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    CHAIN: gl.constexpr,
):  # fmt: skip
    """Copy tiles of units [first, end), each once its stage is free."""
    weight_smem, input_smem = smem
    full, empty = barriers
    ahead = gl.minimum(end - first, STAGES)
    for used in range(ahead):
        _copy_weight(
            weight, first + used, pieces, outputs, full.index(used), weight_smem, used, PAD, TILE, PIECE, PARTS
        )  # fmt: skip
    follow(CHAIN)
    for used in range(ahead):
        column = (first + used) % pieces * PIECE
        tma.async_copy_global_to_shared(inputs, [0, column], full.index(used), input_smem.index(used))
    for used in range(ahead, end - first):
        stage = used % STAGES
        unit = first + used
        mbarrier.wait(empty.index(stage), (used // STAGES + 1) & 1)
        _copy_weight(
            weight, unit, pieces, outputs, full.index(stage), weight_smem, stage, PAD, TILE, PIECE, PARTS
        )  # fmt: skip
        tma.async_copy_global_to_shared(
            inputs, [0, unit % pieces * PIECE], full.index(stage), input_smem.index(stage)
        )  # fmt: skip
