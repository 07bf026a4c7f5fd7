"""A GPU as a stage's hardware: its memory by NVML's word, its cache in driver virtual memory, its pool pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ppkernels import gpu
from ppkernels.batch import Batch
from torch import Tensor

from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.device_page import DevicePage, page_path
from ppengine.common.ring import MAP_RING
from ppengine.models import StageModel
from ppengine.stage.backends.cpu.kv_cache import KvCache, KvShape
from ppengine.stage.backends.cuda.cuda_runner import CudaRunner
from ppengine.stage.backends.cuda.device_buffers import CudaState
from ppengine.stage.backends.cuda.device_edges import DeviceEnds, DeviceTokens
from ppengine.stage.backends.cuda.device_timing import DeviceTimer
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache, block_view
from ppengine.stage.backends.cuda.memory_accounts import Account, Card
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedPool, PoolRefusedError
from ppengine.stage.backends.cuda.streams import Order, Stream
from ppengine.stage.backends.cuda.virtual_memory import handle_bytes
from ppengine.stage.backends.hardware import Furniture, Hardware
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.recorder import Recorder, open_recorder
from ppengine.stage.runner import Runner

_MIB = 2**20


class CudaHardware(Hardware):
    """One card of this host. Stages share cards in turn where there are more stages than cards."""

    kind = "cuda"
    uuid: str
    half = pinned = True

    def __init__(self, config: EngineConfig, stage: int, ledger: Ledger | None = None) -> None:
        self.page = DevicePage(page_path(config, stage))
        self._map_ring = open_recorder(config, stage, 0, MAP_RING, 0)
        cards = torch.cuda.device_count()
        index = stage % cards
        properties = torch.cuda.get_device_properties(index)
        self.uuid = f"GPU-{properties.uuid}"
        self.name = properties.name
        card = Card(self.uuid)
        self._card, self._account = card, Account(card.read())
        self.driver = Driver(index)
        self.device = self.driver.device
        order = Order(ledger)
        order.ledger.thread(device=str(self.device))
        self.compute = Stream("compute", self.device, purpose="steps", order=order)
        torch.mm(*torch.ones(2, 16, 16, device=self.device, dtype=torch.bfloat16))  # cuBLAS and its workspace
        torch.cuda.synchronize(self.device)
        self._account.close("context", card.read())
        share = card.total // sum(other % cards == index for other in range(config.stages))
        self._peer_to_peer = config.profile.parallel.peer_to_peer
        mib = config.profile.memory.device_mib
        self.total = share if mib is None else min(mib * _MIB, share)

    def batch(self, batch: Batch) -> Batch:
        """Return a step's batch on the device, int32."""
        parts = (batch.positions, batch.slot_mapping, batch.query_start, batch.seq_lens, batch.block_tables)
        host = torch.cat([part.reshape(-1).to(torch.int32) for part in parts]).pin_memory()
        on_device = torch.split(host.to(self.device, non_blocking=True), [part.numel() for part in parts])
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

    @contextmanager
    def recording(self, ring: Recorder, tokens: int) -> Iterator[None]:
        """See `Hardware`. The device is waited for: its time is what counts."""
        stream = Stream("profile", self.device, torch.cuda.current_stream(self.device))
        work = DeviceTimer(ring).work(stream, 0, tokens, 0)
        with work, super().recording(ring, tokens):
            yield
        work.synchronize()
        work.tell()

    def activations(self, run: Callable[[], None]) -> int:
        """Return the most that `run` allocates for a while. torch keeps it, so it is in `peak` as well."""
        run()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def peak(self, weights: int, activations: int, cache: KvCache | None = None) -> int:
        """Return all that this process holds of the card beside mapped blocks."""
        torch.cuda.synchronize(self.device)
        mapped = cache.mapped_bytes if isinstance(cache, CudaKvCache) else 0
        return self._account.parts(self._card.read(mapped), weights).beside_kv

    def quantum_blocks(self, shape: KvShape) -> int:
        """See `Hardware`."""
        return shape.quantum_blocks(handle_bytes(shape.layer_block_bytes, shape.layers, self.driver.granularity))

    def cache(self, shape: KvShape, blocks: int) -> KvCache:
        """See `Hardware`."""
        return CudaKvCache(shape, blocks, self.driver, self.compute, self._map_ring)

    def scratch(self, shape: KvShape) -> list[Tensor]:
        """See `Hardware`."""
        view = block_view(shape, self.device)
        return [torch.zeros(1, *view, dtype=shape.dtype, device=self.device) for _ in range(shape.layers)]

    def furnish(self, config: EngineConfig, model: StageModel, loaded: Furniture) -> CudaState:
        """Return tables, buffers and graphs of the stage; graphs unless the profile says `parallel.eager`."""
        assert isinstance(loaded.cache, CudaKvCache)
        torch.cuda.synchronize(self.device)
        self._account.close("context", self._card.read(loaded.cache.mapped_bytes))
        with torch.inference_mode():
            state = CudaState(self, config, model, loaded.cache, loaded.host)
            self._account.close("communicator", self._card.read(loaded.cache.mapped_bytes))
            state.warm_up()
            if not config.profile.parallel.eager and loaded.cache.shape.dtype in gpu.TYPES:
                state.capture(loaded.told)
        torch.cuda.synchronize(self.device)
        self._account.close("graphs", self._card.read(loaded.cache.mapped_bytes))
        return state

    def ends(self, card: CudaState) -> DeviceEnds | None:
        """See `Hardware`."""
        return DeviceEnds(self.driver, card) if self._peer_to_peer else None

    def own_tokens(self, ring: Recorder) -> DeviceTokens:
        """See `Hardware`."""
        return DeviceTokens(ring)

    def runner(self, **parts: Any) -> Runner:
        """See `Hardware`."""
        return CudaRunner(**parts)

    def pool(self, shape: KvShape, blocks: int) -> PinnedPool:
        """See `Hardware`. Raises ConfigError where so much cannot be pinned."""
        try:
            return PinnedPool(shape, blocks, block_view(shape, self.device), self.driver)
        except PoolRefusedError as error:
            raise ConfigError(str(error)) from None
