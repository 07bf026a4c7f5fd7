"""Sums over the ranks of a stage on GPUs, by copies between cards while the cards compute.

A large sum goes in pieces of rows. While the device computes a piece, copy engines exchange others, and
the product behind a sum begins with its first piece. Copies take no multiprocessor; a kernel that
exchanges data could not begin before the running product ends.

A piece goes in two shots. Each rank has a share of its rows, as many as the others:

1. Each other rank copies its part of that share into an inbox here, and raises its flag.
2. The compute stream waits for all of them, and adds the parts in rank order
   (`ppkernels.gpu.part_sums`). The sum is copied into all ranks' sums, and the flag is raised again.

For each pair of ranks there is a page of flags, as on an edge (`Signals`). A flag has the number of the
newest shot; all ranks launch the same shots in the same order.

Inbox and sums have a slot for each piece. Their next use is that piece of the next sum. A rank sends
its parts of that once it has all sums of this one, so their parts are read. It sends sums of that once
it has all parts of it, which ranks send behind their reads of this sum. So no flag has to say that a
slot is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppkernels.gpu.part_sums import sum_parts
from ppkernels.norms import Norm
from torch import Tensor

from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda.peer_memory import SharedMemory
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.backends.cuda.streams import Event, Stream
from ppengine.stage.edge_flags import Flag
from ppengine.stage.edge_offers import Offer
from ppengine.stage.ledger.actors import Buffer

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings

PIECES, FEW_PIECES, MANY_ROWS = 4, 2, 4096
"""Pieces of a sum, and of one with fewer rows than `MANY_ROWS` for each rank.

The launches of a piece take the same time of the host with any number of ranks, and its product takes less with more.
"""
LEAST_ROWS, LEAST_BYTES = 1024, 2**24
"""Sums with fewer rows for each rank, or smaller ones, go at once.

