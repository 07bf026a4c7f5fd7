"""Sums of several ranks by copies, in two shots a piece. Each rank has a share of the rows, as many as the others:

1. Each other rank copies its part of that share into an inbox here.
2. The compute stream waits for all of them, and adds the parts in rank order
   (`ppkernels.gpu.part_sums`). The sum is copied into all ranks' sums.

Inbox and sums have `PIECES` slots, which pieces take in turn. A sum has no more pieces, so the next use
of a slot is in a later sum. A rank sends its parts of that once it has all sums of this one, so their
parts are read. It sends sums of that once it has all parts of it, which ranks send behind their reads
of this sum. So no flag has to say that a slot is free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ppkernels.gpu.part_sums import sum_parts
from ppkernels.norms import Norm
from torch import Tensor
from typing_extensions import override

from ppengine.stage.backends.cuda.copied_sums import CopiedSums, rounded, shaped
from ppengine.stage.backends.cuda.peer_lanes import PeerLanes
from ppengine.stage.backends.cuda.streams import Event
from ppengine.stage.ledger.actors import Buffer

PIECES, FEW_PIECES, MANY_ROWS = 4, 2, 4096
"""Pieces of a sum, and of one with fewer rows than `MANY_ROWS` for each rank."""
_FEW_BYTES, _ROW_BYTES = 2**25, 2**16
"""Room for a piece, if half of a sum takes as much; bytes of the longest row."""


class TwoShotSums(CopiedSums):
    """One of several ranks."""

    def __init__(self, lanes: PeerLanes, part_bytes: int) -> None:
        """Make memory for sums of at most `part_bytes`. Raises DriverError."""
        super().__init__(lanes)
        self.piece_bytes = rounded(max(part_bytes // PIECES, min(part_bytes // FEW_PIECES, _FEW_BYTES)) + 1)
        self._share_bytes = rounded(self.piece_bytes // lanes.size + _ROW_BYTES)
        memories = lanes.allocate(self.piece_bytes + (lanes.size - 1) * self._share_bytes, PIECES)
        self._slots = [self._slot(number, memory) for number, memory in enumerate(memories)]
        self._next = 0
        """Slot of the next piece."""
        self._open: deque[TwoShotSum] = deque()
        """Pieces whose parts are sent and not added, in order."""
        self._asked = False
        """Whether a sum was asked for since the last piece was sent."""

    def _slot(self, number: int, memory: Tensor) -> _Slot:
        buffer, size, room = self.lanes.compute.buffer, self.lanes.size, self.piece_bytes
        return _Slot(
            sums=memory[:room],
            inbox=memory[room : room + (size - 1) * self._share_bytes].view(size - 1, self._share_bytes),
            parts_of=[buffer(f"part of rank {rank}, piece {number}") for rank in range(size)],
            sums_of=[buffer(f"sum of rank {rank}, piece {number}") for rank in range(size)],
        )

    @override
    def begin(self) -> None:
        super().begin()
        self._next, self._asked = 0, False
        self._open.clear()
        for slot in self._slots:
            slot.sums_shot = 0

    @override
    def _buffers(self) -> list[Buffer]:
        return [buffer for slot in self._slots for buffer in (*slot.parts_of, *slot.sums_of)]

    @override
    def _counts(self, rows: int) -> tuple[int, ...]:
        return (PIECES,) if rows >= MANY_ROWS * self.lanes.size else (FEW_PIECES, PIECES)

    @override
    def send(self, part: Tensor) -> TwoShotSum:
        self._check(part)
        number, self._next, lanes = self._next, (self._next + 1) % PIECES, self.lanes
        piece = TwoShotSum(self, part, number)
        own = self._slots[number].parts_of[lanes.rank]
        lanes.compute.declare("part of a sum", writes=(own,))
        lanes.stream.wait(lanes.compute.record("part made"))
        rows = {rank: (self._inbox_at(rank), part[piece.share(rank)]) for rank in lanes.others}
        piece.parts_shot = lanes.shoot("parts", number, rows, own)
        piece.sent = lanes.stream.record("parts sent")
        # Those of the piece before have come meanwhile.
        self._add_parts()
        self._open.append(piece)
        self._asked = False
        return piece

    def _inbox_at(self, rank: int) -> int:
        """Return where this rank's part is in a slot of `rank`."""
        own = self.lanes.rank
        return self.piece_bytes + (own - (own > rank)) * self._share_bytes

    def sums(self, piece: TwoShotSum) -> Tensor:
        """Let the compute stream wait for the sums of a piece; return them [T, W], good until the next sum."""
        # The parts of the last piece are added behind the product that the first one is for.
        while self._open and (self._asked or self._open[0] is piece):
            self._add_parts()
        self._asked = True
        slot = self._slots[piece.number]
        self.lanes.await_shot(piece.sums_shot, "sums", slot.sums_of, behind=piece.parts_shot)
        self.lanes.compute.declare("sums", slot.sums_of)
        return shaped(slot.sums, piece.shape, piece.dtype)

    def _add_parts(self) -> None:
        """Add the parts of this rank's share of the oldest open piece, and send the sums."""
        if not self._open:
            return
        piece, lanes, own = self._open.popleft(), self.lanes, self.lanes.rank
        slot, share = self._slots[piece.number], piece.share(own)
        assert piece.part is not None and piece.sent is not None
        lanes.await_shot(piece.parts_shot, "parts", slot.parts_of, behind=slot.sums_shot)
        lanes.compute.wait(piece.sent)
        # Behind this the allocator may give the part's memory to another tensor: the same as a write.
        lanes.compute.declare("sum of parts", slot.parts_of, (slot.sums_of[own], slot.parts_of[own]))
        sums = shaped(slot.sums, piece.shape, piece.dtype)[share]
        if len(sums):
            sum_parts(piece.part[share], slot.inbox.view(piece.dtype), own, sums)
        piece.part = None
        lanes.stream.wait(lanes.compute.record("share summed"))
        at = share.start * piece.shape[1] * piece.dtype.itemsize
        rows = dict.fromkeys(lanes.others, (at, sums))
        piece.sums_shot = slot.sums_shot = lanes.shoot("sums", piece.number, rows, slot.sums_of[own])


