"""The elastic KV cache of a stage on a GPU: views of the mapped blocks, changed beside the steps that run.

The driver takes 7 to 20 ms to map or unmap 10 GiB, more than a step may be held up. So a thread of
the cache's own does it. `prepare` hands it over when the step that orders it is executed;
`map_blocks` ends it between two later steps, when `prepared` says that it will not wait. Next to 10
GiB coming or going, the longest of many steps of 1.0 to 1.3 ms was 3.7 ms on an H200 (the zeroing
takes bandwidth); 10 to 28 ms if a step waited.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from ppkernels.kv_layout import cache_shape
from torch import Tensor
from typing_extensions import override

from ppengine.common.ring import Kind
from ppengine.common.sizes import size_text
from ppengine.stage.backends.base import KvCache, KvShape
from ppengine.stage.backends.cuda.dlpack import tensor_over
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.streams import Event, Order, Stream
from ppengine.stage.backends.cuda.virtual_memory import Segments, handle_bytes
from ppengine.stage.recorder import Recorder

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings


def block_view(shape: KvShape, device: torch.device) -> tuple[int, ...]:
    """Return the shape of one block in one layer."""
    return cache_shape(1, shape.block_size, shape.kv_heads, shape.head_dim, device)[1:]


class CudaKvCache(KvCache):
    """A cache in driver virtual memory. All methods are for the thread that launches on `compute`.

    New blocks are zeroed on a stream of the mapping thread, which waits for that: on `compute` a
    step would be longer for it. Before memory goes, that thread waits for the event `kv drained`,
    recorded on `compute` when `prepare` was called: the protocol promises that no older step can
    touch the tail, but a kernel that did would take the whole process down. The thread records its
    work in `ring`.
    """

    def __init__(
        self, shape: KvShape, reserved_blocks: int, driver: Driver, compute: Stream, ring: Recorder | None = None
    ) -> None:
        """Reserve addresses and map the null block. Raises DriverError."""
        super().__init__(shape, reserved_blocks)
        self._ring = ring
        self.handle_bytes = handle_bytes(shape.layer_block_bytes, shape.layers, driver.granularity)
        self.quantum_blocks = shape.quantum_blocks(self.handle_bytes)
        self._driver = driver
        self._compute = compute
        self._filler: Stream
        self._segments = Segments(driver, shape.layers, self._handles(reserved_blocks), self.handle_bytes)
        memory = tensor_over(self._segments.base, self._segments.length, driver.device)
        stride, size = self._segments.stride, reserved_blocks * shape.layer_block_bytes
        self._layers = [
            memory[start : start + size].view(shape.dtype).view(reserved_blocks, *block_view(shape, driver.device))
            for start in range(0, self._segments.length, stride)
        ]
        self._blocks = _across(memory, shape, stride, reserved_blocks)
        self.blocks: Tensor = self._blocks[:0]
        """The mapped blocks as `[blocks, layers, words]`, words of 8 bytes: one move takes all layers of a block."""
        self._mapper = ThreadPoolExecutor(1, "kv-map", initializer=self._enter)
        self._change: tuple[int, Future[str]] | None = None
        if error := self.map_blocks(1):
            raise DriverError("the null block", error)

    @property
    @override
    def base(self) -> int:
        return self._segments.base

    @property
    @override
    def length(self) -> int:
        return self._segments.length

    @property
    @override
    def mapped_bytes(self) -> int:
        """Device memory behind the cache: whole handles, so a little more than the mapped blocks have."""
        return self._segments.mapped_bytes

    @property
    def reserved_layers(self) -> list[Tensor]:
        """The layers with all reserved blocks. Their user must know which blocks are mapped."""
        return self._layers

    @override
    def prepare(self, count: int) -> None:
        if self.out_of_range(count) or (self._change is not None and self._change[0] == count):
            return
        drained = None
        if count < self.mapped:
            self._forget(count)
            self._expose(count)
            drained = self._compute.record("kv drained")
        self._change = count, self._mapper.submit(self._resize, count, drained)

    @override
    def prepared(self, count: int) -> bool:
        if self.out_of_range(count):
            return True
        return self._change is not None and self._change[0] == count and self._change[1].done()

    @override
    def map_blocks(self, count: int) -> str:
        """Make exactly `count` blocks usable. If memory cannot be given back, the blocks are gone all the same."""
        if error := self.out_of_range(count):
            return error
        self.prepare(count)
        assert self._change is not None
        error = self._change[1].result()
        self._change = None
        if not error:
            self._expose(count)
        return error

    def close(self) -> None:
        """Give memory and addresses back; the device must be idle and no view in use."""
        self._mapper.shutdown()
        self.layers, self.blocks, self.mapped = [], self._blocks[:0], 0
        self._segments.close()

    def _enter(self) -> None:
        """Prepare the mapping thread, with a stream of its own."""
        self._driver.enter()
        order, device = Order(self._compute.order.ledger), self._driver.device
        order.ledger.thread("kv-map", str(device))
        self._filler = Stream("kv fill", device, purpose="zeroing", order=order)

    def _recorded(self, kind: Kind, size: int = 0) -> AbstractContextManager[None]:
        return nullcontext() if self._ring is None else self._ring.operation(kind, size=size)

    def _resize(self, count: int, drained: Event | None) -> str:
        """Map or unmap, in the mapping thread; return an error line, empty on success."""
        if drained is not None:
            # A record of its own: a blocked device is no fault of this thread.
            with self._recorded(Kind.DEVICE):
                drained.synchronize()
        with self._recorded(Kind.MAP, count):
            return self._change_segments(count)

    def _change_segments(self, count: int) -> str:
        handles = self._handles(count)
        try:
            # Memory that a failed change has mapped may not be zeroed yet.
            self._filler.synchronize()
            self._segments.shrink(handles)
            if error := self._shortage(count, self._segments.missing(handles)):
                return error
            with self._filler.doing("zeroing"):
                for address, size in self._segments.grow(handles):
                    self._driver.zero(address, size, self._filler.handle)
        except DriverError as error:
            if self._segments.missing(handles) or not (left := max(self._segments.mapped) - handles):
                return f"cannot map {count} blocks: {error}; {self.mapped} stay mapped"
            return f"cannot give all memory beyond {count} blocks back: {error}; {left} handles a layer stay mapped"
        self._filler.synchronize()
        return ""

    def _shortage(self, count: int, need: int) -> str:
        """Return why the device has no room for `need` bytes; empty if it has."""
        if need > self._driver.free_bytes():
            # torch keeps freed memory; only now is it worth the cost to take it back.
            torch.cuda.empty_cache()
        free = self._driver.free_bytes()
        if need <= free:
            return ""
        return (
            f"cannot map {count} blocks: {count - self.mapped} more need {size_text(need)}, "
            f"the device has {size_text(free)} free"
        )

    def _forget(self, count: int) -> None:
        """Zero the blocks that go in a handle that stays: they may come back without being mapped again."""
        end = min(self.mapped, self._handles(count) * self.quantum_blocks)
        if end > count:
            with self._compute.doing("zeroing of freed blocks"), self._compute.use():
                self._blocks[count:end].zero_()

    def _handles(self, blocks: int) -> int:
        """Return the handles of one layer that hold `blocks` blocks."""
        return -(-blocks // self.quantum_blocks)

    def _expose(self, count: int) -> None:
        self.mapped = count
        self.layers = [layer[:count] for layer in self._layers]
        self.blocks = self._blocks[:count]


def _across(memory: Tensor, shape: KvShape, stride: int, blocks: int) -> Tensor:
    """Return all segments as `[blocks, layers, words]` of 8 bytes, which torch moves at a time."""
    words = shape.layer_block_bytes // 8
    return memory.view(torch.int64).as_strided((blocks, shape.layers, words), (words, stride // 8, 1))
