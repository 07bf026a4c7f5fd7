"""Activations of the MLPs on a CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ppkernels.cpu import jit
from ppkernels.cpu.exponential import exp


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] of `gate_up` [T, 2 * I], contiguous."""
    output = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    silu_and_mul_rows(gate_up.numpy(), output.numpy())
    return output


@jit.compiled
def silu_and_mul_rows(gate_up: Any, output: Any) -> None:
    """Write silu(gate) * up of `gate_up` [T, 2 * I] to `output` [T, I]."""
    one, (rows, width) = gate_up.dtype.type(1), output.shape
    for row in range(rows):
        for i in range(width):
            gate = gate_up[row, i]
            output[row, i] = gate / (one + exp(-gate)) * gate_up[row, width + i]
