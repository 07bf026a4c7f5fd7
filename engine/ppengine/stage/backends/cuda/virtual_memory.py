"""Addresses for the most memory there can ever be, and device memory behind as much of them as is wanted now.

One reservation with a segment for each layer, all of one length: then one strided view reaches a
block in every layer, so that a single kernel can gather it, and a stage has one range of addresses
to name. A reservation for each layer would keep nothing apart that matters: the tail that comes and
goes lies beside a head that kernels read either way.

A segment is backed from its start by handles of equal size, and what counts for the time is their
number. On an H200 (driver 580) 10 GiB are mapped and given back in 7 ms each with handles of 64
MiB; with 32 MiB in 14 and 12 ms, 16 MiB in 28 and 20, 8 MiB in 55 and 38, 2 MiB in 180 to 360 and
140. But capacity is rounded down to a handle in every layer: so 64 MiB, or less if that would be
more than 1 GiB of the stage.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings

HANDLE_BYTES = 64 * 2**20
QUANTUM_BYTES = 2**30


def handle_bytes(layer_block_bytes: int, layers: int, granularity: int) -> int:
    """Return the handle size of a stage: it holds whole blocks of a layer, and one a layer is the stage's quantum.

    Always the smallest such size times a power of two: the quanta of stages with different numbers
    of layers then divide each other. That smallest size itself where even it is above the limits.
    """
    unit = math.lcm(granularity, layer_block_bytes)
    most = min(HANDLE_BYTES, QUANTUM_BYTES // layers)
    return unit << max(0, (most // unit).bit_length() - 1)


class Segments:
    """`count` ranges of `handles` handles each, in one reservation."""

    def __init__(self, driver: Driver, count: int, handles: int, handle_size: int) -> None:
        """Reserve addresses; nothing is mapped. Raises DriverError."""
        self._driver = driver
        self._handle = handle_size
        self.stride = handles * handle_size
        """Bytes from one segment to the next."""
        self.length = count * self.stride
        self.base = driver.reserve(self.length)
        self.mapped = [0] * count
        """Handles behind each segment."""

    @property
    def mapped_bytes(self) -> int:
        """Device memory behind all segments."""
        return sum(self.mapped) * self._handle

    def missing(self, handles: int) -> int:
        """Return the bytes that `grow(handles)` would take."""
        return sum(max(0, handles - mapped) for mapped in self.mapped) * self._handle

    def grow(self, handles: int) -> list[tuple[int, int]]:
        """Back the first `handles` handles of every segment; return address and size of each new piece.

        All or nothing: raises DriverError with everything as before.
        """
        spans = [
            (self._address(segment, mapped), handles - mapped)
            for segment, mapped in enumerate(self.mapped)
            if mapped < handles
        ]
        with ExitStack() as undo:
            # Memory first: if there is too little, nothing has been mapped yet.
            made = [self._create(undo) for _ in range(sum(count for _, count in spans))]
            fresh = iter(made)
            for start, count in spans:
                for address in range(start, start + count * self._handle, self._handle):
                    self._driver.map(address, self._handle, next(fresh))
                    undo.callback(self._driver.unmap, address, self._handle)
                self._driver.set_access(start, count * self._handle)
            undo.pop_all()
        self.mapped = [max(mapped, handles) for mapped in self.mapped]
        # Mapped memory stays without its handle: unmapping then frees it, and there is no table to keep.
        for handle in made:
            self._driver.release(handle)
        return [(start, count * self._handle) for start, count in spans]

    def shrink(self, handles: int) -> None:
        """Give back all but the first `handles` handles of every segment; nothing may be using them.

        Raises DriverError at the first segment that cannot; `mapped` says which have shrunk, and
        both `shrink` and `grow` go on from there.
        """
        for segment, mapped in enumerate(self.mapped):
            if mapped > handles:
                self._driver.unmap(self._address(segment, handles), (mapped - handles) * self._handle)
                self.mapped[segment] = handles

    def close(self) -> None:
        """Unmap everything and give the addresses back."""
        self.shrink(0)
        self._driver.free_addresses(self.base, self.length)

    def _create(self, undo: ExitStack) -> Any:
        handle = self._driver.create(self._handle)
        undo.callback(self._driver.release, handle)
        return handle

    def _address(self, segment: int, handle: int) -> int:
        return self.base + segment * self.stride + handle * self._handle
