"""From a configuration to a stage that can run steps: weights, profile run, memory arithmetic, edges."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from ppkernels.kv_layout import layout_name
from torch import Tensor

from ppengine.checkpoint.model_shard import shard_of
from ppengine.checkpoint.model_spec import DUMMY_SEED, read_spec
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.ring import Gauge, Kind, Phase
from ppengine.common.sizes import size_text
from ppengine.common.system_memory import keep_freed_memory
from ppengine.models import StageModel, build_stage, init_dummy, load_weights
from ppengine.protocol.place import Place
from ppengine.protocol.stage_lifecycle import StageReady
from ppengine.protocol.steps import Mask, Register, Row
from ppengine.protocol.token_ids import compact
from ppengine.stage.backends.base import KvCache, KvShape, SwapSpace
from ppengine.stage.backends.hardware import Room, RunnerResources
from ppengine.stage.backends.selection import open_hardware, resolve_dtype
from ppengine.stage.batch_state import BatchState, Plan
from ppengine.stage.checks import StageChecks
from ppengine.stage.connect import Connector
from ppengine.stage.edge_addresses import AddressBook
from ppengine.stage.profile_run import largest_batches, small_steps
from ppengine.stage.rdma_agent import missing
from ppengine.stage.recorder import Recorder, Rings
from ppengine.stage.runner import Runner, RunnerParts

_MIB = 2**20
_REPORT_S = 0.2


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of a stage that it keeps for life, and its report to the core."""

    resources: RunnerResources
    ready: StageReady


