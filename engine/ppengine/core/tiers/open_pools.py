"""The slots of one generation, as finder, fetcher and writer use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppengine.core.scheduler import Scheduler
from ppengine.core.scheduler.cache_copies import CacheCopies
from ppengine.core.scheduler.host_cache import HostCache
from ppengine.core.tiers.chunks import Chunk, chunks_of
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import ToStore

FIRST = Place(0, 0)
"""The place whose store knows the markers."""
Send = Callable[[Place, ToStore], None]


@dataclass(frozen=True, slots=True, eq=False)
class OpenPools:
    """Scheduler and host cache, and the sizes of all places."""

    scheduler: Scheduler
    copies: CacheCopies
    """Copies from and to the host cache."""
    generation: int
    chunk_blocks: int
    """Blocks of a chunk."""
    slot_bytes: dict[Place, int]
    """Bytes of a slot, by place in the order of `Groups`."""

    @property
    def host(self) -> HostCache:
        """The host cache."""
        return self.copies.cache

    @property
    def places(self) -> list[Place]:
        """All places."""
        return list(self.slot_bytes)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.chunk_blocks * self.scheduler.blocks.block_size

    def size_of(self, chunks: int) -> int:
        """Return the bytes of chunks at the place with the most."""
        return chunks * self.chunk_blocks * max(self.slot_bytes.values())

    def share(self, place: Place) -> float:
        """Return the share of a place in the bytes of a slot."""
        return self.slot_bytes[place] / sum(self.slot_bytes.values())

    def present(self, digests: Sequence[bytes]) -> tuple[int, list[int]]:
        """Return the length of the prefix that is on the device or in host slots, and those slots."""
        blocks = self.scheduler.blocks
        first = len(blocks.device.lookup(digests)) if blocks.prefix_caching else 0
        slots = self.host.lookup(digests[first:])
        return first + len(slots), slots

    def chunks_of(self, digests: Sequence[bytes]) -> list[Chunk]:
        """Return the whole chunks of a prefix of blocks."""
        return chunks_of(digests, self.chunk_blocks)
