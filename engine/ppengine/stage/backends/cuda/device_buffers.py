"""What a stage keeps on its card for life, beside weights and cache: tables by slot, buffers, graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from ppkernels.gpu.sampling import DeviceSampling, choose, logprobs
from torch import Tensor

from ppengine.common.config import EngineConfig
from ppengine.models import StageModel
from ppengine.protocol.sampling import MAX_STOP_TOKENS
from ppengine.protocol.steps import MoveKind
from ppengine.stage.backends.cuda.block_mover import BlockMover
from ppengine.stage.backends.cuda.chunk_graphs import ChunkGraphs
from ppengine.stage.backends.cuda.copy_lanes import make_lanes
from ppengine.stage.backends.cuda.decode_graphs import DecodeGraphs
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache
from ppengine.stage.backends.cuda.peer_memory import SharedMemory
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedPool
from ppengine.stage.backends.cuda.stream_progress import DeviceProgress
from ppengine.stage.backends.cuda.streams import Event, Stream
from ppengine.stage.ledger.kv_block_buffers import BlockBuffers

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.cuda_hardware import CudaHardware

SLOTS = 1 << 16
"""Requests that a stage can know at once: sampling parameters and newest tokens are tables of fixed size."""
LANDING_SLOTS = 3
"""Messages that may have come and not been read: what two stages have in flight where the core schedules ahead."""


class CudaState:
    """Made once a boot. `latest` [SLOTS]: the newest token of each slot, on the stage that embeds them.

    `incoming` [tokens, H]: what came from the stage before, where graphs read it; it arrives in slots of `landing` in
    turn, so that a copy does not wait for the layers that read the one before. Neighbours write into `landing` and
    `table`, which is behind `latest`, themselves where they can. A step is the
    first of `graphs` that serves it.
    """

    def __init__(
        self, hardware: CudaHardware, config: EngineConfig, model: StageModel, cache: CudaKvCache, host: PinnedPool
    ) -> None:
        scheduler, device = config.profile.scheduler, hardware.device
        self.device, self.batch, self.compute = device, hardware.batch, hardware.compute
        order = self.compute.order
        self.upload = Stream("upload", device, purpose="upload", order=order)
        self.blocks = BlockBuffers(order.ledger, self.compute.device)
        lanes = make_lanes(cache, host, hardware.driver, self.compute, blocks=self.blocks)
        self.mover = BlockMover(self.compute, lanes)
        self.progress = DeviceProgress(hardware.page, hardware.driver)
        for stream in (self.compute, self.upload, lanes[MoveKind.OUT].stream, lanes[MoveKind.IN].stream):
            self.progress.follow(stream)
        # Beside a request's own stop tokens, the model's ends of sequence.
        self.sampling = DeviceSampling(SLOTS, device, banned=2 * MAX_STOP_TOKENS) if model.last else None
        self.uuid: str = hardware.uuid
        self.latest: Tensor | None = None
        self.table: SharedMemory | None = None
        self.incoming: Tensor | None = None
        self.landing: SharedMemory | None = None
        if model.first and model.last:
            self.latest = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        elif model.first:
            self.table = SharedMemory(hardware.driver, self.uuid, SLOTS * torch.int32.itemsize)
            self.latest = self.table.slot(0).view(torch.int32)
        else:
            size, dtype = (scheduler.max_num_batched_tokens, model.boundary_size), cache.shape.dtype
            self.incoming = torch.zeros(size, dtype=dtype, device=device)
            self.landing = SharedMemory(hardware.driver, self.uuid, self.incoming.nbytes, LANDING_SLOTS)
            self.arrived = [self.landing.slot(turn).view(dtype).view(size) for turn in range(LANDING_SLOTS)]
            self.landed = [
                self.compute.buffer(f"landing {turn}", self.incoming.nbytes) for turn in range(LANDING_SLOTS)
            ]
            self.read: list[Event | None] = [None] * LANDING_SLOTS
            self.turn = 0
        fed = "newest tokens" if self.incoming is None else "incoming"
        held = self.latest if self.incoming is None else self.incoming
        self.fed = self.compute.buffer(fed, 0 if held is None else held.nbytes)
        """What the layers begin with, as the ledger knows it; `landed` are the slots."""
        self.graphs: list[DecodeGraphs | ChunkGraphs] = []
        self._stage = model, cache.reserved_layers, self.compute
        self._tokens = scheduler.max_num_batched_tokens
        # The core spreads decodes evenly over as many micro-batches as there are stages.
        self._rows = min(-(-scheduler.max_num_seqs // config.stages), self._tokens)
        self._blocks = -(-config.max_model_len // cache.shape.block_size), cache.shape.block_size
        self._vocabulary, self._dtype = model.spec.vocab_size, cache.shape.dtype
        self._latest_elsewhere = model.last and not model.first

    def capture(self, told: Callable[[int, int], None]) -> None:
        """Capture the graphs of decode steps and of steps with short prompts."""
        decodes = DecodeGraphs(*self._stage, self._rows, *self._blocks, latest=self.latest, hidden=self.incoming)
        chunks = ChunkGraphs(*self._stage, self._tokens, *self._blocks, latest=self.latest, hidden=self.incoming)
        pool, total = torch.cuda.graph_pool_handle(), len(decodes.sizes) + len(chunks.sizes)
        chunks.capture(pool, lambda done: told(done, total))
        decodes.capture(pool, lambda done: told(done + len(chunks.sizes), total))
        self.graphs = [decodes, chunks]

    def warm_up(self) -> None:
        """Compile what samples, before the first request would wait for it."""
        if self.sampling is None:
            return
        with self.compute.use():
            logits = torch.zeros(1, self._vocabulary, dtype=self._dtype, device=self.device)
            slots = torch.zeros(1, dtype=torch.int32, device=self.device)
            tables = [self.latest, slots.clone()] if self._latest_elsewhere else [self.latest]
            for greedy, newest in itertools.product((True, False), tables):
                tokens = choose(logits, self.sampling, slots, slots, greedy=greedy, newest=newest)
            logprobs(logits, self.sampling, slots, tokens, 1)
