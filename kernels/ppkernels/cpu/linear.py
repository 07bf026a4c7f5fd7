"""y = x W^T with packed weights, on a CPU and one thread.

A packed weight [outputs / L, inputs, L] holds the weights of L outputs side by side; L numbers fill
one vector. For 16 rows torch takes twice the time, because it reads weights more slowly. For many
rows it is no faster either, so the packed weight replaces the plain one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ppkernels import cpu
from ppkernels.cpu import jit
from ppkernels.cpu.tiles import HEIGHT, lanes_of, make_tile
from ppkernels.cpu.vectors import lanes

UNROLL = 4
"""Inputs of a weight must be a multiple of this."""
ROWS, DEPTH = 240, 512
"""Part of x that is multiplied at a time: 480 KiB in float32, for the second-level cache."""
_AHEAD = 64
"""Distance of a prefetch of weights before their use, in vectors."""
_tile4 = make_tile(4, unroll=UNROLL, by_row=False)
_tile8 = make_tile(8, unroll=2, by_row=False)
_tile12 = make_tile(12, unroll=2, by_row=False)
_tile16 = make_tile(16, unroll=2, by_row=False)


def can_pack(weight: Tensor) -> bool:
    """Return whether the kernel takes `weight` [outputs, inputs] packed, on one thread."""
    whole = weight.shape[0] % lanes(weight) == 0 and weight.shape[1] % UNROLL == 0
    return whole and cpu.serves(weight) and cpu.one_thread()


def pack(weight: Tensor) -> Tensor:
    """Return `weight` [outputs, inputs] packed in place: each run of L rows stays there."""
    width = lanes(weight)
    packed = weight.view(-1, weight.shape[1], width)
    for panel, rows in zip(packed, weight.view(-1, width, weight.shape[1]), strict=True):
        panel.copy_(rows.t().clone())
    return packed


def rows_of(packed: Tensor, rows: Tensor) -> Tensor:
    """Return `rows` [T, inputs] of the weight before it was packed."""
    width = packed.shape[2]
    return packed[rows // width, :, rows % width]


def linear(inputs: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return [T, outputs] of `inputs` [T, inputs]."""
    output = inputs.new_empty(inputs.shape[0], packed.shape[0] * packed.shape[2])
    multiply(inputs.contiguous().numpy(), packed.numpy(), output.numpy(), False)
    return output if bias is None else output.add_(bias)


def linear_added(output: Tensor, inputs: Tensor, packed: Tensor, bias: Tensor | None = None) -> None:
    """Add the result of `linear` to `output` [T, outputs], contiguous."""
    multiply(inputs.contiguous().numpy(), packed.numpy(), output.numpy(), True)
    if bias is not None:
        output.add_(bias)


@jit.compiled
def multiply(x: Any, w: Any, y: Any, add: bool) -> None:
    """Set y [T, outputs] to x [T, inputs] times the packed w, or add the product to y if `add`."""
    outputs, (panels, inputs, _), width = y.shape[1], w.shape, lanes_of(w)
    most = inputs if len(x) <= HEIGHT else min(inputs, DEPTH)
    columns = np.empty((min(len(x), ROWS) + HEIGHT) * most, x.dtype)
    for first in range(0, len(x), ROWS):
        rows = min(ROWS, len(x) - first)
        for start in range(0, inputs, most):
            depth = min(most, inputs - start)
            for done in range(0, rows, HEIGHT):
                _to_columns(x, first + done, min(HEIGHT, rows - done), start, depth, columns, done * most)
            more = add or start > 0
            for panel in range(panels):
                w_at = (panel * inputs + start) * width
                ahead = w_at + _AHEAD * width
                for done in range(0, rows, HEIGHT):
                    left, x_at, y_at = min(HEIGHT, rows - done), done * most, (first + done) * outputs + panel * width
                    if left <= 4:
                        _tile4(columns, x_at, 4, w, w_at, width, ahead, depth, y, y_at, outputs, left, more)
                    elif left <= 8:
                        _tile8(columns, x_at, 8, w, w_at, width, ahead, depth, y, y_at, outputs, left, more)
                    elif left <= 12:
                        _tile12(columns, x_at, 12, w, w_at, width, ahead, depth, y, y_at, outputs, left, more)
                    else:
                        _tile16(columns, x_at, 16, w, w_at, width, ahead, depth, y, y_at, outputs, left, more)


@jit.compiled
def _to_columns(x: Any, first: int, rows: int, start: int, depth: int, columns: Any, at: int) -> None:
    """Copy rows of x to `columns[at:]` as [depth, height], with the last row repeated."""
    height = (rows + 3) // 4 * 4
    for row in range(height):
        source = first + min(row, rows - 1)
        for k in range(depth):
            columns[at + k * height + row] = x[source, start + k]
