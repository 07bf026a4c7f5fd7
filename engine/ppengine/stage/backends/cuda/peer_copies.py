"""Sums over the ranks of a stage on GPUs, by copies between cards while the cards compute.

A large sum goes in two pieces. While the device computes the second, copy engines bring the first to
the other ranks, and so on: the products behind a sum begin with its first piece. Copies take no
multiprocessor; a kernel that exchanges data could not begin before the running product ends.

For each pair of ranks there is a page of flags, as on an edge (`Signals`). A rank copies its part of
piece n into an inbox of each other rank, and writes n into its flag there. The other's compute stream
waits for n, then adds all parts in rank order (`ppkernels.gpu.part_sums`).

An inbox has `SLOTS` slots. Piece n goes into slot n modulo SLOTS, once this rank has waited for all
pieces of the sum before. The others sent those behind their reads of the sum before that. So the piece
that is written over has been read, and no flag has to say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppkernels.gpu.collectives import NormOf
from ppkernels.gpu.part_sums import add_parts, add_parts_norm
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

PIECES = 2
SLOTS = 2 * PIECES
LEAST_ROWS, LEAST_BYTES = 2048, 2**24
"""Smaller sums go at once. All steps that may be a graph have fewer rows: a graph and a step that is launched kernel by
kernel must exchange in the same way, because ranks may differ in that."""
MOST_BYTES = 2**26
"""Largest piece."""
_TILE, _STEP = 128, 2**20
"""The first piece has a multiple of these rows, as tiles of products have; its room is a multiple of these bytes."""


class PeerCopies:
    """The copies of one rank. Streams and inboxes are for life, pages of flags and opened memory for a generation.

    Before the ranks have met nothing is copied, and a sum adds the inbox as it is: boot needs shapes, time and memory.
    """

    def __init__(
        self, driver: Driver, uuid: str, place: Place, size: int, folder: Path, compute: Stream, part_bytes: int
    ) -> None:
        """Make inboxes for sums of at most `part_bytes`, or twice `MOST_BYTES`. Raises DriverError."""
        self._driver, self._place, self._folder, self._compute = driver, place, folder, compute
        self._piece_bytes = min(-(-part_bytes // PIECES // _STEP) * _STEP, MOST_BYTES)
        self._memory = SharedMemory(driver, uuid, (size - 1) * self._piece_bytes, SLOTS)
        self._slots = [_Slot(self._memory.slot(slot), size - 1, compute, slot) for slot in range(SLOTS)]
        self._lanes = []
        for turn in range(1, size):
            peer = (place.rank + turn) % size
            stream = Stream(f"parts to rank {peer}", driver.device, purpose="ranks", order=compute.order)
            parts = [compute.buffer(f"part of rank {peer}, slot {slot}", self._piece_bytes) for slot in range(SLOTS)]
            self._lanes.append(_Lane(peer, stream, parts))
        self._number = 0

    @property
    def offer(self) -> Offer:
        """The offer by which another rank opens the inboxes. Raises RefusedError."""
        return self._memory.offer

    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        """Return the rows of each piece of a sum; one piece if it is none for copies."""
        first = -(-rows // PIECES // _TILE) * _TILE
        if rows < LEAST_ROWS or rows * row_bytes < LEAST_BYTES or first * row_bytes > self._piece_bytes:
            return [slice(0, rows)]
        return [slice(0, first), slice(first, rows)]

    def begin(self) -> None:
        """Make the pages of flags of a new generation: the lower of two ranks does. Raises OSError, DriverError."""
        self._number = 0
        for lane in self._lanes:
            # Accesses of the older generation are over.
            for part in lane.parts:
                part.forget()
            if self._place.rank < lane.peer:
                lane.signals = self._signals(lane, create=True)

    def open(self, inboxes: dict[int, int]) -> None:
        """Take the addresses of the other ranks' inboxes, once all have begun.

        Raises OSError, ValueError, DriverError.
        """
        for lane in self._lanes:
            if self._place.rank > lane.peer:
                lane.signals = self._signals(lane, create=False)
            lane.inbox = inboxes[lane.peer]

    def _signals(self, lane: _Lane, create: bool) -> Signals:
        low, high = sorted((self._place.rank, lane.peer))
        page = self._folder / f"g{self._place.stage}.{low}.{high}.words"
        return Signals(self._driver, page, create, self._compute, f"rank {lane.peer}", lane.stream)

    def send(self, part: Tensor) -> CopiedSum:
        """Launch the copies of `part` [T, W], a contiguous piece, behind the product that makes it."""
        if part.nbytes > self._piece_bytes:
            raise ValueError(f"a piece of {part.nbytes} bytes, an inbox takes {self._piece_bytes} at most")
        self._number = number = self._number + 1
        slot, lanes = self._slots[number % SLOTS], [lane for lane in self._lanes if lane.inbox]
        self._compute.declare("part of a sum", writes=(slot.part,))
        made = self._compute.record("part made")
        sent = [self._copy(lane, number, slot, part, made) for lane in lanes]
        return CopiedSum(self, number, part, sent)

    def _copy(self, lane: _Lane, number: int, slot: _Slot, part: Tensor, made: Event) -> Event:
        assert lane.signals is not None
        lane.stream.wait(made)
        row = self._place.rank - (self._place.rank > lane.peer)
        at = (number % SLOTS * len(self._lanes) + row) * self._piece_bytes
        with lane.stream.doing("part", reads=(slot.part,)):
            self._driver.copy(lane.inbox + at, part.data_ptr(), part.nbytes, lane.stream.handle)
        lane.signals.write(self._flag(lane, theirs=True), number)
        return lane.stream.record("part sent")

    def take(self, number: int, sent: list[Event]) -> Tensor:
        """Let the compute stream wait for piece `number` of the others; return them, uint8 [others, piece_bytes]."""
        slot = self._slots[number % SLOTS]
        for lane in self._lanes:
            if lane.signals is not None:
                # A rank sends this behind its reads of the sum before the last, and we have had that of it.
                lane.signals.peer_does(number, "part", number - PIECES, writes=(lane.parts[number % SLOTS],))
                lane.signals.wait(self._flag(lane, theirs=False), number)
        for event in sent:
            self._compute.wait(event)
        # Behind the sum the allocator may give the part's memory to another tensor: the same as a write.
        self._compute.declare("sum of parts", [lane.parts[number % SLOTS] for lane in self._lanes], (slot.part,))
        return slot.values

    def _flag(self, lane: _Lane, theirs: bool) -> Flag:
        """Return the flag of the pair's page that the other rank waits for, or this one."""
        return Flag.FILLED if (self._place.rank < lane.peer) != theirs else Flag.READ

    @property
    def rank(self) -> int:
        """This rank."""
        return self._place.rank

    def release(self) -> None:
        """Let the compute stream run on; any thread may call it."""
        for lane in self._lanes:
            if (signals := lane.signals) is not None:
                signals.release(self._flag(lane, theirs=False))

    def close(self) -> None:
        """Leave the generation. No stream may be using it."""
        for lane in self._lanes:
            signals, lane.signals, lane.inbox = lane.signals, None, 0
            if signals is not None:
                signals.close()


