"""A GPU as a stage's hardware: memory figures from NVML, the cache in driver virtual memory, swap space pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from ppkernels import gpu
from ppkernels.batch import Batch
from torch import Tensor
from typing_extensions import override

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.device_page import DevicePage, page_path
from ppengine.common.ring import MAP_RING
from ppengine.models import StageModel
from ppengine.protocol.place import Place
from ppengine.stage.backends.base import KvShape, TokenTable
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.backends.cuda.cuda_runner import CudaRunner
from ppengine.stage.backends.cuda.device_buffers import DeviceBuffers
from ppengine.stage.backends.cuda.device_ends import CudaEnds
from ppengine.stage.backends.cuda.device_timing import DeviceTimer
from ppengine.stage.backends.cuda.device_tokens import LocalTokenTable
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache, block_view
from ppengine.stage.backends.cuda.memory_accounts import Account, Card
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedSwapSpace, SwapSpaceRefusedError
from ppengine.stage.backends.cuda.staged_edges import StagedReceiver, StagedSender, StagedTokenSender
from ppengine.stage.backends.cuda.staging import batch_on_device
from ppengine.stage.backends.cuda.streams import Order, Stream
from ppengine.stage.backends.cuda.sum_ways import StepRows
from ppengine.stage.backends.cuda.virtual_memory import handle_bytes
from ppengine.stage.backends.hardware import Hardware, Room, RunnerResources
from ppengine.stage.edge import Edge
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.rank_group import LoneRank, RankGroup
from ppengine.stage.recorder import Recorder, open_recorder
from ppengine.stage.runner import RunnerParts
from ppengine.stage.token_return import HostTokenTable

_MIB = 2**20


class CudaHardware(Hardware):
    """One card of this host. Places share cards in turn if there are more places than cards."""

    kind = "cuda"
    uuid: str
    half = True

    def __init__(self, config: EngineConfig, place: Place, ledger: Ledger | None = None) -> None:
        self.page = DevicePage(page_path(config, *place))
        self._map_ring = open_recorder(config, *place, MAP_RING, 0)
        cards = torch.cuda.device_count()
        index = config.groups.number(place) % cards
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
        self._sums: Stream | None = None
        """The stream on which ranks exchange large sums."""
        torch.mm(*torch.ones(2, 16, 16, device=self.device, dtype=torch.bfloat16))  # cuBLAS and its workspace
        torch.cuda.synchronize(self.device)
        self._account.close("context", card.read())
        # On several nodes Ray gives each place a card of its own, the only one that it sees.
        alone = config.cluster is not None
        share = card.total // (1 if alone else sum(other % cards == index for other in range(len(config.groups))))
        mib = config.profile.memory.device_mib
        self.total = share if mib is None else min(mib * _MIB, share)

    @override
    def batch(self, batch: Batch) -> Batch:
        return batch_on_device(batch, self.device)

    @override
    def make_group(
        self, config: EngineConfig, place: Place, ring: Recorder, spec: ModelSpec, dtype: torch.dtype
    ) -> RankGroup:
        size = config.groups.tensor
        if size == 1:
            return LoneRank()
        if config.cluster is not None:
            raise ConfigError(f"parallel.tensor is {size}; ranks on GPUs of several nodes are not built yet")
        if dtype not in gpu.TYPES:
            raise ConfigError(
                f"parallel.tensor is {size}; ranks on GPUs add no {dtype}: set model.dtype to a smaller one"
            )
        rows = StepRows(spec.hidden_size, dtype, config.profile.scheduler.max_num_batched_tokens)
        part_bytes, folder = rows.most * rows.row_bytes, Path(config.ring_dir)
        group = CardGroup(self.driver, self.uuid, place, size, folder, self.compute, part_bytes, self.page, rows)
        self._sums = group.stream
        return group

    @override
    @contextmanager
    def recording(self, ring: Recorder, tokens: int) -> Iterator[None]:
        """Return a block in which boot times `tokens` tokens, on the host and on the device, which it waits for."""
        stream = Stream("profile", self.device, torch.cuda.current_stream(self.device))
        work = DeviceTimer(ring).work(stream, 0, tokens, 0)
        with work, super().recording(ring, tokens):
            yield
        work.synchronize()
        work.publish()

    @override
    def activations(self, run: Callable[[], None]) -> int:
        """Return the most that `run` allocates for a while. torch keeps it, so it is in `peak` as well."""
        run()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    @override
    def peak(self, weights: int, activations: int, mapped: int = 0) -> int:
        """Return all memory of the card that this process holds beside mapped blocks."""
        torch.cuda.synchronize(self.device)
        return self._account.parts(self._card.read(mapped), weights).beside_kv

    @override
    def quantum_blocks(self, shape: KvShape) -> int:
        return shape.quantum_blocks(handle_bytes(shape.layer_block_bytes, shape.layers, self.driver.granularity))

    @override
    def scratch(self, shape: KvShape) -> list[Tensor]:
        view = block_view(shape, self.device)
        return [torch.zeros(1, *view, dtype=shape.dtype, device=self.device) for _ in range(shape.layers)]

    @override
    def make_resources(
        self, config: EngineConfig, model: StageModel, room: Room, progress: Callable[[int, int], None]
    ) -> RunnerResources:
        """Make cache, swap space, tables, buffers and graphs; graphs unless the profile says `parallel.eager`."""
        shape = room.shape
        cache = CudaKvCache(shape, room.reserved_blocks, self.driver, self.compute, self._map_ring)
        try:
            view, shared = block_view(shape, self.device), bool(config.profile.tiers.backends)
            swap = PinnedSwapSpace(shape, room.swap_blocks, view, self.driver, shared=shared)
        except SwapSpaceRefusedError as error:
            raise ConfigError(str(error)) from None
        torch.cuda.synchronize(self.device)
        self._account.close("context", self._card.read(cache.mapped_bytes))
        with torch.inference_mode():
            buffers = DeviceBuffers(self.driver, self.uuid, self.page, self.compute, config, model, cache, swap)
            if self._sums is not None:
                buffers.progress.follow(self._sums)
            self._account.close("communicator", self._card.read(cache.mapped_bytes))
            buffers.warm_up()
            if not config.profile.parallel.eager and shape.dtype in gpu.TYPES:
                buffers.capture(progress)
        torch.cuda.synchronize(self.device)
        self._account.close("graphs", self._card.read(cache.mapped_bytes))
        # The memory of a card on another node cannot be opened.
        reaches = config.profile.parallel.peer_to_peer and config.cluster is None
        ends = CudaEnds(self.driver, buffers) if reaches else None
        return CudaResources(model, cache, swap, buffers, ends)


class CudaResources(RunnerResources):
    """Model, cache, swap space and device buffers of a GPU stage. Without `ends`, all messages go by wire."""

    launches = True

    def __init__(
        self,
        model: StageModel,
        cache: CudaKvCache,
        swap: PinnedSwapSpace,
        buffers: DeviceBuffers,
        ends: CudaEnds | None,
    ) -> None:
        self.model, self.cache, self.swap = model, cache, swap
        self._buffers, self._ends = buffers, ends

    @property
    @override
    def device_ends(self) -> CudaEnds | None:
        return self._ends

    @override
    def receiver(self, edge: Edge) -> StagedReceiver:
        assert self._buffers.landing is not None
        return StagedReceiver(edge, self._buffers, self._buffers.landing)

    @override
    def sender(self, edge: Edge, ring: Recorder) -> StagedSender:
        return StagedSender(edge, ring, self._buffers.compute, self._buffers.copies, self._buffers.sums)

    @override
    def token_sender(self, edge: Edge, ring: Recorder) -> StagedTokenSender:
        return StagedTokenSender(edge, ring, self._buffers.compute.order.ledger)

    @override
    def tokens(self, ring: Recorder, edge: Edge | None) -> TokenTable:
        return LocalTokenTable() if edge is None else HostTokenTable(ring, edge, self._buffers.compute.order.ledger)

    @override
    def runner(self, parts: RunnerParts) -> CudaRunner:
        return CudaRunner(parts, self._buffers)
