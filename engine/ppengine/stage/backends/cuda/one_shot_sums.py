"""Sums of two ranks by copies: each sends its whole part, and adds both as it norms (`ppkernels.gpu.part_sums`).

The inbox has `SLOTS` slots. Piece n goes into slot n modulo SLOTS, once this rank has waited for all
pieces of the sum before. The other sent those behind its reads of the sum before that. So the piece
that is written over has been read, and no flag has to say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppkernels.gpu.collectives import NormOf
from ppkernels.gpu.part_sums import add_parts, add_parts_norm
from ppkernels.norms import Norm
from torch import Tensor
from typing_extensions import override

from ppengine.stage.backends.cuda.copied_sums import CopiedSums, rounded
from ppengine.stage.backends.cuda.peer_lanes import PeerLanes
from ppengine.stage.backends.cuda.streams import Event
from ppengine.stage.ledger.actors import Buffer

PIECES = 2
SLOTS = 2 * PIECES


class OneShotSums(CopiedSums):
    """One of two ranks."""

    def __init__(self, lanes: PeerLanes, part_bytes: int) -> None:
        """Make memory for sums of at most `part_bytes`. Raises DriverError."""
        super().__init__(lanes)
        self.piece_bytes = rounded(part_bytes // PIECES + 1)
        self._inboxes = lanes.allocate(self.piece_bytes, SLOTS)
        self._parts = [
            [lanes.compute.buffer(f"part of rank {rank}, slot {slot}", self.piece_bytes) for rank in range(lanes.size)]
            for slot in range(SLOTS)
        ]
        """The ledger's names of the parts, by slot and rank."""

    @override
    def _buffers(self) -> list[Buffer]:
        return [part for parts in self._parts for part in parts]

    @override
    def _counts(self, rows: int) -> tuple[int, ...]:
        return (PIECES,)

    @override
    def send(self, part: Tensor) -> OneShotSum:
        self._check(part)
        lanes, slot = self.lanes, self.lanes.next_shot % SLOTS
        own = self._parts[slot][lanes.rank]
        lanes.compute.declare("part of a sum", writes=(own,))
        lanes.stream.wait(lanes.compute.record("part made"))
        number = lanes.shoot("part", slot, dict.fromkeys(lanes.others, (0, part)), own)
        return OneShotSum(self, part, number, lanes.stream.record("part sent"))

    def inbox(self, number: int, sent: Event) -> Tensor:
        """Let the compute stream wait for piece `number` of the other rank; return it, uint8 [1, piece_bytes]."""
        lanes, parts = self.lanes, self._parts[number % SLOTS]
        lanes.await_shot(number, "part", parts, behind=number - PIECES)
        lanes.compute.wait(sent)
        # Behind the sum the allocator may give the part's memory to another tensor: the same as a write.
        lanes.compute.declare("sum of parts", parts, (parts[lanes.rank],))
        return self._inboxes[number % SLOTS].unsqueeze(0)


@dataclass(frozen=True, slots=True)
class OneShotSum:
    """A piece on its way: a `ppengine.models.group.Sum`."""

    sums: OneShotSums
    part: Tensor
    number: int
    sent: Event

    def add_to(self, residual: Tensor) -> None:
        """See `Sum`."""
        add_parts(self.part, self._inbox(), self.sums.lanes.rank, residual)

    def add_norm(self, residual: Tensor, norm: Norm) -> Tensor:
        """See `Sum`."""
        parameters = NormOf(norm.weight, norm.bias, norm.eps, norm.centred)
        return add_parts_norm(self.part, self._inbox(), self.sums.lanes.rank, residual, parameters)

    def _inbox(self) -> Tensor:
        return self.sums.inbox(self.number, self.sent).view(self.part.dtype)
