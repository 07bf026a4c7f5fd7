"""What a stage keeps on its card for life, beside weights and cache: tables by slot, buffers, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from ppkernels.gpu.sampling import DeviceSampling, choose, logprobs
from torch import Tensor

from ppengine.config import EngineConfig
from ppengine.cuda.block_mover import BlockMover
from ppengine.cuda.graphs import DecodeGraphs
from ppengine.cuda.host_pool import PinnedPool
from ppengine.cuda.kv_cache import CudaKvCache
from ppengine.cuda.lanes import make_lanes
from ppengine.cuda.progress import DeviceProgress
from ppengine.cuda.streams import Event, Stream
from ppengine.models import StageModel
from ppengine.protocol.sampling import MAX_STOP_TOKENS
from ppengine.protocol.steps import MoveKind

if TYPE_CHECKING:
    from ppengine.cuda.hardware import CudaHardware

SLOTS = 1 << 16
"""Requests that a stage can know at once: sampling parameters and newest tokens are tables of fixed size."""


class CudaState:
    """Made once a boot. `latest` [SLOTS]: the newest token of each slot, where one stage both samples and embeds.

    `incoming` [tokens, H]: what came from the stage before, where graphs read it; it arrives in one of two buffers in
    turn, so that a copy does not wait for the layers that read the one before. `graphs` None: no step is a graph.
    """

    def __init__(
        self, hardware: CudaHardware, config: EngineConfig, model: StageModel, cache: CudaKvCache, host: PinnedPool
    ) -> None:
        scheduler, device = config.profile.scheduler, hardware.device
        self.device, self.batch, self.compute = device, hardware.batch, hardware.compute
        self.upload = Stream("upload", device)
        lanes = make_lanes(cache, host, hardware.driver, self.compute)
        self.mover = BlockMover(self.compute, lanes)
        self.progress = DeviceProgress(hardware.page, hardware.driver)
        for stream in (self.compute, self.upload, lanes[MoveKind.OUT].stream, lanes[MoveKind.IN].stream):
            self.progress.follow(stream)
        # Beside a request's own stop tokens, the model's ends of sequence.
        self.sampling = DeviceSampling(SLOTS, device, banned=2 * MAX_STOP_TOKENS) if model.last else None
        self.latest: Tensor | None = None
        self.incoming: Tensor | None = None
        if model.first and model.last:
            self.latest = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        if not model.first:
            size = scheduler.max_num_batched_tokens, model.boundary_size
            self.incoming = torch.zeros(size, dtype=cache.shape.dtype, device=device)
            self.arrived = [torch.zeros_like(self.incoming) for _ in range(2)]
            self.read: list[Event | None] = [None, None]
            self.turn = 0
        self.graphs: DecodeGraphs | None = None
        rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        blocks = -(-config.max_model_len // cache.shape.block_size)
        self._decodes = model, cache.reserved_layers, self.compute, rows, blocks, cache.shape.block_size
        self._vocabulary, self._dtype = model.spec.vocab_size, cache.shape.dtype
        self._warm_up()

    def capture(self, told: Callable[[int, int], None]) -> None:
        """Capture the graphs of decode steps."""
        self.graphs = DecodeGraphs(*self._decodes, latest=self.latest, hidden=self.incoming)
        self.graphs.capture(told)

    def _warm_up(self) -> None:
        """Compile what samples, before the first request would wait for it."""
        if self.sampling is None:
            return
        with self.compute.use():
            logits = torch.zeros(1, self._vocabulary, dtype=self._dtype, device=self.device)
            slots = torch.zeros(1, dtype=torch.int32, device=self.device)
            for greedy in (True, False):
                tokens = choose(logits, self.sampling, slots, slots, greedy=greedy, newest=self.latest)
            logprobs(logits, self.sampling, slots, tokens, 1)
