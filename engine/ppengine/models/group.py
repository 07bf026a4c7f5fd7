"""The group of ranks that share the layers of one stage, as a model uses it.

A group is handed to the model; there is no global one. All ranks call the same operations in the same
order. `site` names the call (`ppengine.common.groups.site`), so that ranks that launched different
things can be named with both call sites.
"""

from __future__ import annotations

from typing import Protocol

from ppkernels.norms import Norm
from torch import Tensor


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

    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        """Return all ranks' `part` [R, w] side by side, [R, sum of `widths`]; rank r's has width `widths[r]`."""


class Alone:
    """A group of one: nothing to exchange."""

    rank, size = 0, 1

    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        """Return `part`."""
        return part

    def reduce_norm(self, part: Tensor, residual: Tensor, norm: Norm, site: int) -> Tensor:
        """Add `part` to `residual`, and return the norm of that."""
        return norm.of_sum(residual, part)

    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        """Return `part`."""
        return part


ALONE = Alone()
