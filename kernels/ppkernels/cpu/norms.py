"""RMS norm on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppkernels.cpu import jit


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of `values` [..., W], contiguous, with a `weight` [W]."""
    output = torch.empty_like(values)
    width = values.shape[-1]
    rms_norm_rows(values.view(-1, width).numpy(), weight.numpy(), eps, output.view(-1, width).numpy())
    return output


@jit.compiled
def rms_norm_rows(values: Any, weight: Any, eps: float, output: Any) -> None:
    """Write the norm of `values` [T, H] to `output`, which may be `values`."""
    rows, width = values.shape
    for row in range(rows):
        total = weight.dtype.type(0)
        for i in range(width):
            total += values[row, i] * values[row, i]
        scale = weight.dtype.type(1 / (total / width + eps) ** 0.5)
        for i in range(width):
            output[row, i] = values[row, i] * scale * weight[i]
