"""A GPU as a stage's hardware: its memory by NVML's word, its cache in driver virtual memory, its pool pinned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ppkernels.batch import Batch

from ppengine.config import ConfigError, EngineConfig
from ppengine.cuda.accounts import Account, Card, Parts
from ppengine.cuda.driver import Driver
from ppengine.cuda.host_pool import PinnedPool, PoolRefusedError
from ppengine.cuda.kv_cache import CudaKvCache, block_view
from ppengine.cuda.streams import Stream
from ppengine.cuda.virtual_memory import handle_bytes
from ppengine.stage.hardware import Hardware
from ppengine.stage.kv_cache import KvCache, KvShape


class CudaHardware(Hardware):
    """One card of this host. Stages share cards in turn where there are more stages than cards."""

    kind = "cuda"
    eager_half = True

    def __init__(self, config: EngineConfig, stage: int) -> None:
        cards = torch.cuda.device_count()
        index = stage % cards
        properties = torch.cuda.get_device_properties(index)
        self.uuid = f"GPU-{properties.uuid}"
        self.name = properties.name
        card = Card(self.uuid)
        self._card, self._account = card, Account(card.read())
        self.driver = Driver(index)
        self.device = self.driver.device
        self.compute = Stream("compute", self.device)
        torch.mm(*torch.ones(2, 16, 16, device=self.device, dtype=torch.bfloat16))  # cuBLAS and its workspace
        torch.cuda.synchronize(self.device)
        self._account.close("context", card.read())
        self.sharing = len([other for other in range(config.stages) if other % cards == index])
        self.total = card.total // self.sharing

    def batch(self, batch: Batch) -> Batch:
        """Return a step's batch on the device, int32."""
        parts = (batch.positions, batch.slot_mapping, batch.query_start, batch.seq_lens, batch.block_tables)
        host = torch.cat([part.reshape(-1).to(torch.int32) for part in parts]).pin_memory()
        on_device = host.to(self.device, non_blocking=True).split([part.numel() for part in parts])
        positions, slots, starts, lengths, tables = on_device
        return Batch(
            positions=positions,
            slot_mapping=slots,
            query_start=starts,
            query_lens=batch.query_lens,
            seq_lens=lengths,
            block_tables=tables.view(batch.block_tables.shape),
            decode_only=batch.decode_only,
            block_size=batch.block_size,
        )

    def activations(self, run: Callable[[], None]) -> int:
        """Return the most that `run` allocates for a while. torch keeps it, so it is in `peak` as well."""
        run()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def peak(self, weights: int, activations: int) -> int:
        """Return all that this process holds of the card beside mapped blocks."""
        return self.parts(weights, 0).beside_kv

    def parts(self, weights: int, kv_mapped: int) -> Parts:
        """Return where the card's memory is now."""
        return self._account.parts(self._card.read(kv_mapped), weights)

    def captured(self, kv_mapped: int) -> None:
        """Book what the process has grown by since boot as memory of graphs."""
        torch.cuda.synchronize(self.device)
        self._account.close("graphs", self._card.read(kv_mapped))

    def quantum_blocks(self, shape: KvShape) -> int:
        """See `Hardware`."""
        return shape.quantum_blocks(handle_bytes(shape.layer_block_bytes, shape.layers, self.driver.granularity))

    def cache(self, shape: KvShape, blocks: int) -> KvCache:
        """See `Hardware`."""
        return CudaKvCache(shape, blocks, self.driver, self.compute)

    def pool(self, shape: KvShape, blocks: int) -> PinnedPool:
        """See `Hardware`. Raises ConfigError where so much cannot be pinned."""
        try:
            return PinnedPool(shape, blocks, block_view(shape, self.device), self.driver)
        except PoolRefusedError as error:
            raise ConfigError(str(error)) from None
