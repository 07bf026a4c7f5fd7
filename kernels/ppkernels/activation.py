"""Activations of the MLPs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ppkernels.activation_kind import Activation
from ppkernels.dispatch import choose


def activate(values: Tensor, activation: Activation | None) -> Tensor:
    """Return `activation` of `values` [T, outputs]; may overwrite `values`."""
    if activation is Activation.RELU:
        return values.relu_()
    if activation is Activation.GELU:
        return functional.gelu(values)
    return values if activation is None else silu_and_mul(values)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] of `gate_up` [T, 2 * I], gate first."""
    return choose("silu_and_mul", silu_and_mul_reference, gate_up)(gate_up)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Return `silu_and_mul`, computed by torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def linear_relu(inputs: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None) -> Tensor:
    """Return relu(x W^T + bias) [T, outputs] of `inputs` [T, inputs], in `out` if there is one.

    On a GPU the matrix product applies bias and relu as it writes, which saves their launches.
    """
    if inputs.is_cuda:
        return torch._addmm_activation(bias, inputs, weight.t(), out=out)
    found = linear_relu_reference(inputs, weight, bias)
    return found if out is None else out.copy_(found)


def linear_relu_reference(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `linear_relu`, computed by two torch operations."""
    return functional.linear(inputs, weight, bias).relu_()
