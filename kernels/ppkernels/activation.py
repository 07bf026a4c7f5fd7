"""Activations of the MLPs."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] of `gate_up` [T, 2 * I], gate first."""
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Torch version of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
