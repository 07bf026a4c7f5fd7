"""RMS and layer normalisation over the last dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ppkernels import gpu, jit

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm with its parameters [W]: RMS norm, which always has a weight, or layer norm where it is `centred`."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    def __call__(self, values: Tensor) -> Tensor:
        """Return the norm of `values` [T, W]."""
        if self.centred:
            return layer_norm(values, self.weight, self.bias, self.eps)
        assert self.weight is not None
        return rms_norm(values, self.weight, self.eps)

    def of_sum(self, residual: Tensor, update: Tensor) -> Tensor:
        """Add `update` to `residual` [T, W] in place, and return the norm of the sum."""
        if self.centred:
            return add_layer_norm(residual, update, self.weight, self.bias, self.eps)
        assert self.weight is not None
        return add_rms_norm(residual, update, self.weight, self.eps)


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `values` / sqrt(mean(values²) + eps) * weight; `weight` broadcasts against `values`.

    Half precision is normed in float32 and rounded before the weight, as the models were trained.
    """
    if _on_gpu(values):
        from ppkernels.gpu import norms

        return norms.rms_norm(values, weight, eps)
    if jit.serves(values) and values.is_contiguous() and weight.dim() == 1:
        output = torch.empty_like(values)
        width = values.shape[-1]
        rms_norm_rows(values.view(-1, width).numpy(), weight.numpy(), eps, output.view(-1, width).numpy())
        return output
    return rms_norm_reference(values, weight, eps)


def rms_norm_reference(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Torch version of `rms_norm`."""
    width = values.shape[-1:]
    if values.dtype in _HALF:
        return functional.rms_norm(values.float(), width, None, eps).to(values.dtype).mul_(weight)
    if weight.dim() == 1:
        return functional.rms_norm(values, width, weight, eps)
    return functional.rms_norm(values, width, None, eps).mul_(weight)


def layer_norm(values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm of `values` over the last dimension; without weight and bias only centred and scaled."""
    if _on_gpu(values):
        from ppkernels.gpu import norms

        return norms.layer_norm(values, weight, bias, eps)
    return layer_norm_reference(values, weight, bias, eps)


def layer_norm_reference(values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Torch version of `layer_norm`."""
    return functional.layer_norm(values, values.shape[-1:], weight, bias, eps)


def add_rms_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to `residual` [T, W] in place, and return the RMS norm of the sum."""
    if residual.dim() == 2 and _on_gpu(residual, update):
        from ppkernels.gpu import norms

        return norms.rms_norm(residual, weight, eps, update)
    return rms_norm(residual.add_(update), weight, eps)


def add_layer_norm(residual: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Add `update` to `residual` [T, W] in place, and return the layer norm of the sum."""
    if residual.dim() == 2 and _on_gpu(residual, update):
        from ppkernels.gpu import norms

        return norms.layer_norm(residual, weight, bias, eps, update)
    return layer_norm(residual.add_(update), weight, bias, eps)


def _on_gpu(*rows: Tensor) -> bool:
    """Return whether the kernels of `ppkernels.gpu` take `rows`: tokens, maybe heads, and values side by side."""
    return all(gpu.serves(part) and part.dim() in (2, 3) and part.stride(-1) == 1 for part in rows)


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
