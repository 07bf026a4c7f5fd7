"""Host memory of swapped blocks, pinned at start: one slot holds one block in all layers of the stage.

So a block goes to its slot in one copy, and slots side by side go in one. An anonymous mapping
advised to use huge pages is pinned in 0.2 s a GiB (one H200 host); without the advice it takes 0.3
to 0.45 s, as torch's pinned memory does, which also rounds sizes up to a power of two.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppengine.common.sizes import size_text
from ppengine.common.system_memory import system_memory
from ppengine.stage.backends.base import KvShape, slot_file
from ppengine.stage.backends.cuda.errors import DriverError

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings

_PIECE = 2**30
"""Bytes pinned by one call, about: very large calls fail, and a refusal then says how much there was."""
_GIB = 2**30


class SwapSpaceRefusedError(ValueError):
    """The swap space cannot be pinned. One line: how much is missing, and how much would fit."""


class PinnedSwapSpace:
    """`blocks` slots of `[layers, bytes]`. `layers` shows them as the device cache shows its layers."""

    def __init__(
        self, shape: KvShape, blocks: int, view: Sequence[int], driver: Driver, *, shared: bool = False
    ) -> None:
        """Pin the memory; `view` is the shape of one block in one layer, `shared`: a store maps it, too.

        Raises SwapSpaceRefusedError.
        """
        self.shape = shape
        self.blocks = blocks
        self.slot_bytes = shape.block_bytes
        self.slots_a_piece = max(1, _PIECE // self.slot_bytes)
        """Slots pinned together: a copy must not go across two pieces."""
        self._driver = driver
        self.length = max(blocks * self.slot_bytes, mmap.PAGESIZE)
        available = system_memory().available
        if self.length > available:
            raise SwapSpaceRefusedError(self._refusal(f"the system has {size_text(available)} available", available))
        self.fd = slot_file(self.length) if shared else -1
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(self.fd, self.length, flags=flags)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.base = memory.data_ptr()
        self._pinned: list[int] = []
        self._pin()
        slots = memory[: blocks * self.slot_bytes].view(shape.dtype).view(blocks, shape.layers, *view)
        self.layers: list[Tensor] = [slots[:, layer] for layer in range(shape.layers)]

    def address(self, slot: int) -> int:
        """Return the first address of a slot."""
        return self.base + slot * self.slot_bytes

    def forget(self) -> None:
        """Do nothing: pinned memory stays, the system must not take its pages back."""

    def close(self) -> None:
        """Unpin everything; no copy may be under way."""
        while self._pinned:
            self._driver.unpin(self._pinned.pop())

    def _pin(self) -> None:
        piece = self.slots_a_piece * self.slot_bytes
        for start in range(0, self.blocks * self.slot_bytes, piece):
            try:
                self._driver.pin(self.base + start, min(piece, self.blocks * self.slot_bytes - start))
            except DriverError as error:
                self.close()
                raise SwapSpaceRefusedError(self._refusal(f"{error} after {size_text(start)}", start)) from None
            self._pinned.append(self.base + start)

    def _refusal(self, why: str, fits: int) -> str:
        """Return the error line, with the swap space in hundredths of a GiB that fits and leaves a tenth for others."""
        gib = fits * 90 // _GIB / 100
        return (
            f"{size_text(self.length)} of host memory for {self.blocks} swapped blocks cannot be pinned: {why}; "
            f"memory.swap_space_gib of at most {gib:g} would fit"
        )


def runs(slots: Sequence[int], slots_a_piece: int) -> list[tuple[int, int]]:
    """Return (first slot, count) of runs of consecutive slots, none across two pieces; `slots` rise."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and slot == sum(found[-1]) and slot % slots_a_piece:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((slot, 1))
    return found
