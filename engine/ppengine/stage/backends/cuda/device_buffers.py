"""Memory that a stage keeps on its card for life, beside weights and cache: tables by slot, buffers, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from ppkernels.block_copy import copy_layers
from ppkernels.gpu.adjustments import DeviceAdjustments
from ppkernels.gpu.sampling import DeviceSampling, choose, choose_adjusted, logprobs
from ppkernels.gpu.token_masks import masked
from ppkernels.shared_prefixes import find_shared
from torch import Tensor

from ppengine.common.config import EngineConfig
from ppengine.common.device_page import DevicePage
from ppengine.models import StageModel
from ppengine.protocol.sampling import MAX_STOP_TOKENS
from ppengine.protocol.steps import MoveKind
from ppengine.protocol.token_mask import TokenMask
from ppengine.stage.backends.cuda.block_mover import BlockMover
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.backends.cuda.chunk_graphs import ChunkGraphs
from ppengine.stage.backends.cuda.copied_sums import AT_ONCE_ROWS
from ppengine.stage.backends.cuda.copy_lanes import make_lanes
from ppengine.stage.backends.cuda.decode_graphs import DecodeGraphs
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache
from ppengine.stage.backends.cuda.host_copies import HostCopies
from ppengine.stage.backends.cuda.message_sums import MessageSums
from ppengine.stage.backends.cuda.peer_memory import SharedMemory, message_slot_bytes
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedSwapSpace
from ppengine.stage.backends.cuda.stream_progress import DeviceProgress
from ppengine.stage.backends.cuda.streams import Event, Stream
from ppengine.stage.ledger.kv_block_buffers import BlockBuffers
from ppengine.stage.prompt_positions import Positions, score

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings

SLOTS = 1 << 16
"""Requests that a stage can know at once: sampling parameters and newest tokens are tables of fixed size."""
LANDING_SLOTS = 3
"""Messages that may have come and not been read: two stages have as many in flight if the core schedules ahead."""
WARM_ROWS = (1, 2, 16)
"""Numbers of rows for which kernels may differ: 1, those that 16 divides, and others."""


class Landing:
    """Hidden states from the stage before. They arrive in slots of `memory`, which messages take in turn.

    So a copy does not wait for the layers that read the message before. The stage before writes the
    slots itself if its device can reach them. `incoming` [tokens, H] is the layers' input, where
    graphs read it.
    """

    def __init__(self, driver: Driver, uuid: str, compute: Stream, tokens: int, width: int, dtype: torch.dtype) -> None:
        self.incoming = torch.zeros(tokens, width, dtype=dtype, device=driver.device)
        size = self.incoming.nbytes
        self.memory = SharedMemory(driver, uuid, message_slot_bytes(size), LANDING_SLOTS)
        self.slots: list[Tensor] = [
            self.memory.slot(turn)[:size].view(dtype).view(tokens, width) for turn in range(LANDING_SLOTS)
        ]
        self.read: list[Event | None] = [None] * LANDING_SLOTS
        """By slot: the end of its newest read, if this host filled it."""
        self.turn = 0
        """Slot that this host filled last."""
        self.slot_buffers = [compute.buffer(f"landing {turn}", size) for turn in range(LANDING_SLOTS)]
        """The slots as the ledger knows them."""
        self.buffer = compute.buffer("incoming", size)
        """`incoming` as the ledger knows it."""


class DeviceBuffers:
    """Made once a boot.

    `latest` [SLOTS] has the newest token of each slot, on the stage that embeds them. With several
    stages it lies in `token_memory`, which the last stage writes itself if its device can. If it
    cannot, it writes a table of its own, which no kernel reads: so sampling has one form. A step is
    the first of `graphs` that serves it.
    """

    def __init__(
        self,
        driver: Driver,
        uuid: str,
        page: DevicePage,
        compute: Stream,
        config: EngineConfig,
        model: StageModel,
        cache: CudaKvCache,
        swap: PinnedSwapSpace,
    ) -> None:
        scheduler, device = config.profile.scheduler, driver.device
        self.uuid, self.device, self.compute = uuid, device, compute
        order = compute.order
        self.upload = Stream("upload", device, purpose="upload", order=order)
        self.kv_blocks = BlockBuffers(order.ledger, compute.device)
        lanes = make_lanes(cache, swap, driver, compute, blocks=self.kv_blocks)
        self.mover = BlockMover(compute, lanes)
        self.copies = HostCopies(order.ledger)
        self.sums = MessageSums(compute, device)
        self.progress = DeviceProgress(page, driver)
        for stream in (compute, self.upload, lanes[MoveKind.OUT].stream, lanes[MoveKind.IN].stream):
            self.progress.follow(stream)
        self.late_sampling: Stream | None = None
        """Samples behind masks that come later, beside the layers of the next step."""
        if model.last and not model.first:
            # First in line on the card: the first stage waits for its tokens, and the layers beside it do not.
            raw = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self.late_sampling = Stream("late sampling", device, raw, purpose="sampling", order=order)
            self.progress.follow(self.late_sampling)
        self.sampling: DeviceSampling | None = None
        self.adjustments: DeviceAdjustments | None = None
        if model.last:
            # Beside a request's own stop tokens, the model's ends of sequence: a checkpoint may have more of them.
            ends = max(MAX_STOP_TOKENS, len(model.spec.eos_token_ids))
            self.sampling = DeviceSampling(SLOTS, device, banned=MAX_STOP_TOKENS + ends)
            vocabulary, longest = model.spec.vocab_size, config.max_model_len + 1
            self.adjustments = DeviceAdjustments(SLOTS, vocabulary, longest, device)
        self.latest: Tensor | None = None
        self.token_memory: SharedMemory | None = None
        self.landing: Landing | None = None
        if not model.first:
            most, dtype = scheduler.max_num_batched_tokens, cache.shape.dtype
            self.landing = Landing(driver, uuid, compute, most, model.boundary_size, dtype)
            self.input_buffer = self.landing.buffer
            """The layers' input as the ledger knows it."""
            if model.last:
                self.latest = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        else:
            if model.last:
                self.latest = torch.zeros(SLOTS, dtype=torch.int32, device=device)
            else:
                self.token_memory = SharedMemory(driver, uuid, SLOTS * torch.int32.itemsize)
                self.latest = self.token_memory.slot(0).view(torch.int32)
            self.input_buffer = compute.buffer("newest tokens", self.latest.nbytes)
        self.graphs: list[DecodeGraphs | ChunkGraphs] = []
        self._stage = model, cache.reserved_layers, compute
        self._tokens, self._requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        # The core spreads decodes evenly over as many micro-batches as there are stages.
        self._rows = min(-(-scheduler.max_num_seqs // config.stages), self._tokens)
        if (ranks := model.group.size) > 1:
            # Sums by copies are no part of a graph: it is captured before the ranks meet.
            self._rows = min(self._rows, AT_ONCE_ROWS * ranks)
        self._blocks = -(-config.max_model_len // cache.shape.block_size), cache.shape.block_size
        self._vocabulary, self._dtype = model.spec.vocab_size, cache.shape.dtype
        self._in_pipeline, self._width = not (model.first and model.last), model.boundary_size

    @property
    def incoming(self) -> Tensor | None:
        """Hidden states [tokens, H] from the stage before; None on the first stage."""
        return None if self.landing is None else self.landing.incoming

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture the graphs of decode steps and of steps with short prompts; `progress(done, total)` for each."""
        decodes = DecodeGraphs(*self._stage, self._rows, *self._blocks, latest=self.latest, hidden=self.incoming)
        chunks = ChunkGraphs(
            *self._stage, self._tokens, self._requests, *self._blocks, latest=self.latest, hidden=self.incoming
        )
        pool, total = torch.cuda.graph_pool_handle(), len(decodes.shapes) + len(chunks.shapes)
        chunks.capture(pool, lambda done: progress(done, total))
        decodes.capture(pool, lambda done: progress(done + len(chunks.shapes), total))
        self.graphs = [decodes, chunks]

    def warm_up(self) -> None:
        """Compile the kernels beside the layers, before the first request would wait for them."""
        find_shared(np.zeros((1, 1), np.int64), np.ones(1, np.int64), np.ones(1, np.int64), self._blocks[1], 1)
        if self._in_pipeline:
            self.sums.warm_up(torch.zeros(1, self._width, dtype=self._dtype, device=self.device))
        group = self._stage[0].group
        if isinstance(group, CardGroup):
            group.warm_up()
        with self.compute.use():
            layers = self._stage[1]
            copy_layers(layers, layers, [(0, 0)])  # the null block
        if self.sampling is None or self.adjustments is None:
            return
        with self.compute.use():
            logits = torch.zeros(1, self._vocabulary, dtype=self._dtype, device=self.device)
            slots = torch.zeros(1, dtype=torch.int32, device=self.device)
            for greedy in (True, False):
                tokens = choose(logits, self.sampling, slots, slots, greedy=greedy, newest=self.latest)
                choose_adjusted(
                    logits, self.sampling, self.adjustments, slots, slots, greedy=greedy, newest=self.latest
                )
            logprobs(logits, self.sampling, slots, tokens, 1)
            if isinstance(group, CardGroup):
                shard = self._stage[0].shard
                part = logits.new_zeros(1, shard.vocabulary_widths[group.rank])
                group.choose_greedy(part, shard, self.sampling, slots, slots, self.latest)
                group.choose_below(part, shard, self.sampling, slots, slots, 1, self.latest)
            # Prompts that are scored have any number of rows, and no graph.
            for rows in WARM_ROWS:
                hidden = torch.zeros(rows, self._width, dtype=self._dtype, device=self.device)
                score(Positions("", 0, 1, [0] * rows, 1), hidden, self._stage[0].whole_logits)
            masked(logits, {0: self._no_token})
        if self.late_sampling is not None:
            self._warm_up_late(self.late_sampling, self.sampling)

    def _warm_up_late(self, late: Stream, sampling: DeviceSampling) -> None:
        """Have torch take the memory of late sampling, so that it is counted, and no later step runs out of memory.

        torch keeps it for each stream: on compute copies of logits for three steps under way, the rest on `late`.
        """
        rows, device = min(self._requests, self._tokens), self.device
        with self.compute.use():
            # One of the largest step, and two of decodes, which the core spreads over micro-batches.
            sizes = [(count, self._vocabulary) for count in (rows, self._rows, self._rows)]
            logits = [torch.zeros(size, dtype=self._dtype, device=device) for size in sizes]
            slots = torch.zeros(rows, dtype=torch.int32, device=device)
        late.wait(self.compute.record("logits for warming up"))
        with late.use():
            allowed = masked(logits[0], {0: self._no_token})
            choose(allowed, sampling, slots, slots, greedy=False, newest=self.latest)
        late.synchronize()

    @property
    def _no_token(self) -> TokenMask:
        return TokenMask(bytes(4 * -(-self._vocabulary // 32)))
