"""The residual stream of one step: read through norms, and added to, in as few passes as device and rows allow."""

from __future__ import annotations

from ppkernels import gpu
from ppkernels.activation import Activation
from ppkernels.norms import Norm
from torch import Tensor

from ppengine.models.layers import Linear


class Residual:
    """Hidden states [T, H]. What it is made of is not written.

    On a CPU a product is added to the stream as it is made; so it is with few rows on a GPU, where the next product
    norms what it reads as well. With more rows there, a product comes from a library and waits for the next norm, which
    adds it in the same pass.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._own = False
        self._update: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """[T, H], all updates added; good until the next one."""
        if self._update is not None:
            self._values.add_(self._update)
            self._update = None
        return self._values

    def through(self, norm: Norm | None, linear: Linear, activation: Activation | None = None) -> Tensor:
        """Return `linear` [T, outputs] of the normed stream, with the activation behind it."""
        if self._update is not None and norm is not None:
            inputs, self._update, norm = norm.of_sum(self._values, self._update), None, None
        else:
            inputs = self.values
        output: Tensor = linear(inputs, activation, norm)
        return output

    def add(self, linear: Linear, inputs: Tensor) -> None:
        """Add `linear` of `inputs` [T, inputs]."""
        values = self.values
        if linear.takes(inputs) or not (self._own or gpu.serves(inputs)):
            self._values = linear.added(values, inputs)
        elif gpu.serves(inputs):
            self._values = values if self._own else values.clone()
            self._update = linear(inputs)
        else:
            linear.add_to(values, inputs)
        self._own = True

    def replace(self, norm: Norm) -> None:
        """Make the normed stream the stream."""
        if self._update is not None:
            self._values, self._update = norm.of_sum(self._values, self._update), None
        else:
            self._values = norm(self._values)
        self._own = True
