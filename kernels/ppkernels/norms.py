"""RMS and layer normalisation over the last dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ppkernels.dispatch import choose

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm with its parameters [W]: layer norm if `centred`, otherwise RMS norm, which must have
    a weight.
    """

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

    Half precision is normed in float32 and rounded before the weight, as in the training of the
    models.
    """
    return choose("rms_norm", rms_norm_reference, values, weight)(values, weight, eps)


def rms_norm_reference(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `rms_norm`, computed by torch."""
    width = values.shape[-1:]
    if values.dtype in _HALF:
        return functional.rms_norm(values.float(), width, None, eps).to(values.dtype).mul_(weight)
    if weight.dim() == 1:
        return functional.rms_norm(values, width, weight, eps)
    return functional.rms_norm(values, width, None, eps).mul_(weight)


def layer_norm(values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm of `values` over the last dimension; without weight and bias only
    centred and scaled.
    """
    return choose("layer_norm", layer_norm_reference, values)(values, weight, bias, eps)


def layer_norm_reference(values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `layer_norm`, computed by torch."""
    return functional.layer_norm(values, values.shape[-1:], weight, bias, eps)


def add_rms_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to `residual` [T, W] in place, and return the RMS norm of the sum."""
    return choose("add_rms_norm", _add_then_rms_norm, residual, update)(residual, update, weight, eps)


def _add_then_rms_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(residual.add_(update), weight, eps)


def add_layer_norm(residual: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Add `update` to `residual` [T, W] in place, and return the layer norm of the sum."""
    return choose("add_layer_norm", _add_then_layer_norm, residual, update)(residual, update, weight, bias, eps)


def _add_then_layer_norm(
    residual: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return layer_norm(residual.add_(update), weight, bias, eps)