class Boot:
    """Builds one stage in the order of the phases. `report` takes lines for the operator."""

    def __init__(
        self,
        config: EngineConfig,
        stage: int,
        rank: int,
        generation: int,
        rings: Rings,
        report: Callable[[str], None],
        checks: StageChecks,
    ) -> None:
        self._config = config
        self._checks = checks
        self._stage, self._rank, self._generation = stage, rank, generation
        self._rings, self._ring = rings, rings.main
        self._report = report
        self._next_report = 0.0
        self._first, self._last = stage == 0, stage == config.stages - 1
        profile = config.profile
        if profile.parallel.edges == "rdma" and config.stages > 1 and (reason := missing()):
            raise ConfigError(f"parallel.edges is rdma, but {reason}; auto uses TCP then")
        keep_freed_memory()
        self._hardware = open_hardware(config, Place(stage, rank), checks.ledger)
        self._spec = read_spec(Path(config.model_path))
        self._shard = shard_of(self._spec, rank, config.groups.tensor)
        self._dtype = resolve_dtype(profile.model.dtype, self._spec.dtype, self._hardware.half)
        self._group = self._hardware.make_group(config, Place(stage, rank), rings.main, self._spec, self._dtype)
        start, end = config.layers[stage]
        self._shape = KvShape(
            end - start, profile.memory.block_size, self._shard.num_kv_heads, self._spec.head_dim, self._dtype
        )

    def run(self) -> Loaded:
        """Load, profile and reserve. Raises ConfigError with one line, and errors of loading."""
        self._ring.phase(Phase.LOAD)
        with self._ring.operation(Kind.LOAD):
            model = self._load()
        activations = self._activations(model)
        ready = self._ready(model, activations)
        room = Room(self._shape, ready.reserved_blocks, ready.swap_blocks)
        resources = self._hardware.make_resources(self._config, model, room, self._captured)
        ready.peak_bytes = self._hardware.peak(model.weights_bytes, activations, resources.cache.mapped_bytes)
        if resources.swap.fd >= 0:
            ready.slots_fd, ready.slot_bytes = resources.swap.fd, self._shape.block_bytes
            ready.slot_layout = layout_name(resources.cache.layers[0].device)
        self._publish(ready, resources.cache, resources.swap)
        return Loaded(resources, ready)

    def _captured(self, done: int, total: int) -> None:
        self._ring.phase(Phase.CAPTURE)
        self._report(f"stage {self._stage}: {done}/{total} graphs")

    def connect(
        self,
        loaded: Loaded,
        generation: int,
        book: AddressBook,
        left: Callable[[], bool],
        meanwhile: Callable[[], bool],
        late_masks: Callable[[int], list[Mask]],
    ) -> Runner:
        """Return a runner that knows no request, with edges to the neighbours of `generation`.

        `book` has their addresses. `meanwhile` is called while a launched step waits for a message,
        `late_masks` for masks that come behind their step.
        Raises SupersededError when `left()` is true before all neighbours are there, PeerLostError
        when one goes before that.
        """
        if len(self._config.groups) > 1:
            self._report(f"stage {self._stage}: waits for its neighbours")
        resources = loaded.resources
        connector = Connector(
            config=self._config,
            stage=self._stage,
            rank=self._rank,
            book=book,
            resources=resources,
            rings=self._rings,
            left=left,
            meanwhile=meanwhile if resources.launches else None,
        )
        # The ranks of a stage first: none of them waits for another stage before.
        connector.join(self._group, generation)
        try:
            ends = connector.connect()
        except BaseException:
            self._group.close()
            raise
        parts = RunnerParts(
            stage=self._stage,
            rank=self._rank,
            generation=generation,
            model=resources.model,
            state=BatchState(self._config.max_model_len, self._shape.block_size),
            cache=resources.cache,
            swap=resources.swap,
            ring=self._ring,
            ends=ends,
            checks=self._checks,
            over=left,
            late_masks=late_masks,
            group=self._group,
        )
        return resources.runner(parts)

    def _load(self) -> StageModel:
        folder = Path(self._config.model_path)
        model = build_stage(
            self._spec,
            layers=self._config.layers[self._stage],
            first=self._first,
            last=self._last,
            dtype=self._dtype,
            device=self._hardware.device,
            max_model_len=self._config.max_model_len,
            shard=self._shard,
            group=self._group,
        )
        if self._config.profile.model.load_format == "dummy":
            init_dummy(model, DUMMY_SEED)
        else:
            load_weights(model, folder, progress=self._loaded)
        model.pack()
        return model

    def _loaded(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next_report and done < total:
            return
        self._next_report = now + _REPORT_S
        self._ring.phase(Phase.LOAD)  # Progress: the budget of the phase is for a load without any.
        self._report(f"stage {self._stage}: {done}/{total} tensors")

    def _activations(self, model: StageModel) -> int:
        """Bytes that the largest batch needs beside the weights, the receive buffer included."""
        scheduler, length = self._config.profile.scheduler, self._config.max_model_len
        state = BatchState(length, self._shape.block_size)
        state.register([Register(0, "profile", compact(), 0, 0.0, 1.0, 0, 0, 0, 0, [], -1)])
        # Every row writes and reads the null block: sizes alone count.
        cache, device = self._hardware.scratch(self._shape), self._hardware.device

        def inputs(plan: Plan) -> Tensor:
            return torch.zeros(int(plan.query_start[-1]), model.boundary_size, dtype=self._dtype, device=device)

        def forward(plan: Plan, hidden: Tensor) -> None:
            batch = self._hardware.batch(plan.batch)
            if self._first:
                hidden = model.embed(torch.zeros(len(hidden), dtype=torch.int64, device=device), batch.positions)
            out = model.run(hidden, batch, cache)
            if self._last:
                model.whole_logits(out[torch.from_numpy(plan.last_tokens).to(device)])

        def run(rows: list[Row], ring: Recorder | None = None) -> int:
            plan = state.plan(rows)
            hidden, warm = inputs(plan), False

            def once() -> None:
                nonlocal warm
                # The first of two is longer: it loads code and allocates memory.
                with self._hardware.recording(ring, len(hidden)) if ring and warm else contextlib.nullcontext():
                    forward(plan, hidden)
                warm = True

            return self._hardware.activations(once)

        peak = 0
        with torch.inference_mode():
            self._ring.phase(Phase.COMPILE)
            self._report(f"stage {self._stage}: compiles kernels, or loads compiled ones")
            for rows in small_steps(scheduler.max_num_batched_tokens, length):
                plan = state.plan(rows)
                forward(plan, inputs(plan))
            self._ring.phase(Phase.PROFILE)
            self._report(f"stage {self._stage}: profile run")
            if self._config.allow_faults:
                from ppengine.drills.start_faults import before_profile

                before_profile(Path(self._config.run_dir), self._stage, device)
            # Recorded: so the diagnosis knows from the first step on how long the least and the most work takes.
            largest = largest_batches(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, length)
            for rows in [[Row(0, length - 1, 1, True, 0)], *largest]:
                try:
                    peak = max(peak, run(rows, self._ring))
                except torch.OutOfMemoryError as error:
                    raise ConfigError(_no_room(rows, model.weights_bytes, error)) from None
        return peak + self._buffer_bytes(model)

    def _buffer_bytes(self, model: StageModel) -> int:
        if self._first:
            return 0
        tokens = self._config.profile.scheduler.max_num_batched_tokens
        return tokens * model.boundary_size * self._dtype.itemsize

    def _ready(self, model: StageModel, activations: int) -> StageReady:
        memory, shape = self._config.profile.memory, self._shape
        total, quantum = self._hardware.total, self._hardware.quantum_blocks(shape)
        peak = self._hardware.peak(model.weights_bytes, activations)
        reserved = (total - peak) // shape.block_bytes
        if reserved < 1:
            least = -(-(peak + shape.block_bytes) // _MIB)
            raise ConfigError(
                f"does not fit: weights {size_text(model.weights_bytes)} + activations {size_text(activations)} of "
                f"{size_text(total)} leave no room for a block of {size_text(shape.block_bytes)}; set "
                f"memory.device_mib to at least {least}, lower scheduler.max_num_batched_tokens or add stages"
            )
        return StageReady(
            stage=self._stage,
            rank=self._rank,
            generation=self._generation,
            pid=os.getpid(),
            host=self._config.node_name,
            layers=list(self._config.layers[self._stage]),
            device_kind=self._hardware.kind,
            device_name=self._hardware.name,
            device_uuid=self._hardware.uuid,
            total_bytes=total,
            weights_bytes=model.weights_bytes,
            peak_bytes=peak,
            block_bytes=shape.block_bytes,
            quantum_blocks=quantum,
            reserved_blocks=reserved,
            swap_blocks=int(memory.swap_space_gib * 2**30) // shape.block_bytes,
        )

    def _publish(self, ready: StageReady, cache: KvCache, swap: SwapSpace) -> None:
        figures = {
            Gauge.TOTAL_BYTES: ready.total_bytes,
            Gauge.WEIGHTS_BYTES: ready.weights_bytes,
            Gauge.OTHER_BYTES: ready.peak_bytes - ready.weights_bytes,
            Gauge.KV_BASE: cache.base,
            Gauge.KV_LENGTH: cache.length,
            Gauge.KV_RESERVED_BYTES: cache.reserved * ready.block_bytes,
            Gauge.KV_MAPPED_BYTES: cache.mapped * ready.block_bytes,
            Gauge.MAPPED_BLOCKS: cache.mapped,
            Gauge.SWAP_BLOCKS: ready.swap_blocks,
            Gauge.BLOCK_BYTES: ready.block_bytes,
            Gauge.SWAP_BASE: swap.base,
            Gauge.SWAP_LENGTH: swap.length,
            Gauge.SWAP_SHARED: swap.fd >= 0,
        }
        for gauge, value in figures.items():
            self._ring.gauge(gauge, value)


def _no_room(rows: list[Row], weights: int, error: torch.OutOfMemoryError) -> str:
    """Return the error line of a profile run that ran out of memory, without the advice of torch's allocator."""
    tokens = sum(row.count for row in rows)
    reason = str(error).partition(" If reserved but")[0]
    return (
        f"out of memory in the profile run of {tokens} tokens in {len(rows)} rows, beside weights of "
        f"{size_text(weights)}: {reason} Lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs, add stages, "
        "or free what other processes hold of the card"
    )
