"""The residual stream of one step: read through norms, and added to, in as few passes as device and rows allow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ppkernels import gpu
from ppkernels.activation_kind import Activation
from ppkernels.norms import Norm
from torch import Tensor

from ppengine.models.group import Sum
from ppengine.models.layers import Linear, SummedLinear


class Residual:
    """Hidden states [T, H]. Its inputs are never written to.

    On a CPU, and with few rows on a GPU, a product is added to the stream as it is made. With more rows on a GPU it
    comes from a library, and waits for the next norm, which adds it in the same pass. So does a sum over ranks. One in
    several pieces is on its way while the device computes others.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._own = False
        self._update: Tensor | None = None
        self._sums: list[tuple[slice, Sum]] = []
        """Sums over ranks, each with its rows: those of all rows, or none."""

    @property
    def values(self) -> Tensor:
        """[T, H], all updates added; good until the next one."""
        if self._update is not None:
            self._values.add_(self._update)
            self._update = None
        sums, self._sums = self._sums, []
        for rows, one in sums:
            one.add_to(self._values[rows])
        return self._values

    def through(self, norm: Norm | None, linear: Linear, activation: Activation | None = None) -> Tensor:
        """Return `linear` [T, outputs] of the normed stream, with the activation behind it."""
        if norm is not None and len(self._sums) > 1:
            return linear.of_pieces(len(self._values), self._normed_pieces(norm), activation)
        output: Tensor = linear(self.values if norm is None else self._normed(norm), activation)
        return output

    def add(self, linear: Linear, inputs: Tensor, norm: Norm | None = None) -> None:
        """Add `linear` of `inputs` [T, inputs], behind its `norm` if there is one."""
        values = self.values
        if norm is not None:
            self._values = values if self._own else values.clone()
            self._update, self._own = norm(linear(inputs)), True
            return
        if isinstance(linear, SummedLinear):
            self._values = values if self._own else values.clone()
            self._sums = list(linear.sums(inputs))
        elif gpu.serves(inputs) and not linear.takes(inputs):
            self._values = values if self._own else values.clone()
            self._update = linear(inputs)
        elif self._own and not gpu.serves(inputs):
            linear.add_to(values, inputs)
        else:
            self._values = linear.added(values, inputs)
        self._own = True

    def replace(self, norm: Norm) -> None:
        """Make the normed stream the stream."""
        self._values, self._own = self._normed(norm), True

    def _normed(self, norm: Norm) -> Tensor:
        if self._sums:
            pieces = [normed for _, normed in self._normed_pieces(norm)]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        update, self._update = self._update, None
        return norm(self._values) if update is None else norm.of_sum(self._values, update)

    def _normed_pieces(self, norm: Norm) -> Iterator[tuple[slice, Tensor]]:
        """Add the sums piece by piece; yield the rows of each, and their norm."""
        sums, self._sums = self._sums, []
        for rows, one in sums:
            yield rows, one.add_norm(self._values[rows], norm)
