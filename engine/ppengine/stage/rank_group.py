"""The group of a stage's ranks, as its model holds it for life: each generation connects it again.

Until the ranks have met, a rank is alone. The profile run of boot needs shapes and time, not sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Exchange(ABC):
    """The connected ranks of one generation. A call that waits raises PeerLostError, SupersededError, RanksDiffer."""

    step = 0
    """Number of the step that the next calls belong to."""

    @abstractmethod
    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        """Return the sum of all ranks' `part`, added in rank order."""

    @abstractmethod
    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        """Return all ranks' `part` [R, w] side by side."""

    @abstractmethod
    def check_peer(self) -> None:
        """Raise PeerLostError if a device may be waiting for a rank that is gone."""

    @abstractmethod
    def release(self) -> None:
        """Let a device that waits for a rank run on; any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group; the other ranks see it at once."""


class RankGroup:
    """`rank` of `size`. `exchange` None: the ranks have not met in this generation."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.exchange: Exchange | None = None

    def at(self, step: int) -> None:
        """Note the step that the next calls belong to."""
        if self.exchange is not None:
            self.exchange.step = step

    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        """Return the sum of all ranks' `part`; see `ppengine.models.group`."""
        return part if self.exchange is None else self.exchange.all_reduce(part, site)

    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        """Return all ranks' `part` [R, w] side by side; see `ppengine.models.group`."""
        if self.exchange is not None:
            return self.exchange.all_gather(part, widths, site)
        return part if self.size == 1 else part.new_zeros(part.shape[0], sum(widths))
