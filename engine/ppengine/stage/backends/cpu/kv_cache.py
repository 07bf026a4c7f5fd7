"""Memory of KV blocks: what a cache is to the step loop, and the cache and host pool of a CPU stage.

`KvCache` is the interface; `cuda/elastic_kv_cache` implements it on a GPU. On a CPU both the cache and the host pool
for swapped blocks are one anonymous private mapping, with a segment for each layer in the layout of
`ppkernels.kv_layout`. Addresses are reserved for the most blocks that there can ever be and cost nothing until written.
Shrinking gives the tail of each segment back with MADV_DONTNEED: Rss falls at once, a regrown block reads as zeros.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from ppkernels.kv_layout import cache_shape
from torch import Tensor

from ppengine.stage.backends.cpu.system_memory import system_memory

MAP_NORESERVE = 0x4000
"""Linux, all architectures that torch runs on; `mmap` names it from Python 3.13 on."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one stage's cache; all sizes in bytes unless they say otherwise."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def layer_block_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return 2 * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """One block in all layers of the stage."""
        return self.layers * self.layer_block_bytes

    def quantum_blocks(self, granule: int = mmap.PAGESIZE) -> int:
        """Smallest number of blocks that fill whole granules (pages, handles; bytes) in every layer."""
        return granule // math.gcd(granule, self.layer_block_bytes)


class KvCache(ABC):
    """The device cache of a stage. `layers` holds the mapped blocks only, so that a stale index raises.

    Block 0 is the null block and always mapped.
    """

    def __init__(self, shape: KvShape, reserved_blocks: int) -> None:
        self.shape = shape
        self.reserved = reserved_blocks
        self.mapped = 0
        self.layers: list[Tensor] = []

    def prepare(self, count: int) -> None:  # noqa: B027 (many caches have nothing to prepare)
        """Begin what `map_blocks(count)` will end, where that takes long. What is to go cannot be reached any more."""

    def prepared(self, count: int) -> bool:
        """Return whether `map_blocks(count)` would not wait for what `prepare` began."""
        return True

    @abstractmethod
    def map_blocks(self, count: int) -> str:
        """Make exactly `count` blocks usable; new ones read as zeros. Return an error line where that cannot be.

        After an error `mapped` tells what there is: growing changes nothing then.
        """

    @property
    @abstractmethod
    def base(self) -> int:
        """First reserved address."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Reserved bytes."""

    def out_of_range(self, count: int) -> str:
        """Return why `count` blocks can never be mapped; empty when they can."""
        if 1 <= count <= self.reserved:
            return ""
        return f"cannot map {count} blocks: addresses are reserved for 1 to {self.reserved}"


class BlockMemory:
    """Reserved addresses for `blocks` blocks, as one tensor for each layer."""

    def __init__(self, shape: KvShape, blocks: int, advice: int | None = None) -> None:
        self.shape = shape
        self.blocks = blocks
        self._stride = _round_up(blocks * shape.layer_block_bytes)
        self.length = max(self._stride * shape.layers, mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, self.length, flags=flags)
        if advice is not None:
            self._map.madvise(advice)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.base = whole.data_ptr()
        size = blocks * shape.layer_block_bytes
        view = cache_shape(blocks, shape.block_size, shape.kv_heads, shape.head_dim, whole.device)
        starts = [layer * self._stride for layer in range(shape.layers)]
        self.layers: list[Tensor] = [whole[start : start + size].view(shape.dtype).view(view) for start in starts]

    def drop(self, first: int, last: int) -> None:
        """Give the memory of blocks `[first, last)` back to the system; they read as zeros afterwards."""
        size = self.shape.layer_block_bytes
        for layer, tensor in enumerate(self.layers):
            start, end = _round_up(first * size), _round_up(last * size)
            # Blocks need not fill whole pages: what shares its page with a block that stays is zeroed by hand.
            tensor[first : min(last, -(-start // size))].zero_()
            if end > start:
                self._map.madvise(mmap.MADV_DONTNEED, layer * self._stride + start, end - start)


class CpuKvCache(KvCache):
    """A cache in this process's memory; with `length`, `base` names its range in /proc/<pid>/smaps."""

    def __init__(self, shape: KvShape, reserved_blocks: int) -> None:
        super().__init__(shape, reserved_blocks)
        # Huge pages would make the smallest release 2 MiB a layer, and Rss a lie.
        self._memory = BlockMemory(shape, reserved_blocks, mmap.MADV_NOHUGEPAGE)
        self._expose(1)

    @property
    def base(self) -> int:
        """Address of the mapping."""
        return self._memory.base

    @property
    def length(self) -> int:
        """Bytes of the mapping."""
        return self._memory.length

    def map_blocks(self, count: int) -> str:
        """See `KvCache`."""
        if error := self.out_of_range(count):
            return error
        if count > self.mapped:
            need, available = (count - self.mapped) * self.shape.block_bytes, system_memory().available
            if need > available:
                return (
                    f"cannot map {count} blocks: {count - self.mapped} more need {size_text(need)}, "
                    f"the system has {size_text(available)} available"
                )
        elif count < self.mapped:
            self._memory.drop(count, self.mapped)
        self._expose(count)
        return ""

    def _expose(self, count: int) -> None:
        self.mapped = count
        self.layers = [segment[:count] for segment in self._memory.layers]


class SwapPool(Protocol):
    """Blocks that were swapped out; `layers` as those of a cache."""

    blocks: int
    layers: list[Tensor]

    def drop(self, first: int, last: int) -> None:
        """Forget blocks `[first, last)`."""


class HostPool(BlockMemory):
    """Blocks that were swapped out, resident only where written.

    Not advised: mappings of equal flags side by side become one, and the agent reads Rss by mapping.
    """

    def __init__(self, shape: KvShape, blocks: int) -> None:
        super().__init__(shape, blocks)


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def size_text(size: int) -> str:
    """Return bytes for a reader: `96.0 KiB`, `1.4 MiB`."""
    return f"{size / 2**10:.1f} KiB" if size < 2**20 else f"{size / 2**20:.1f} MiB"
