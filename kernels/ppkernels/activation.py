"""Activations of the MLPs."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ppkernels import gpu, jit
from ppkernels.exponential import exp


class Activation(Enum):
    """What follows the first product of an MLP."""

    RELU = "relu"
    GELU = "gelu"
    SILU_AND_MUL = "silu_and_mul"
    """Of [gate, up] side by side: half as wide as what it is given."""


def activate(values: Tensor, activation: Activation | None) -> Tensor:
    """Return `activation` of `values` [T, outputs]; `values` may be written."""
    if activation is Activation.RELU:
        return values.relu_()
    if activation is Activation.GELU:
        return functional.gelu(values)
    return values if activation is None else silu_and_mul(values)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] of `gate_up` [T, 2 * I], gate first."""
    if gpu.serves(gate_up) and gate_up.stride(-1) == 1:
        from ppkernels.gpu import activation

        return activation.silu_and_mul(gate_up)
    if jit.serves(gate_up) and gate_up.is_contiguous() and jit.one_thread():
        output = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        silu_and_mul_rows(gate_up.numpy(), output.numpy())
        return output
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Torch version of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def linear_relu(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x W^T + b) [T, outputs] of `inputs` [T, inputs].

    On a GPU bias and relu are done by the matrix product as it writes, so they cost no launch.
    """
    if inputs.is_cuda:
        return torch._addmm_activation(bias, inputs, weight.t())
    return linear_relu_reference(inputs, weight, bias)


def linear_relu_reference(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Torch version of `linear_relu`."""
    return functional.linear(inputs, weight, bias).relu_()


@jit.compiled
def silu_and_mul_rows(gate_up: Any, output: Any) -> None:
    """As `silu_and_mul`, into `output`."""
    one, (rows, width) = gate_up.dtype.type(1), output.shape
    for row in range(rows):
        for i in range(width):
            gate = gate_up[row, i]
            output[row, i] = gate / (one + exp(-gate)) * gate_up[row, width + i]