class TwoShotSum:
    """A piece on its way: a `ppengine.models.group.Sum`."""

    __slots__ = ("_sums", "dtype", "number", "part", "parts_shot", "sent", "shape", "sums_shot")

    def __init__(self, sums: TwoShotSums, part: Tensor, number: int) -> None:
        """`number`: its slot."""
        self._sums, self.shape, self.dtype, self.number = sums, part.shape, part.dtype, number
        self.part: Tensor | None = part
        """This rank's part, until the sum of its share is launched."""
        self.sent: Event | None = None
        """Behind the copies of it."""
        self.parts_shot = self.sums_shot = 0

    def share(self, rank: int) -> slice:
        """Return the rows that `rank` adds."""
        rows: int = self.shape[0]
        each = -(-rows // self._sums.lanes.size)
        return slice(min(rank * each, rows), min((rank + 1) * each, rows))

    def add_to(self, residual: Tensor) -> None:
        """See `Sum`."""
        residual.add_(self._sums.sums(self))

    def add_norm(self, residual: Tensor, norm: Norm) -> Tensor:
        """See `Sum`."""
        return norm.of_sum(residual, self._sums.sums(self))


@dataclass(slots=True)
class _Slot:
    """Memory of a piece, and its names in the ledger: the part and the sum of each rank's share."""

    sums: Tensor
    inbox: Tensor
    parts_of: list[Buffer]
    sums_of: list[Buffer]
    sums_shot: int = 0
    """The newest shot by which this rank has sent its sums out of it."""
