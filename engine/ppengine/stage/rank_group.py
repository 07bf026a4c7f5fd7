"""The group of a stage's ranks, as its model holds it for life. In each generation the ranks join again.

Until they have joined, a rank is alone. The profile run of boot needs shapes, time and memory, not
sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from ppkernels.norms import Norm
from torch import Tensor
from typing_extensions import override

from ppengine.models.group import LateSum, Sum
from ppengine.protocol.stage_info import SumsInfo
from ppengine.stage.wire import Wire

MeetAll = Callable[[], dict[int, Wire]]
"""Returns a wire to each other rank, by rank, once all are there. Raises SupersededError, PeerLostError."""


class RankGroup(ABC):
    """`rank` of `size`, a `ppengine.models.group.Group`. A call that waits raises PeerLostError, SupersededError."""

    rank: int
    size: int
    step = 0
    """Number of the step that the next calls belong to."""
    sums: SumsInfo | None = None
    """How parts are added; None: there is one rank."""

    @abstractmethod
    def join(self, generation: int, meet_all: MeetAll) -> None:
        """Meet the other ranks of `generation`. Raises OSError, PeerLostError, SupersededError."""

    @abstractmethod
    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        """Return the sum of all ranks' `part`, added in rank order."""

    def reduce_norm(self, part: Tensor, residual: Tensor, norm: Norm, site: int) -> Tensor:
        """Add the sum of all ranks' `part` to `residual` in place, and return the norm of that."""
        return norm.of_sum(residual, self.all_reduce(part, site))

    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        """Return the rows of each piece of a sum."""
        return [slice(0, rows)]

    def send(self, part: Tensor, site: int) -> Sum:
        """Begin the sum of all ranks' `part`, one of several pieces."""
        return LateSum(self, part, site)

    @abstractmethod
    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        """Return all ranks' `part` [R, w] side by side."""

    @abstractmethod
    def check_peer(self) -> None:
        """Raise PeerLostError if a device may be waiting for a rank that is gone."""

    def compare(self) -> None:  # noqa: B027 (ranks on CPUs compare in each call)
        """Raise RanksDifferError if the ranks have launched different calls."""

    @abstractmethod
    def releases(self) -> list[Callable[[], None]]:
        """Return calls that let a device run on which waits for a rank of the present generation.

        Any thread may make them, however late: they reach nothing of the next generation.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the generation; the other ranks see it at once. No device may be using the group."""


class LoneRank(RankGroup):
    """A rank that meets no other: the only one of its stage, or one of `size` that is measured alone."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @override
    def join(self, generation: int, meet_all: MeetAll) -> None:
        """Do nothing."""

    @override
    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        return part

    @override
    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        return part if self.size == 1 else part.new_zeros(len(part), sum(widths))

    @override
    def check_peer(self) -> None:
        """Do nothing."""

    @override
    def releases(self) -> list[Callable[[], None]]:
        return []

    @override
    def close(self) -> None:
        """Do nothing."""


def pairs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return all pairs of ranks in the one order in which they meet, so that none waits in a circle."""
    known = sorted(ranks)
    return [(first, second) for first in known for second in known if first < second]


def rounds(part: Tensor, most_bytes: int) -> Iterable[Tensor]:
    """Return pieces of a contiguous tensor, flat, of at most `most_bytes` each."""
    flat = part.view(-1)
    most = most_bytes // flat.itemsize
    return (flat[first : first + most] for first in range(0, max(1, len(flat)), most))
