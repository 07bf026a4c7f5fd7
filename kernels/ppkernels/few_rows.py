"""y = act(x W^T + b) + residual for the few rows of a small decode step, in one launch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ppkernels.activation import activate
from ppkernels.activation_kind import Activation
from ppkernels.dispatch import choose


def serves(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether one launch computes the product of `inputs` [T, K] and `weight` [N, K]."""
    return choose("few_rows", few_rows_reference, inputs, weight) is not few_rows_reference


def few_rows(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    into_stream: bool = False,
) -> Tensor:
    """Return act(x W^T + b) + residual [T, outputs] as a new tensor; a kernel rounds it once, but for GELU.

    Products of a layer go into the residual stream and out of it, in turn; a kernel divides memory between neighbours.
    """
    code = choose("few_rows", few_rows_reference, inputs, weight)
    if activation is not Activation.GELU:
        return code(inputs, weight, bias, activation, residual, into_stream)
    output = activate(code(inputs, weight, bias, None, None, into_stream), activation)  # the kernels do not have it
    return output if residual is None else output.add_(residual)


def few_rows_reference(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    into_stream: bool = False,
) -> Tensor:
    """Return `few_rows`, computed by torch."""
    output = functional.linear(inputs, weight, bias)
    output = activate(output, activation)
    return output if residual is None else output.add_(residual)
