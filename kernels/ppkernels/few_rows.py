"""y = act(x W^T + b) + residual for the few rows of a small decode step, in one launch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ppkernels import gpu
from ppkernels.activation import Activation, activate

MOST_ROWS = 1
"""Beyond, a library's matrix product is as fast, though it leaves some activations and sums to other launches."""

WIDEST = 32768
"""Inputs at most: a program holds whole rows of the weight in registers."""


def serves(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether `few_rows` takes a product of `inputs` [T, K] and `weight` [N, K]."""
    if not gpu.serves(inputs):
        return False
    rows, width = inputs.shape
    plain = inputs.stride(1) == 1 and weight.is_contiguous() and inputs.dtype == weight.dtype
    return 0 < rows <= MOST_ROWS and width <= WIDEST and plain


def few_rows(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return [T, outputs] as a new tensor, rounded once; see `few_rows_reference`. Call it for what `serves` names."""
    from ppkernels.gpu.few_rows import few_rows as few_rows_on_gpu

    return few_rows_on_gpu(inputs, weight, bias, activation, residual)


def few_rows_reference(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Torch version of `few_rows`."""
    output = functional.linear(inputs, weight, bias)
    output = activate(output, activation)
    return output if residual is None else output.add_(residual)
