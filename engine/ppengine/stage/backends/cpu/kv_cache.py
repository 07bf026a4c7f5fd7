"""Memory of KV blocks on a CPU: the cache, and the host memory of swapped blocks.

Addresses are reserved for the most blocks that there can ever be and cost nothing until written.
The cache is one anonymous private mapping, with a segment for each layer in the layout of
`ppkernels.kv_layout`. Shrinking gives the tail of each segment back with MADV_DONTNEED: Rss falls
at once, a regrown block reads as zeros.
"""

from __future__ import annotations

import mmap

import torch
from ppkernels.kv_layout import cache_shape
from torch import Tensor
from typing_extensions import override

from ppengine.common.sizes import size_text
from ppengine.common.system_memory import system_memory
from ppengine.stage.backends.base import KvCache, KvShape, slot_file

MAP_NORESERVE = 0x4000
"""Linux, all architectures that torch runs on; `mmap` names it from Python 3.13 on."""


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
            # Blocks need not fill whole pages: a block that shares its page with one that stays is zeroed by hand.
            tensor[first : min(last, -(-start // size))].zero_()
            if end > start:
                self._map.madvise(mmap.MADV_DONTNEED, layer * self._stride + start, end - start)


class CpuSwapSpace:
    """Swapped blocks, resident only once written. A slot is one run of memory, as on a GPU: all layers of a block.

    Without advice: neighbouring mappings of equal flags become one, and the agent reads Rss by
    mapping.
    """

    def __init__(self, shape: KvShape, blocks: int, *, shared: bool = False) -> None:
        """`shared`: a store maps it, too. Raises OSError if so much cannot be reserved."""
        self.shape = shape
        self.blocks = blocks
        self.length = max(_round_up(blocks * shape.block_bytes), mmap.PAGESIZE)
        self.fd = slot_file(self.length) if shared else -1
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(self.fd, self.length, flags=flags | MAP_NORESERVE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.base = whole.data_ptr()
        view = cache_shape(blocks, shape.block_size, shape.kv_heads, shape.head_dim, whole.device)
        slots = whole[: blocks * shape.block_bytes].view(shape.dtype).view(blocks, shape.layers, *view[1:])
        self.layers: list[Tensor] = [slots[:, layer] for layer in range(shape.layers)]

    def forget(self) -> None:
        """Give all memory back to the system; slots read as zeros afterwards."""
        self._map.madvise(mmap.MADV_DONTNEED if self.fd < 0 else mmap.MADV_REMOVE)


class CpuKvCache(KvCache):
    """A cache in this process's memory; with `length`, `base` names its range in /proc/<pid>/smaps."""

    def __init__(self, shape: KvShape, reserved_blocks: int) -> None:
        super().__init__(shape, reserved_blocks)
        # Huge pages would make the smallest release 2 MiB a layer, and Rss wrong.
        self._memory = BlockMemory(shape, reserved_blocks, mmap.MADV_NOHUGEPAGE)
        self._expose(1)

    @property
    @override
    def base(self) -> int:
        return self._memory.base

    @property
    @override
    def length(self) -> int:
        return self._memory.length

    @override
    def map_blocks(self, count: int) -> str:
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


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
