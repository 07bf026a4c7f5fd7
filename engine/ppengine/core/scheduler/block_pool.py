"""Ids of device and host blocks: which are free. The stages own the memory.

Block 0 is the null block: always mapped and never allocated, so that padding can point to it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

STATES = ("free", "null", "cached", "used", "shared")
"""States of a block, from empty to full; withheld blocks are `free`."""
_FREE, _NULL, _CACHED, _USED, _SHARED = range(len(STATES))


class BlockPool:
    """Device blocks with reference counts and a prefix cache.

    A block is free, cached (full, without references, found by its digest), used (referenced) or
    withheld. During a shrink, withheld blocks are free but at or beyond `limit`, so they are not
    allocated. Always: free + cached + used + withheld + 1 (null) = `size`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.limit = size
        self.reserve = 0
        """Blocks that a shrink keeps for its remaining moves."""
        self.used = 0
        self.withheld = 0
        self.tail_live = 0
        """Number of used blocks at or beyond `limit`."""
        self._refs = [0] * size
        self._states = bytearray([_NULL, *bytes(size - 1)])
        self._digests: list[bytes | None] = [None] * size
        self._free: list[int] = []
        """Heap of the free blocks below `_fresh`."""
        self._fresh = 1
        """First block that was never allocated; all from here to `limit` are free."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._by_digest: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Number of empty blocks that may be allocated."""
        return len(self._free) + max(0, self.limit - self._fresh)

    @property
    def cached(self) -> int:
        """Number of blocks without references that the prefix cache can find."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Number of blocks that an allocation could take now: free or cached, less the reserve."""
        return self.free + len(self._idle) - self.reserve

    @property
    def states(self) -> bytes:
        """State of each block, as an index into `STATES`; cheap to read."""
        return bytes(self._states)

    def references(self, block: int) -> int:
        """Return the number of tables and copies that use `block`."""
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        """Return whether `block` is in the prefix cache and has no references."""
        return block in self._idle

    def count_cached(self, blocks: list[int]) -> int:
        """Return the number of `blocks` for which `is_cached` holds."""
        return sum(map(self._idle.__contains__, blocks)) if self._idle else 0

    def allocate(self) -> int:
        """Return the lowest free block, otherwise the least recently used cached one.

        It has one reference. Raises IndexError if no block is free or cached; check `available`
        first.
        """
        if self._free:
            block = heapq.heappop(self._free)
        elif self._fresh < self.limit:
            block = self._fresh
            self._fresh += 1
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no device block is free or cached")
        self._refs[block] = 1
        self._states[block] = _USED
        self.used += 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        self.share_all((block,))

    def share_all(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of some used or cached blocks."""
        refs, states = self._refs, self._states
        for block in blocks:
            count = refs[block]
            refs[block] = count + 1
            if count:
                states[block] = _SHARED
                continue
            states[block] = _USED
            del self._idle[block]
            self.used += 1
            if block >= self.limit:
                self.tail_live += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each. Pass a table in reverse: the first is evicted first."""
        for block in blocks:
            left = self._refs[block] - 1
            if left < 0 or block == 0:
                raise ValueError(f"block {block} is released but has no references")
            self._refs[block] = left
            if left == 0:
                self.used -= 1
                self._retire(block)
            elif left == 1:
                self._states[block] = _USED

    def _retire(self, block: int) -> None:
        self._states[block] = _FREE
        if block >= self.limit:
            self._forget(block)
            self.withheld += 1
            self.tail_live -= 1
        elif self._digests[block] is not None:
            self._idle[block] = None
            self._states[block] = _CACHED
        else:
            heapq.heappush(self._free, block)

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            self._digests[block] = None
            del self._by_digest[digest]

    # --- prefix cache ---------------------------------------------------------------------------------------

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `digests`, without references."""
        found = []
        limit = self.limit
        for block in map(self._by_digest.get, digests):
            if block is None or block >= limit:
                break
            found.append(block)
        return found

    def find(self, digest: bytes) -> int | None:
        """Return the block that `lookup` would find for one digest."""
        block = self._by_digest.get(digest)
        return block if block is None or block < self.limit else None

    def enter(self, block: int, digest: bytes) -> None:
        """Enter a full block into the prefix cache, unless one has the same content."""
        if digest not in self._by_digest and self._digests[block] is None and block < self.limit:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def drop_cache(self) -> int:
        """Empty all cached blocks without references; return their number."""
        count = len(self._idle)
        for block in self._idle:
            self._forget(block)
            self._states[block] = _FREE
            heapq.heappush(self._free, block)
        self._idle.clear()
        return count

    # --- size -----------------------------------------------------------------------------------------------

    def set_limit(self, limit: int) -> int:
        """Allocate only blocks below `limit`; return the number of dropped cached blocks.

        It takes time in proportion to the blocks between both limits that were ever allocated.
        """
        dropped = []
        if limit < self.limit:
            dropped = [block for block in self._ever_allocated(limit) if block in self._idle]
            for block in dropped:
                del self._idle[block]
                self._forget(block)
                self._states[block] = _FREE
            self._free = [block for block in self._free if block < limit]
            heapq.heapify(self._free)
        for block in range(self.limit, min(limit, self._fresh)):
            if not self._refs[block]:
                heapq.heappush(self._free, block)
        self.limit = limit
        self.tail_live = sum(map(bool, self._refs[limit : self._fresh]))
        self.withheld = self.size - limit - self.tail_live
        return len(dropped)

    def resize(self, size: int) -> None:
        """Set the size of the pool. Raises ValueError while a block beyond it is used."""
        if any(self._refs[size:]):
            raise ValueError(f"{sum(map(bool, self._refs[size:]))} blocks at or beyond {size} are still used")
        if size < self.size:
            self.set_limit(min(size, self.limit))
            del self._refs[size:], self._digests[size:], self._states[size:]
            self._fresh = min(self._fresh, size)
        else:
            self._refs.extend([0] * (size - self.size))
            self._digests.extend([None] * (size - self.size))
            self._states.extend(bytes(size - self.size))
        self.size = size
        self.set_limit(size)

    def _ever_allocated(self, first: int) -> range:
        """Return the blocks from `first` on that were ever allocated."""
        return range(first, self._fresh)

    def relocate(self, block: int, owners: int) -> int:
        """Move `owners` references and the digest of `block` to a low one; return that one.

        The old block keeps one reference for the copy; the caller releases it when the copy has
        retired.
        """
        target = self.allocate()
        self._refs[target] = owners
        self._refs[block] += 1 - owners
        for moved in (target, block):
            self._states[moved] = _USED if self._refs[moved] == 1 else _SHARED
        digest = self._digests[block]
        if digest is not None:
            self._digests[block] = None
            self._digests[target] = digest
            self._by_digest[digest] = target
        return target

    def tail_counts(self, limit: int) -> tuple[int, int]:
        """Return the numbers of free (withheld included) and cached blocks at or beyond `limit`."""
        first = max(limit, 1)
        cached = sum(map(self._idle.__contains__, self._ever_allocated(first)))
        used = sum(map(bool, self._refs[first : self._fresh]))
        return max(0, self.size - first) - used - cached, cached


class HostBlockPool:
    """Ids of host blocks, the same on every stage: the lowest empty one first, then spare ones.

    Spare ones hold nothing that must stay; the host cache keeps them in order of their last use.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.spare: OrderedDict[int, None] = OrderedDict()
        """Blocks of the host cache that may be taken, the least recently used first."""
        self.on_reuse: Callable[[int], None] | None = None
        """Called with each spare block that is taken, before it is."""
        self._empty = list(range(size))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Number of blocks that may be allocated: empty and spare ones."""
        return len(self._empty) + len(self.spare)

    @property
    def used(self) -> int:
        """Number of blocks that hold or will hold a swapped request."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks for a swap. Raises IndexError if there are fewer; check `free` first."""
        taken = self.take(count)
        self._used.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Free blocks of a swap. Raises ValueError for one that is not allocated."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"host block {block} is released but not allocated")
            self._used.discard(block)
            self.give(block)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks without an owner. Raises IndexError if there are fewer."""
        if count > self.free:
            raise IndexError(f"{count} host blocks are needed, {self.free} are free")
        taken = [heapq.heappop(self._empty) for _ in range(min(count, len(self._empty)))]
        while len(taken) < count:
            block, _ = self.spare.popitem(last=False)
            if self.on_reuse is not None:
                self.on_reuse(block)
            taken.append(block)
        return taken

    def give(self, block: int) -> None:
        """Make a block empty that `take` returned."""
        heapq.heappush(self._empty, block)
