"""The buffer of one thread. A shard is checked in it before it is copied to slots."""

from __future__ import annotations

import mmap

from ppengine.store.shard import pages


class Bounce:
    """Memory that begins at a page and grows to the largest shard."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")

    def view(self, size: int) -> memoryview:
        """Return `size` bytes; those of an earlier call are over."""
        if self._map is None or len(self._map) < size:
            # Views of the older map keep it for as long as they are.
            self._map = mmap.mmap(-1, pages(max(1, size)))
            self._view = memoryview(self._map)
        return self._view[:size]
