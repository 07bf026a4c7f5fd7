"""Arguments of a launch, its grid, and shapes of tiles."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ppkernels.activation_kind import Activation
from ppkernels.gpu.dots import processors
from ppkernels.gpu.hopper_products import LEAST_ROWS, MOST_ROWS
from ppkernels.gpu.hopper_products.product_kernel import multiply

LEAST_TILE = 64
"""Outputs of the smallest tile: rows of a matrix instruction."""
REGISTERS = 96
"""Registers of a thread on average: those of two programs leave some for a small kernel between them."""
OUT_RING, INTO_RING = 103 * 1024, 121 * 1024
"""Bytes of the stages of a program, of a product out of the residual stream and of one into it.

One of each fits into a multiprocessor, and two of the latter do not.
"""
LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


class Tiles(NamedTuple):
    """Shape of a unit of work, and bytes of all that a program has in shared memory."""

    outputs: int
    """Rows of the weight; twice as many with gates, `LEAST_TILE` of each."""
    piece: int
    """Inputs: columns of the weight."""
    ring: int

    def stages(self, parts: int) -> int:
        """Return the number of units in the ring, of the inputs and `parts` tiles of the weight."""
        return self.ring // ((self.outputs * parts + MOST_ROWS) * self.piece * 2)


_counters: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
"""By weight, a number for each tile: programs that have written partial sums. It is 0 between launches."""


def tiles_of(outputs: int, parts: int, into_stream: bool = False) -> Tiles:
    """Return the tiles for a product with `outputs` outputs, each of `parts` rows of the weight.

    Larger tiles read the inputs less often; smaller ones have fewer partial sums.
    """
    if into_stream:
        return Tiles(LEAST_TILE, 128, INTO_RING)
    if parts == 1 and outputs < 8192:
        return Tiles(LEAST_TILE, 128, OUT_RING)
    return Tiles(2 * LEAST_TILE // parts, 64, OUT_RING)


def multiply_rows(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    into_stream: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return act(x W^T + b) + residual [T, outputs] as a new tensor, rounded once.

    Outputs go into the residual stream if `into_stream`. `serves` must allow the product. The first one of a weight
    must not be captured in a graph. Raises ValueError for too few or too many rows.
    """
    rows, width = inputs.shape
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        raise ValueError(f"{rows} rows: the kernel takes {LEAST_ROWS} to {MOST_ROWS}")
    parts = 2 if activation is Activation.SILU_AND_MUL else 1
    outputs = weight.shape[0] // parts
    tiles = tiles or tiles_of(outputs, parts, into_stream)
    pieces = -(-width // tiles.piece)
    programs = min(processors(inputs.device), -(-outputs // tiles.outputs) * pieces)
    output = torch.empty((rows, outputs), dtype=inputs.dtype, device=inputs.device)
    sums = torch.empty(2 * programs * parts * tiles.outputs * MOST_ROWS, dtype=torch.float32, device=inputs.device)
    multiply[(programs,)](
        TensorDescriptor(inputs, [rows, width], [inputs.stride(0), 1], [MOST_ROWS, tiles.piece], LAYOUT),
        TensorDescriptor(weight, list(weight.shape), [width, 1], [tiles.outputs, tiles.piece], LAYOUT),
        bias if bias is not None else inputs,
        residual if residual is not None else inputs,
        output,
        sums,
        counters_of(weight),
        rows,
        outputs,
        pieces,
        residual.stride(0) if residual is not None else 0,
        PAD=MOST_ROWS,
        TILE=tiles.outputs,
        PIECE=tiles.piece,
        STAGES=tiles.stages(parts),
        BIAS=bias is not None,
        RELU=activation is Activation.RELU,
        GATED=parts == 2,
        RESIDUAL=residual is not None,
        DOT=gl.bfloat16 if inputs.dtype == torch.bfloat16 else gl.float16,
        CHAIN=True,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return output


def counters_of(weight: Tensor) -> Tensor:
    """Return the counters of the tiles of `weight`. Raises RuntimeError if they are new amid the capture of a graph."""
    counters = _counters.get(weight)
    if counters is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first product of a weight must not be captured: its counters would be the graph's")
        counters = torch.zeros(-(-len(weight) // LEAST_TILE), dtype=torch.int32, device=weight.device)
        _counters[weight] = counters
    return counters
