"""The residual stream of one step: read through norms, and added to, in as few passes as device and rows allow."""

from __future__ import annotations

from ppkernels import gpu
from ppkernels.activation_kind import Activation
from ppkernels.norms import Norm
from torch import Tensor

from ppengine.models.layers import Linear, SummedLinear


class Residual:
    """Hidden states [T, H]. Its inputs are never written to.

    On a CPU, and with few rows on a GPU, a product is added to the stream as it is made. With more rows on a GPU it
    comes from a library, and waits for the next norm, which adds it in the same pass. So does a sum over ranks.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._own = False
        self._update: Tensor | None = None
        self._summed: SummedLinear | None = None
        """The layer that `_update` is this rank's part of; None: `_update` is whole."""

    @property
    def values(self) -> Tensor:
        """[T, H], all updates added; good until the next one."""
        if self._update is not None:
            self._values.add_(self._update if self._summed is None else self._summed.sum(self._update))
            self._update = self._summed = None
        return self._values

    def through(self, norm: Norm | None, linear: Linear, activation: Activation | None = None) -> Tensor:
        """Return `linear` [T, outputs] of the normed stream, with the activation behind it."""
        output: Tensor = linear(self.values if norm is None else self._normed(norm), activation)
        return output

    def add(self, linear: Linear, inputs: Tensor, norm: Norm | None = None) -> None:
        """Add `linear` of `inputs` [T, inputs], behind its `norm` if there is one."""
        values = self.values
        if norm is not None:
            self._values = values if self._own else values.clone()
            self._update, self._own = norm(linear(inputs)), True
            return
        summed = linear if isinstance(linear, SummedLinear) else None
        if summed is not None or (gpu.serves(inputs) and not linear.takes(inputs)):
            self._values = values if self._own else values.clone()
            self._update, self._summed = linear(inputs) if summed is None else summed.part(inputs), summed
        elif self._own and not gpu.serves(inputs):
            linear.add_to(values, inputs)
        else:
            self._values = linear.added(values, inputs)
        self._own = True

    def replace(self, norm: Norm) -> None:
        """Make the normed stream the stream."""
        self._values, self._own = self._normed(norm), True

    def _normed(self, norm: Norm) -> Tensor:
        update, summed = self._update, self._summed
        self._update = self._summed = None
        if update is None:
            return norm(self._values)
        return norm.of_sum(self._values, update) if summed is None else summed.add_norm(update, self._values, norm)
