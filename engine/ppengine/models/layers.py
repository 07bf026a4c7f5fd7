"""Parts that the models share: linear layers made of several checkpoint tensors, and the table of those."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from ppkernels import few_rows
from ppkernels.activation import activate, linear_relu
from ppkernels.activation_kind import Activation
from ppkernels.cpu import linear
from torch import Tensor, nn
from torch.nn import functional

T = TypeVar("T")


def part_of(part: T | None, where: str) -> T:
    """Return `part`. Raises RuntimeError on a stage that was built without it: only the `where` one has it."""
    if part is None:
        raise RuntimeError(f"only the {where} stage can do this")
    return part


class Source(NamedTuple):
    """One tensor of the checkpoint and the part of a parameter that it fills."""

    name: str
    target: Tensor


class WeightTable:
    """Makes the parameters of a stage, empty, and remembers which checkpoint tensors they are made of."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.sources: list[Source] = []
        self.bytes = 0

    def fuse(self, parts: list[tuple[str, int]], *inner: int) -> nn.Parameter:
        """Return a parameter [sum of rows, *inner] whose rows are the tensors `parts` (name, rows), in order."""
        total = sum(rows for _, rows in parts)
        data = torch.empty((total, *inner), dtype=self.dtype, device=self.device)
        self.bytes += data.numel() * data.element_size()
        first = 0
        for name, rows in parts:
            self.sources.append(Source(name, data[first : first + rows]))
            first += rows
        return nn.Parameter(data, requires_grad=False)

    def take(self, name: str, *shape: int) -> nn.Parameter:
        """Return a parameter of `shape` that is the tensor `name`."""
        return self.fuse([(name, shape[0])], *shape[1:])

    def linear(self, parts: list[tuple[str, int]], inputs: int, bias: bool) -> Linear:
        """Return a linear layer of `parts` (prefix, outputs) side by side; each has `.weight` and maybe `.bias`."""
        weight = self.fuse([(f"{name}.weight", rows) for name, rows in parts], inputs)
        return Linear(weight, self.fuse([(f"{name}.bias", rows) for name, rows in parts]) if bias else None)


class Linear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.packed = False

    def pack(self) -> None:
        """Bring the weight, in its own memory, into the form that the CPU's kernel takes, where it takes it at all.

        The memory of each checkpoint tensor keeps its numbers, in another order.
        """
        if not self.packed and linear.can_pack(self.weight):
            self.weight = nn.Parameter(linear.pack(self.weight.data), requires_grad=False)
            self.packed = True

    def takes(self, inputs: Tensor) -> bool:
        """Return whether `inputs` [T, inputs] are few rows: activation and sum are then done as y is made."""
        return few_rows.serves(inputs, self.weight)

    def forward(self, inputs: Tensor, activation: Activation | None = None) -> Tensor:
        """Return y [T, outputs] of `inputs` [T, inputs], with the activation behind it."""
        if self.takes(inputs):
            return few_rows.few_rows(inputs, self.weight, self.bias, activation)
        if self.packed:
            return activate(linear.linear(inputs, self.weight, self.bias), activation)
        if activation is Activation.RELU and self.bias is not None:
            return linear_relu(inputs, self.weight, self.bias)
        return activate(functional.linear(inputs, self.weight, self.bias), activation)

    def added(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Return `residual` + y as a new tensor."""
        if self.takes(inputs):
            return few_rows.few_rows(inputs, self.weight, self.bias, residual=residual)
        if self.packed:
            output = residual.clone(memory_format=torch.contiguous_format)
            linear.linear_added(output, inputs, self.weight, self.bias)
            return output
        output = torch.addmm(residual, inputs, self.weight.t())
        return output if self.bias is None else output.add_(self.bias)

    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        """Add y to `residual`, which is contiguous, in place."""
        if self.packed:
            linear.linear_added(residual, inputs, self.weight, self.bias)
            return
        residual.addmm_(inputs, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [T, inputs] of the weight: a head that is tied to the embedding serves as that."""
        return linear.rows_of(self.weight, indices) if self.packed else functional.embedding(indices, self.weight)
