"""The group of ranks that share the layers of one stage, as a model uses it.

A group is handed to the model; there is no global one. All ranks call the same operations in the same
order. `site` names the call (`ppengine.common.groups.site`), so that ranks that launched different
things can be named with both call sites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ppkernels.norms import Norm
from torch import Tensor


class Sum(Protocol):
    """A sum of all ranks' parts [T, W] that has begun. It is added once, before the pieces of the next sum begin."""

    def add_to(self, residual: Tensor) -> None:
        """Add it to `residual` [T, W] in place."""

    def add_norm(self, residual: Tensor, norm: Norm) -> Tensor:
        """Add it to `residual` [T, W] in place, and return the norm of that."""


class Group(Protocol):
    """Ranks of one stage. Results are bitwise equal on all ranks."""

    rank: int
    size: int

    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        """Return the sum of all ranks' `part` [T, W], contiguous, added in rank order.

        The result is the caller's: no later call writes to it. `part` may be overwritten, and may be the result.
        """

    def reduce_norm(self, part: Tensor, residual: Tensor, norm: Norm, site: int) -> Tensor:
        """Add the sum of all ranks' `part` [T, W] to `residual` [T, W] in place, and return the norm of that."""

    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        """Return the rows of each piece of a sum, in order.

        With several, one is sent (`send`) while the device computes the next.
        """

    def send(self, part: Tensor, site: int) -> Sum:
        """Begin the sum of all ranks' `part` [T, W], one of several pieces. `part` is the group's from here on."""

    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        """Return all ranks' `part` [R, w] side by side, [R, sum of `widths`]; rank r's has width `widths[r]`."""


@dataclass(frozen=True, slots=True)
class LateSum:
    """A sum that is made when it is added."""

    group: Group
    part: Tensor
    site: int

    def add_to(self, residual: Tensor) -> None:
        """See `Sum`."""
        residual.add_(self.group.all_reduce(self.part, self.site))

    def add_norm(self, residual: Tensor, norm: Norm) -> Tensor:
        """See `Sum`."""
        return self.group.reduce_norm(self.part, residual, norm, self.site)


class Alone:
    """A group of one: nothing to exchange."""

    rank, size = 0, 1

    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        """Return `part`."""
        return part

    def reduce_norm(self, part: Tensor, residual: Tensor, norm: Norm, site: int) -> Tensor:
        """Add `part` to `residual`, and return the norm of that."""
        return norm.of_sum(residual, part)

    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        """Return one piece."""
        return [slice(0, rows)]

    def send(self, part: Tensor, site: int) -> LateSum:
        """Return `part`, to be added."""
        return LateSum(self, part, site)

    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        """Return `part`."""
        return part


ALONE = Alone()
