"""The host slots of a stage, mapped into this process."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator, Sequence

from ppengine.protocol.store_messages import OpenPool


class SlotPool:
    """Memory that the stage owns. The stage may be gone: the memory stays until it is closed here."""

    def __init__(self, message: OpenPool) -> None:
        """Map it. Raises OSError, also for a descriptor that is no such memory."""
        self.generation, self.slots, self.slot_bytes = message.generation, message.slots, message.slot_bytes
        size = message.slots * message.slot_bytes
        descriptor = os.open(f"/proc/{message.pid}/fd/{message.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or size <= 0 or found.st_size < size:
                raise OSError(f"descriptor {message.fd} of process {message.pid} has {found.st_size} bytes, not {size}")
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)

    def has(self, slots: Sequence[int]) -> bool:
        """Return whether all `slots` are in the pool."""
        return all(0 <= slot < self.slots for slot in slots)

    def fill(self, slots: Sequence[int], source: memoryview) -> None:
        """Copy `source` into slots."""
        at = 0
        for part in self._parts(slots):
            self._view[part] = source[at : at + part.stop - part.start]
            at += part.stop - part.start

    def take(self, slots: Sequence[int], into: memoryview) -> None:
        """Copy slots to `into`."""
        at = 0
        for part in self._parts(slots):
            into[at : at + part.stop - part.start] = self._view[part]
            at += part.stop - part.start

    def close(self) -> None:
        """Let go of the memory. No copy is under way."""
        self._view.release()
        self._map.close()

    def _parts(self, slots: Sequence[int]) -> Iterator[slice]:
        """Yield the bytes of slots; neighbours are one part."""
        first = 0
        for index in range(1, len(slots) + 1):
            if index == len(slots) or slots[index] != slots[index - 1] + 1:
                yield slice(slots[first] * self.slot_bytes, (slots[index - 1] + 1) * self.slot_bytes)
                first = index
