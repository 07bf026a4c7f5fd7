"""The index of the host cache: which host slot holds which block, and which slots must stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ppengine.core.scheduler.block_pool import HostBlockPool


class HostCache:
    """Host slots found by the digest of their block. Swaps take from the same pool and come first.

    A slot is empty, used by a swap, reserved, cached, or forgotten while pinned. Reserved ones are
    written by a copy or a fetch: `enter` or `release` ends that. A cached slot without pins is
    spare: the pool may take it. A pinned one is read or will be, and keeps its content.

    A new generation forgets all content. Slots that may still be written or read stay out of use:
    reserved slots are in quarantine until `release` or `enter`, pinned ones until their last
    `unpin`.
    """

    def __init__(self, pool: HostBlockPool) -> None:
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Called with a cached slot and its digest before the slot is reused for something else."""
        self.evicted_total = 0
        """Cached slots that were reused."""
        self._pool = pool
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}
        self._reserved: set[int] = set()
        self._quarantined: set[int] = set()
        """Those of the reserved ones whose content will be of no use."""
        self._forgotten: set[int] = set()
        """Pinned slots whose content a new generation made void."""
        pool.on_reuse = self._evict

    @property
    def cached(self) -> int:
        """Number of slots that are found by their digest."""
        return len(self._digests)

    @property
    def moving(self) -> int:
        """Number of slots that are reserved, or pinned and forgotten."""
        return len(self._reserved) + len(self._forgotten)

    @property
    def quarantined(self) -> int:
        """Number of reserved slots whose content will be of no use."""
        return len(self._quarantined)

    @property
    def room(self) -> int:
        """Number of slots that can be reserved: empty ones, and cached ones without pins."""
        return self._pool.free

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._by_digest

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """Return the slots of the longest known prefix of `digests`; pin them before anything else."""
        found = []
        for digest in digests:
            slot = self._by_digest.get(digest)
            if slot is None:
                break
            found.append(slot)
        return found

    def oldest(self, count: int) -> list[tuple[int, bytes]]:
        """Return the next `count` slots that would be evicted, with their digests."""
        slots = (slot for slot, _ in zip(self._pool.spare, range(count), strict=False))
        return [(slot, self._digests[slot]) for slot in slots]

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note a use of a prefix: its end is evicted before its beginning."""
        spare = self._pool.spare
        for digest in reversed(digests):
            slot = self._by_digest.get(digest)
            if slot is not None and slot in spare:
                spare.move_to_end(slot)

    # --- filling --------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> list[int] | None:
        """Return `count` slots to be written, empty ones first, then evicted ones; None if there are too few."""
        if count > self._pool.free:
            return None
        slots = self._pool.take(count)
        self._reserved.update(slots)
        return slots

    def enter(self, slot: int, digest: bytes) -> bool:
        """Make a reserved slot found by `digest`; return whether it is.

        It is freed in place of that if another slot has the digest, or if it is in quarantine.
        Raises ValueError for a slot that is not reserved.
        """
        if slot in self._quarantined or digest in self._by_digest:
            self.release([slot])
            return False
        self._unreserve(slot)
        self._digests[slot] = digest
        self._by_digest[digest] = slot
        self._pool.spare[slot] = None
        return True

    def release(self, slots: Iterable[int]) -> None:
        """Free reserved slots unfilled. Nothing may write into them any more. Raises ValueError for others."""
        for slot in slots:
            self._unreserve(slot)
            self._pool.give(slot)

    def quarantine(self, slots: Iterable[int]) -> None:
        """Note that reserved slots will not be used, though something may still write into them.

        They stay reserved until `release`, also over a new generation. Raises ValueError for others.
        """
        for slot in slots:
            if slot not in self._reserved:
                raise ValueError(f"host slot {slot} is not reserved")
            self._quarantined.add(slot)

    def _unreserve(self, slot: int) -> None:
        if slot not in self._reserved:
            raise ValueError(f"host slot {slot} is not reserved")
        self._reserved.discard(slot)
        self._quarantined.discard(slot)

    # --- reading --------------------------------------------------------------------------------------------

    def pin(self, slots: Iterable[int]) -> None:
        """Keep cached slots as they are, once for each call. Raises ValueError for a slot that is not cached."""
        for slot in slots:
            if slot not in self._digests:
                raise ValueError(f"host slot {slot} is not cached")
            self._pins[slot] = self._pins.get(slot, 0) + 1
            self._pool.spare.pop(slot, None)

    def unpin(self, slots: Sequence[int]) -> None:
        """Drop one pin of each slot of a prefix; its beginning then counts as used last.

        Raises ValueError for a slot without a pin.
        """
        for slot in reversed(slots):
            left = self._pins.get(slot, 0) - 1
            if left < 0:
                raise ValueError(f"host slot {slot} is not pinned")
            if left:
                self._pins[slot] = left
                continue
            del self._pins[slot]
            if slot in self._digests:
                self._pool.spare[slot] = None
            else:
                self._forgotten.discard(slot)
                self._pool.give(slot)

    # --- losing ---------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Forget all content, with a new generation. Reserved and pinned slots stay out of use."""
        for slot in self._digests:
            if slot in self._pins:
                self._forgotten.add(slot)
            else:
                self._pool.give(slot)
        self._pool.spare.clear()
        self._digests.clear()
        self._by_digest.clear()
        self._quarantined |= self._reserved

    def _evict(self, slot: int) -> None:
        digest = self._digests[slot]
        if self.on_evict is not None:
            self.on_evict(slot, digest)
        del self._digests[slot], self._by_digest[digest]
        self.evicted_total += 1