All steps that may be a graph have fewer rows: a graph and a step that is launched kernel by kernel must exchange in the
same way, because ranks may differ in that.
"""
_FEW_BYTES = 2**25
"""Room for a piece, if half of a sum takes as much."""
_TILE, _ROW_BYTES = 128, 2**16
"""All pieces but the last have a multiple of these rows, as tiles of products have; bytes of the longest row."""
_ROUND = 2**21
"""Rooms are a multiple of it."""


class PeerCopies:
    """The copies of one rank. Stream and memory are for life, pages of flags and addresses for a generation.

    Before the ranks have met nothing is copied, and a sum has the inbox as it is: boot needs shapes, time and memory.
    """

    def __init__(
        self, driver: Driver, uuid: str, place: Place, size: int, folder: Path, compute: Stream, part_bytes: int
    ) -> None:
        """Make memory for sums of at most `part_bytes`. Raises DriverError."""
        self._driver, self._place, self._folder, self._compute, self._size = driver, place, folder, compute, size
        self._piece_bytes = _round(max(part_bytes // PIECES, min(part_bytes // FEW_PIECES, _FEW_BYTES)) + 1)
        self._share_bytes = _round(self._piece_bytes // size + _ROW_BYTES)
        self._slot_bytes = self._piece_bytes + (size - 1) * self._share_bytes
        self._memory = SharedMemory(driver, uuid, self._slot_bytes, PIECES)
        self.stream = Stream("sums of ranks", driver.device, purpose="ranks", order=compute.order)
        self._slots = [self._slot(number) for number in range(PIECES)]
        self._peers = [_Peer((place.rank + turn) % size) for turn in range(1, size)]
        self._shot = self._piece = 0
        self._asked = False
        """Whether sums of the newest pieces were asked for."""
        self._parts: deque[CopiedSum] = deque()
        """Pieces of which parts are sent and not added, in order."""

    def _slot(self, number: int) -> _Slot:
        memory, buffer, others = self._memory.slot(number), self._compute.buffer, self._size - 1
        return _Slot(
            sums=memory[: self._piece_bytes],
            inbox=memory[self._piece_bytes : self._slot_bytes].view(others, self._share_bytes),
            parts_of=[buffer(f"part of rank {rank}, piece {number}") for rank in range(self._size)],
            sums_of=[buffer(f"sum of rank {rank}, piece {number}") for rank in range(self._size)],
        )

    @property
    def offer(self) -> Offer:
        """The offer by which another rank opens the memory. Raises RefusedError."""
        return self._memory.offer

    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        """Return the rows of each piece of a sum; one piece if it is none for copies."""
        if rows >= LEAST_ROWS * self._size and rows * row_bytes >= LEAST_BYTES:
            for count in (PIECES,) if rows >= MANY_ROWS * self._size else (FEW_PIECES, PIECES):
                each = -(-rows // count // _TILE) * _TILE
                if each * row_bytes <= self._piece_bytes:
                    return [slice(first, min(first + each, rows)) for first in range(0, rows, each)]
        return [slice(0, rows)]

    def begin(self) -> None:
        """Make the pages of flags of a new generation: the lower of two ranks does. Raises OSError, DriverError."""
        self._shot = self._piece = 0
        self._parts.clear()
        for slot in self._slots:
            slot.sums_shot = 0
            # Accesses of the older generation are over.
            for buffer in (*slot.parts_of, *slot.sums_of):
                buffer.forget()
        for peer in self._peers:
            if self._place.rank < peer.rank:
                peer.signals = self._signals(peer, create=True)

    def open(self, memories: dict[int, int]) -> None:
        """Take the addresses of the other ranks' memories, once all have begun.

        Raises OSError, ValueError, DriverError.
        """
        for peer in self._peers:
            if self._place.rank > peer.rank:
                peer.signals = self._signals(peer, create=False)
            peer.memory = memories[peer.rank]

    def _signals(self, peer: _Peer, create: bool) -> Signals:
        low, high = sorted((self._place.rank, peer.rank))
        page = self._folder / f"g{self._place.stage}.{low}.{high}.words"
        return Signals(self._driver, page, create, self._compute, f"rank {peer.rank}", self.stream)

    def send(self, part: Tensor) -> CopiedSum:
        """Launch the copies of shares of `part` [T, W], a contiguous piece, behind the product that makes it."""
        if part.nbytes > self._piece_bytes:
            raise ValueError(f"a piece of {part.nbytes} bytes, there is room for {self._piece_bytes}")
        self._piece = number = (self._piece + 1) % PIECES
        piece = CopiedSum(self, part, number)
        slot, own = self._slots[number], self._place.rank
        self._compute.declare("part of a sum", writes=(slot.parts_of[own],))
        self.stream.wait(self._compute.record("part made"))
        with self.stream.doing("parts", reads=(slot.parts_of[own],)), self.stream.working():
            for peer in self._peers:
                row = own - (own > peer.rank)
                self._copy(peer, number, self._piece_bytes + row * self._share_bytes, part[piece.share(peer.rank)])
        piece.parts_shot, piece.sent = self._raise_flags(), self.stream.record("parts sent")
        # Those of the piece before have come meanwhile.
        self._add_parts()
        self._parts.append(piece)
        self._asked = False
        return piece

    def sums(self, piece: CopiedSum) -> Tensor:
        """Let the compute stream wait for the sums of a piece; return them [T, W], good until the next sum."""
        # The parts of the last piece are added behind the product that the first one is for.
        while self._parts and (self._asked or self._parts[0] is piece):
            self._add_parts()
        self._asked = True
        slot = self._slots[piece.number]
        self._await(piece.sums_shot, "sums", slot.sums_of, behind=piece.parts_shot)
        self._compute.declare("sums", slot.sums_of)
        return piece.of(slot.sums)

    def _add_parts(self) -> None:
        """Add the parts of this rank's share of the oldest piece that waits for that, and send the sums."""
        if not self._parts:
            return
        piece, own = self._parts.popleft(), self._place.rank
        slot, share = self._slots[piece.number], piece.share(own)
        assert piece.part is not None and piece.sent is not None
        self._await(piece.parts_shot, "parts", slot.parts_of, behind=slot.sums_shot)
        # Behind this the allocator may give the part's memory to another tensor: the same as a write.
        self._compute.wait(piece.sent)
        self._compute.declare("sum of parts", slot.parts_of, (slot.sums_of[own], slot.parts_of[own]))
        sums = piece.of(slot.sums)[share]
        if len(sums):
            sum_parts(piece.part[share], slot.inbox.view(sums.dtype), own, sums)
        piece.part = None
        self.stream.wait(self._compute.record("share summed"))
        with self.stream.doing("sums", reads=(slot.sums_of[own],)), self.stream.working():
            for peer in self._peers:
                self._copy(peer, piece.number, share.start * piece.row_bytes, sums)
        piece.sums_shot = slot.sums_shot = self._raise_flags()

    def _copy(self, peer: _Peer, slot: int, at: int, rows: Tensor) -> None:
        if peer.memory and rows.nbytes:
            target = peer.memory + slot * self._slot_bytes + at
            self._driver.copy(target, rows.data_ptr(), rows.nbytes, self.stream.handle)

    def _raise_flags(self) -> int:
        """Raise the flag of the next shot at all other ranks; return its number."""
        self._shot += 1
        for peer in self._peers:
            if peer.signals is not None:
                peer.signals.write(self._flag(peer, theirs=True), self._shot)
        return self._shot

    def _await(self, shot: int, what: str, written: Sequence[Buffer], behind: int) -> None:
        """Let the compute stream wait for a shot of all other ranks, who had shot `behind` of this one before."""
        for peer in self._peers:
            if peer.signals is not None:
                peer.signals.peer_does(shot, what, behind, writes=(written[peer.rank],))
                peer.signals.wait(self._flag(peer, theirs=False), shot)

    def _flag(self, peer: _Peer, theirs: bool) -> Flag:
        """Return the flag of the pair's page that the other rank waits for, or this one."""
        return Flag.FILLED if (self._place.rank < peer.rank) != theirs else Flag.READ

    def sent(self) -> dict[int, tuple[int, int]]:
        """Return by rank the numbers of the newest copies that it and this rank have sent; any thread may call it."""
        found = {}
        for peer in self._peers:
            values = {} if (signals := peer.signals) is None else signals.values()
            if values:
                found[peer.rank] = values[self._flag(peer, theirs=False)], values[self._flag(peer, theirs=True)]
        return found

    def release(self) -> None:
        """Let the compute stream run on; any thread may call it."""
        for peer in self._peers:
            if (signals := peer.signals) is not None:
                signals.release(self._flag(peer, theirs=False))

    def close(self) -> None:
        """Leave the generation. No stream may be using it."""
        for peer in self._peers:
            signals, peer.signals, peer.memory = peer.signals, None, 0
            if signals is not None:
                signals.close()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size