class _Slot:
    """A slot of the inbox, and the ledger's name of the part that is sent meanwhile."""

    def __init__(self, memory: Tensor, others: int, compute: Stream, number: int) -> None:
        self.values = memory.view(others, -1)
        self.part = compute.buffer(f"own part, slot {number}", memory.nbytes // others)


@dataclass(slots=True)
class _Lane:
    """The way to another rank."""

    peer: int
    stream: Stream
    parts: list[Buffer]
    """The ledger's names of its slots here."""
    signals: Signals | None = None
    inbox: int = 0
    """Its address; 0: the ranks have not met."""


@dataclass(frozen=True, slots=True)
class CopiedSum:
    """A piece of a sum, the parts of which are on their way: a `ppengine.models.group.Sum`."""

    copies: PeerCopies
    number: int
    part: Tensor
    sent: list[Event]

    def add_to(self, residual: Tensor) -> None:
        """See `Sum`."""
        add_parts(self.part, self._inbox(), self.copies.rank, residual)

    def add_norm(self, residual: Tensor, norm: Norm) -> Tensor:
        """See `Sum`."""
        parameters = NormOf(norm.weight, norm.bias, norm.eps, norm.centred)
        return add_parts_norm(self.part, self._inbox(), self.copies.rank, residual, parameters)

    def _inbox(self) -> Tensor:
        return self.copies.take(self.number, self.sent).view(self.part.dtype)
