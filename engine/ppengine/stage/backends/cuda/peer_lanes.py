"""Memory, flags and a stream by which one rank of a stage brings data to the other ranks, with copy engines.

For each pair of ranks there is a page of flags, as on an edge (`Signals`). A shot is a copy, or none,
to each other rank, and a flag behind it that has the number of the shot. All ranks launch the same
shots in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda.peer_memory import SharedMemory
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.edge_flags import Flag
from ppengine.stage.edge_offers import Offer
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.wire import PeerLostError

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings


class PeerLanes:
    """One rank's side. Stream and memory are for life, pages of flags and addresses for a generation.

    Before the ranks have met nothing is copied, and nothing is waited for.
    """

    def __init__(self, driver: Driver, uuid: str, place: Place, size: int, folder: Path, compute: Stream) -> None:
        self.rank, self.size, self.compute = place.rank, size, compute
        self._driver, self._uuid, self._stage, self._folder = driver, uuid, place.stage, folder
        self.stream = Stream("sums of ranks", driver.device, purpose="ranks", order=compute.order)
        # Each rank begins with another one, so that none gets all copies at once.
        self._peers = [_Peer((place.rank + turn) % size) for turn in range(1, size)]
        self._shot = 0

    def allocate(self, slot_bytes: int, slots: int) -> list[Tensor]:
        """Return the memory that other ranks write to, once, as slots of uint8. Raises DriverError."""
        self._slot_bytes = slot_bytes
        self._memory = SharedMemory(self._driver, self._uuid, slot_bytes, slots)
        return [self._memory.slot(slot) for slot in range(slots)]

    @property
    def offer(self) -> Offer:
        """The offer by which another rank opens the memory. Raises RefusedError."""
        return self._memory.offer

    @property
    def others(self) -> list[int]:
        """The other ranks, in the order of the copies."""
        return [peer.rank for peer in self._peers]

    def begin(self) -> None:
        """Make the pages of flags of a new generation: the lower of two ranks does. Raises OSError, DriverError."""
        self._shot = 0
        for peer in self._peers:
            if self.rank < peer.rank:
                peer.signals = self._signals(peer, create=True)

    def open(self, memories: dict[int, int]) -> None:
        """Take the addresses of the other ranks' memories, once all have begun.

        Raises PeerLostError for a rank that has left since, OSError, ValueError, DriverError.
        """
        for peer in self._peers:
            if self.rank > peer.rank:
                try:
                    peer.signals = self._signals(peer, create=False)
                except FileNotFoundError:
                    text = f"lost stage {self._stage} rank {peer.rank}: its page of flags is gone"
                    raise PeerLostError(text, self._stage, peer.rank) from None
            peer.memory = memories[peer.rank]

    def _signals(self, peer: _Peer, create: bool) -> Signals:
        low, high = sorted((self.rank, peer.rank))
        page = self._folder / f"g{self._stage}.{low}.{high}.words"
        return Signals(self._driver, page, create, self.compute, f"rank {peer.rank}", self.stream)

    @property
    def next_shot(self) -> int:
        """The number of the next shot."""
        return self._shot + 1

    def shoot(self, what: str, slot: int, rows: dict[int, tuple[int, Tensor]], reads: Buffer) -> int:
        """Launch copies into `slot` of other ranks, by rank: where in it, and what; return the number of the shot."""
        with self.stream.doing(what, reads=(reads,)), self.stream.working():
            for peer in self._peers:
                if peer.memory and peer.rank in rows:
                    at, data = rows[peer.rank]
                    if size := data.nbytes:
                        target = peer.memory + slot * self._slot_bytes + at
                        self._driver.copy(target, data.data_ptr(), size, self.stream.handle)
        self._shot += 1
        for peer in self._peers:
            if peer.signals is not None:
                peer.signals.write(self._flag(peer, theirs=True), self._shot)
        return self._shot

    def await_shot(self, shot: int, what: str, written: Sequence[Buffer], behind: int) -> None:
        """Let the compute stream wait for a shot of all other ranks, who had shot `behind` of this one before.

        `written` has the ledger's name of what each rank writes, by rank.
        """
        for peer in self._peers:
            if peer.signals is not None:
                peer.signals.peer_does(shot, what, behind, writes=(written[peer.rank],))
                peer.signals.wait(self._flag(peer, theirs=False), shot)

    def _flag(self, peer: _Peer, theirs: bool) -> Flag:
        """Return the flag of the pair's page that the other rank waits for, or this one."""
        return Flag.FILLED if (self.rank < peer.rank) != theirs else Flag.READ

    def sent(self) -> dict[int, tuple[int, int]]:
        """Return by rank the numbers of the newest shots that it and this rank have sent; any thread may call it."""
        found = {}
        for peer in self._peers:
            values = {} if (signals := peer.signals) is None else signals.values()
            if values:
                found[peer.rank] = values[self._flag(peer, theirs=False)], values[self._flag(peer, theirs=True)]
        return found

    def releases(self) -> list[Callable[[], None]]:
        """Return calls that let the compute stream run on, as `RankGroup.releases` does."""
        signals = [(peer.signals, self._flag(peer, theirs=False)) for peer in self._peers]
        return [partial(ours.release, flag) for ours, flag in signals if ours is not None]

    def close(self) -> None:
        """Leave the generation. No stream may be using it."""
        for peer in self._peers:
            signals, peer.signals, peer.memory = peer.signals, None, 0
            if signals is not None:
                signals.close()


@dataclass(slots=True)
class _Peer:
    """Another rank."""

    rank: int
    signals: Signals | None = None
    memory: int = 0
    """Its address; 0: the ranks have not met."""
