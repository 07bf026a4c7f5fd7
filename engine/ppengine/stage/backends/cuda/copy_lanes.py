"""The copies of a block mover: within the cache, and to and from the swap space through a staging buffer.

One kernel gathers a block's layers, copies of whole slots take them to the host; back the same way.
The buffer has two halves: a kernel works on one while the other is copied. One large copy reached 55
GB/s (H200); 64 blocks of 32 fragments of 64 KiB each went at 48 to 50 GB/s by one half, and cost 200
to 340 us of host time; with cuMemcpyBatchAsync at 39 GB/s and 900 us, with a copy for each fragment
at 18 GB/s and 4 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from ppkernels.block_copy import Pairs, copy_layers, independent_runs
from torch import Tensor

from ppengine.protocol.steps import MoveKind
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedSwapSpace, runs
from ppengine.stage.backends.cuda.streams import Event, Order, Stream
from ppengine.stage.ledger.kv_block_buffers import BlockBuffers

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver

STAGING_BYTES = 64 * 2**20
"""A direction's staging buffer: a copy of it takes 1.2 ms, far longer than a launch."""


class DeviceLane:
    """Block to block within the cache, on the stream that computes."""

    def __init__(self, cache: CudaKvCache, compute: Stream, blocks: BlockBuffers) -> None:
        self._cache, self._blocks = cache, blocks
        self.stream: Stream = compute

    def copy(self, pairs: Pairs) -> None:
        """Launch copies of block `src` to block `dst` for each (src, dst), in list order."""
        reads, writes = (self._blocks.known(side) for side in zip(*pairs, strict=True))
        moving = self.stream.doing("block moves", reads, [self._blocks.whole, *writes])
        with moving, self.stream.working(), self.stream.use():
            # By layer, whose type has a kernel: torch would gather all blocks first, and a shrink may move most.
            copy_layers(self._cache.layers, self._cache.layers, pairs)


class SwapLane:
    """One direction between the cache and the swap space, with a stream and a staging buffer of its own.

    Copies are on `stream`, kernels on a second one. That begins behind `stream` and ends before it, so others see one.
    """

    def __init__(
        self,
        kind: MoveKind,
        cache: CudaKvCache,
        host: PinnedSwapSpace,
        driver: Driver,
        staging_bytes: int,
        order: Order,
        blocks: BlockBuffers,
    ) -> None:
        self._out = kind.to_host
        self._name = "swap out" if self._out else "swap in"
        self.stream: Stream = Stream(self._name, driver.device, purpose="swap", order=order)
        self._known = blocks
        self._cache, self._host, self._driver = cache, host, driver
        shape = cache.shape
        self._chunk = max(1, min(staging_bytes // 2 // shape.block_bytes, host.blocks))
        words = shape.layer_block_bytes // 8
        self._kernels = Stream(f"{self._name} kernels", driver.device, purpose="swap", order=order)
        with self.stream.use():
            self._staging = torch.empty((2, self._chunk, shape.layers, words), dtype=torch.int64, device=driver.device)
        self._through = self.stream.buffer(f"{self._name} staging", self._staging.nbytes)

    def copy(self, pairs: Pairs) -> None:
        """Launch copies of block `src` to block `dst` for each (src, dst), in list order."""
        self._check(pairs)
        with self._doing(pairs), self.stream.working(), self.stream.use():
            for run in independent_runs(pairs, same=False):
                # By slot, so that neighbours go in one copy.
                ordered = sorted(run, key=lambda pair: pair[self._out])
                blocks, slots = [pair[not self._out] for pair in ordered], [pair[self._out] for pair in ordered]
                (self._take_out if self._out else self._bring_in)(blocks, slots)

    def _doing(self, pairs: Pairs) -> AbstractContextManager[None]:
        if not self.stream.order.ledger.on:
            return self.stream.doing(self._name)
        sources, targets = zip(*pairs, strict=True)
        reads, writes = self._known.of(self._out, sources), self._known.of(not self._out, targets)
        return self.stream.doing(self._name, reads, [self._through, *writes], depth=1)

    def _take_out(self, blocks: list[int], slots: list[int]) -> None:
        copies, kernels = self.stream, self._kernels
        index = self._index(blocks)
        kernels.wait(copies.record("swap begun"))
        emptied: list[Event] = []
        for chunk, staging in self._chunks(len(slots)):
            if len(emptied) > 1:
                kernels.wait(emptied[-2])
            with kernels.use():
                torch.index_select(self._cache.blocks, 0, index[chunk], out=staging)
            copies.wait(kernels.record("gathered"))
            self._copy_slots(slots[chunk], staging.data_ptr())
            emptied.append(copies.record("half copied"))

    def _bring_in(self, blocks: list[int], slots: list[int]) -> None:
        copies, kernels = self.stream, self._kernels
        index: Tensor | None = None
        emptied: list[Event] = []
        for chunk, staging in self._chunks(len(slots)):
            if len(emptied) > 1:
                copies.wait(emptied[-2])
            self._copy_slots(slots[chunk], staging.data_ptr())
            # Not before the first copy is under way.
            index = self._index(blocks) if index is None else index
            kernels.wait(copies.record("half copied"))
            with kernels.use():
                self._cache.blocks.index_copy_(0, index[chunk], staging)
            emptied.append(kernels.record("scattered"))
        # The memory of the index is free for `stream` behind this.
        copies.wait(emptied[-1])

    def _chunks(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Return the parts of a copy, each with its half of the buffer."""
        for turn, start in enumerate(range(0, count, self._chunk)):
            yield slice(start, start + self._chunk), self._staging[turn % 2, : min(self._chunk, count - start)]

    def _index(self, blocks: list[int]) -> Tensor:
        # From pinned memory, since a copy from any other waits for the stream.
        return torch.tensor(blocks, pin_memory=True).to(self._staging.device, non_blocking=True)

    def _copy_slots(self, slots: list[int], staging: int) -> None:
        for slot, count in runs(slots, self._host.slots_a_piece):
            host, size = self._host.address(slot), count * self._host.slot_bytes
            if self._out:
                self._driver.to_host(host, staging, size, self.stream.handle)
            else:
                self._driver.to_device(staging, host, size, self.stream.handle)
            staging += size

    def _check(self, pairs: Pairs) -> None:
        limits = (self._cache.mapped, self._host.blocks) if self._out else (self._host.blocks, self._cache.mapped)
        for pair in pairs:
            if not all(0 <= block < limit for block, limit in zip(pair, limits, strict=True)):
                raise IndexError(f"block copy {pair[0]} -> {pair[1]}; there are {limits[0]} and {limits[1]} blocks")


def make_lanes(
    cache: CudaKvCache,
    host: PinnedSwapSpace,
    driver: Driver,
    compute: Stream,
    staging_bytes: int = STAGING_BYTES,
    blocks: BlockBuffers | None = None,
) -> dict[MoveKind, DeviceLane | SwapLane]:
    """Return the lanes of a stage; each direction has a staging buffer of at most `staging_bytes`.

    `blocks` are the ledger's.
    """
    order = compute.order
    blocks = blocks or BlockBuffers(order.ledger, compute.device)
    out, inward = (
        SwapLane(kind, cache, host, driver, staging_bytes, order, blocks) for kind in (MoveKind.OUT, MoveKind.IN)
    )
    return {
        MoveKind.DEVICE: DeviceLane(cache, compute, blocks),
        MoveKind.OUT: out,
        MoveKind.IN: inward,
        MoveKind.LOAD: inward,
    }
