"""Ids of device and host blocks: who may take which. The memory itself belongs to the stages.

Block 0 is the null block: always mapped, never given to anyone, so that padding has somewhere to point.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

STATES = ("free", "null", "cached", "used", "shared")
"""What a block can be, the fuller the later; withheld ones are free."""
_FREE, _NULL, _CACHED, _USED, _SHARED = range(len(STATES))


class BlockPool:
    """Device blocks with reference counts and a prefix cache.

    A block is free, cached (full, referenced by nobody, findable by its digest), used (referenced) or, while a
    shrink is under way, withheld: free, but at or beyond `limit`, so that nobody gets it any more.
    Always: free + cached + used + withheld + 1 (null) = `size`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.limit = size
        self.reserve = 0
        """Blocks that a shrink needs for what it still has to move; others do not get them."""
        self.used = 0
        self.withheld = 0
        self.tail_live = 0
        """Used blocks at or beyond `limit`."""
        self._refs = [0] * size
        self._states = bytearray([_NULL, *bytes(size - 1)])
        self._digests: list[bytes | None] = [None] * size
        self._free: list[int] = []
        """A heap of the free ones below `_fresh`."""
        self._fresh = 1
        """From here on no block has ever been given away: those below `limit` are free, and nobody has to list them."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._by_digest: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that hold nothing and may be taken."""
        return len(self._free) + max(0, self.limit - self._fresh)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and the prefix cache could still find."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that an allocation could take now: free, or cached and evictable, less the reserve."""
        return self.free + len(self._idle) - self.reserve

    @property
    def states(self) -> bytes:
        """What each block is, by its index in `STATES`. Kept up to date: to look at it must cost next to nothing."""
        return bytes(self._states)

    def references(self, block: int) -> int:
        """Return how many tables and copies use `block`."""
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        """Return whether `block` is in the prefix cache and used by nobody."""
        return block in self._idle

    def allocate(self) -> int:
        """Return a block with one reference: the lowest free one, else the least recently used cached one.

        The caller has checked `available`. Raises IndexError when there is none at all.
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
        if self._refs[block] == 0:
            del self._idle[block]
            self.used += 1
            if block >= self.limit:
                self.tail_live += 1
        self._refs[block] += 1
        self._states[block] = _USED if self._refs[block] == 1 else _SHARED

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each. Give a table from its end, so that its tail is evicted before its head."""
        for block in blocks:
            left = self._refs[block] - 1
            if left < 0 or block == 0:
                raise ValueError(f"block {block} is released and nobody uses it")
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
        """Return the blocks of the longest known prefix of `digests`; nothing changes."""
        found = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None or block >= self.limit:
                break
            found.append(block)
        return found

    def enter(self, block: int, digest: bytes) -> None:
        """Make a full block findable. A second block with the same content stays private: tables never change."""
        if digest not in self._by_digest and self._digests[block] is None and block < self.limit:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def drop_cache(self) -> int:
        """Forget every cached block that nobody uses; return how many."""
        count = len(self._idle)
        for block in self._idle:
            self._forget(block)
            self._states[block] = _FREE
            heapq.heappush(self._free, block)
        self._idle.clear()
        return count

    # --- size -----------------------------------------------------------------------------------------------

    def set_limit(self, limit: int) -> int:
        """Give nothing at or beyond `limit` any more (or again); return how many cached blocks were dropped.

        It takes as long as what changes sides has blocks that were in use at some time.
        """
        dropped = []
        if limit < self.limit:
            dropped = [block for block in self._given(limit) if block in self._idle]
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
        """Make the pool `size` blocks. Raises ValueError while a block that would go is used."""
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

    def _given(self, first: int) -> range:
        """Return the blocks from `first` on that have been given away at some time."""
        return range(first, self._fresh)

    def relocate(self, block: int, owners: int) -> int:
        """Give `owners` references of `block`, and its digest, to a low block; return that one.

        The old block keeps one reference for the copy; the caller releases it once the copy has retired.
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
        """Return how many blocks at or beyond `limit` are free (withheld among them) and cached."""
        first = max(limit, 1)
        cached = sum(map(self._idle.__contains__, self._given(first)))
        used = sum(map(bool, self._refs[first : self._fresh]))
        return max(0, self.size - first) - used - cached, cached

    def check(self, expected: dict[int, int]) -> None:
        """Raise AssertionError unless the references are `expected` and every count and index agrees."""
        refs = {block: count for block, count in enumerate(self._refs) if count}
        _require(refs == expected, f"references {_differ(refs, expected)}")
        _require(self.used == len(refs), f"used is {self.used}, {len(refs)} blocks have references")
        _require(not any(self._refs[self._fresh :]), "a block is used that was never given away")
        free = {*self._free, *range(self._fresh, self.limit)}
        _require(len(free) == self.free, "a block is free twice")
        _require(0 not in free and 0 not in refs and 0 not in self._idle, "the null block was given away")
        _require(not free & refs.keys() and not free & self._idle.keys(), "a free block is used or cached")
        _require(not self._idle.keys() & refs.keys(), "a cached block is used")
        _require(all(block < self.limit for block in free | self._idle.keys()), "a tail block can be taken")
        total = len(free) + len(self._idle) + len(refs) + self.withheld + 1
        _require(total == self.size, f"free, cached, used, withheld and null are {total} of {self.size} blocks")
        _require(self.states == bytes(map(self._state, range(self.size))), "states do not agree with references")
        _require(self.tail_live == sum(1 for block in refs if block >= self.limit), "tail_live is wrong")
        named = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        _require(named == self._by_digest, "digests and their index differ")
        _require(all(self._digests[block] is not None for block in self._idle), "a cached block has no digest")

    def _state(self, block: int) -> int:
        if block == 0:
            return _NULL
        return min(_USED + self._refs[block] - 1, _SHARED) if self._refs[block] else _CACHED * (block in self._idle)


class HostPool:
    """Host blocks of the swap pool: the same ids on every stage, lowest first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that may be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that hold or will hold a swapped request."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks. The caller has checked `free`; raises IndexError when they are not there."""
        if count > len(self._free):
            raise IndexError(f"{count} host blocks are needed, {len(self._free)} are free")
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises ValueError for one that is not taken."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"host block {block} is released and nobody uses it")
            self._used.discard(block)
            heapq.heappush(self._free, block)

    def check(self, expected: list[int]) -> None:
        """Raise AssertionError unless exactly `expected` are taken, each once."""
        _require(sorted(expected) == sorted(self._used), f"host blocks {sorted(self._used)}, owned {sorted(expected)}")
        _require(len(self._free) + len(self._used) == self.size, "host blocks were lost or doubled")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def _differ(found: dict[int, int], expected: dict[int, int]) -> str:
    blocks = sorted(block for block in found.keys() | expected.keys() if found.get(block) != expected.get(block))
    return ", ".join(f"block {b}: {found.get(b, 0)}, expected {expected.get(b, 0)}" for b in blocks[:8])