class CopiedSum:
    """A piece of a sum on its way: a `ppengine.models.group.Sum`."""

    __slots__ = ("_copies", "_dtype", "_shape", "number", "part", "parts_shot", "sent", "sums_shot")

    def __init__(self, copies: PeerCopies, part: Tensor, number: int) -> None:
        """`number`: its slot."""
        self._copies, self._shape, self._dtype, self.number = copies, part.shape, part.dtype, number
        self.part: Tensor | None = part
        """This rank's part, until the sum of its share is launched."""
        self.sent: Event | None = None
        """Behind the copies of it."""
        self.parts_shot = self.sums_shot = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._shape[1] * self._dtype.itemsize

    def share(self, rank: int) -> slice:
        """Return the rows that `rank` sums."""
        each = -(-self._shape[0] // self._copies.size)
        return slice(min(rank * each, self._shape[0]), min((rank + 1) * each, self._shape[0]))

    def of(self, memory: Tensor) -> Tensor:
        """Return memory, uint8, as the piece [T, W]."""
        return memory[: self._shape[0] * self.row_bytes].view(self._dtype).view(self._shape)

    def add_to(self, residual: Tensor) -> None:
        """See `Sum`."""
        residual.add_(self._copies.sums(self))

    def add_norm(self, residual: Tensor, norm: Norm) -> Tensor:
        """See `Sum`."""
        return norm.of_sum(residual, self._copies.sums(self))


@dataclass(slots=True)
class _Slot:
    """Memory of a piece, and its names in the ledger: the part and the sum of each rank's share."""

    sums: Tensor
    inbox: Tensor
    parts_of: list[Buffer]
    sums_of: list[Buffer]
    sums_shot: int = 0
    """The newest shot by which this rank has sent its sums out of it."""


@dataclass(slots=True)
class _Peer:
    """Another rank."""

    rank: int
    signals: Signals | None = None
    memory: int = 0
    """Its address; 0: the ranks have not met."""


def _round(size: int) -> int:
    return -(-size // _ROUND) * _ROUND
