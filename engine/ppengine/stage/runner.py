"""Executing one step: memory work in the protocol's order, then the rows through this stage's layers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from ppkernels.block_copy import copy_layers
from torch import Tensor

from ppengine.common.ring import Gauge, Kind
from ppengine.models import StageModel
from ppengine.protocol.steps import TOKEN_ON_DEVICE, Mapped, Move, MoveKind, Retired, Sampled, Step
from ppengine.stage.backends.cpu.kv_cache import KvCache, SwapPool
from ppengine.stage.batch_state import BatchState, Plan
from ppengine.stage.checks import StageChecks
from ppengine.stage.finite_check import FiniteCheck
from ppengine.stage.pending_step import Pending
from ppengine.stage.recorder import Recorder
from ppengine.stage.sampler import sample_rows
from ppengine.stage.token_return import TokenTable
from ppengine.stage.transport import Inlet, Outbox

log = logging.getLogger("ppengine.stage")

# Plain integers: with cold caches, looking up a member of an enum costs as much as the record.
_RECEIVE, _EMBED, _FORWARD = Kind.RECEIVE.value, Kind.EMBED.value, Kind.FORWARD.value
_HEAD, _SAMPLE, _SEND = Kind.HEAD.value, Kind.SAMPLE.value, Kind.SEND.value
MOVE_RECORDS = {MoveKind.DEVICE: Kind.COPY, MoveKind.OUT: Kind.SWAP_OUT, MoveKind.IN: Kind.SWAP_IN}


class Runner:
    """One stage's model, memory and edges. Its caller hands it steps in order, from one thread.

    `launches`: whether steps are only launched, and done later. The first stage has no `inlet`. `outbox` leads to the
    next stage; on the last stage it leads back to the first one, where the core schedules ahead. `tokens` is the first
    stage's table of sampled tokens.
    """

    launches = False

    def __init__(
        self,
        *,
        stage: int,
        rank: int,
        generation: int,
        model: StageModel,
        state: BatchState,
        cache: KvCache,
        host: SwapPool,
        ring: Recorder,
        inlet: Inlet | None,
        outbox: Outbox | None,
        tokens: TokenTable | None,
        checks: StageChecks,
    ) -> None:
        self.stage, self.rank, self.generation = stage, rank, generation
        self.cache = cache
        self.outbox = outbox
        self._model = model
        self._state = state
        self._host = host
        self._ring = ring
        self._inlet = inlet
        self._tokens = tokens
        self._checks = checks
        self.card: Any = None
        """What a GPU keeps for life; see `ppengine.stage.backends.cuda.cuda_runner`."""
        self._finite = FiniteCheck(stage, model, state, cache, checks)
        self._change: tuple[int, int] | None = None
        """Step and blocks of the change of the cache that has not ended."""
        self._mapped: Mapped | None = None

    def while_waiting(self, act: Callable[[], bool], over: Callable[[], bool]) -> None:
        """Have `act` called again and again while this stage waits for a message of another, until it returns False.

        `over` says when a device is not to be waited for any more.
        """
        if self._inlet is not None:
            self._inlet.edge.meanwhile = act
        if self._tokens is not None and self._tokens.edge is not None:
            self._tokens.edge.meanwhile = act

    def check_neighbours(self) -> None:
        """Raise PeerLostError where a device may wait in vain: the neighbour that it waits for is gone."""

    def release(self) -> None:
        """Let go what waits on a device for a neighbour, whatever comes of it; any thread may."""

    def leave(self) -> None:
        """Close all edges, whatever is under way on them; what this runner knew of requests goes with it."""
        for end in (self._inlet, self._tokens, self.outbox):
            if end is not None:
                end.close()

    def announce(self, step: Step) -> None:
        """Begin what can be begun of a step that has come: a receive of the transport."""
        if self._inlet is not None and step.rows:
            self._inlet.expect(step.number, sum(row.count for row in step.rows))

    def execute(self, step: Step) -> Pending:
        """Do or launch one step; its acknowledgement comes when it is done. Raises what model or transport raise."""
        if step.checks is not None:
            self._checks.apply(step.checks)
        self._state.release(step.release)
        if self._tokens is not None and step.release:
            self._tokens.forget(step.release)
        self._register(step)
        self._state.set_tables(step.tables)
        retired = Retired(self.generation, step.number, self.stage, self.rank)
        pending = Pending(retired)
        if step.map_blocks is not None:
            self._map(step.number, step.map_blocks)
        if step.moves:
            self._move(step.number, step.moves, pending)
        if step.rows:
            try:
                self._rows(step, pending)
            finally:
                self._ring.end_part()
        return pending

    def _register(self, step: Step) -> None:
        self._state.register(step.register)

    @property
    def changing(self) -> bool:
        """Whether `mapped` has something to return, now or later."""
        return self._change is not None or self._mapped is not None

    def mapped(self) -> Mapped | None:
        """Return, once, what came of the newest change of the cache, when it has ended; does not wait."""
        self._end_change()
        mapped, self._mapped = self._mapped, None
        return mapped

    def _map(self, number: int, blocks: int) -> None:
        """Begin a change of the cache. What need not be prepared (on a CPU) ends within the step."""
        with self._ring.operation(Kind.MAP, number, size=blocks):
            self.cache.prepare(blocks)
            self._change = number, blocks
            self._end_change()

    def _end_change(self) -> None:
        if self._change is None or not self.cache.prepared(self._change[1]):
            return
        (number, blocks), self._change = self._change, None
        error = self.cache.map_blocks(blocks)
        self._ring.gauge(Gauge.MAPPED_BLOCKS, self.cache.mapped)
        self._ring.gauge(Gauge.KV_MAPPED_BYTES, self.cache.mapped * self.cache.shape.block_bytes)
        log.info("step %d maps %d blocks: %s", number, blocks, error or "done")
        self._mapped = Mapped(self.generation, number, self.stage, self.rank, self.cache.mapped, error)

    def _move(self, number: int, moves: list[Move], pending: Pending) -> None:
        for kind, group in itertools.groupby(moves, key=lambda move: MoveKind(move.kind)):
            pairs = [(move.src, move.dst) for move in group]
            size = len(pairs) * self.cache.shape.block_bytes
            with self._ring.operation(MOVE_RECORDS[kind], number, size=size, detail=len(pairs)):
                source = self._host.layers if kind is MoveKind.IN else self.cache.layers
                target = self._host.layers if kind is MoveKind.OUT else self.cache.layers
                copy_layers(source, target, pairs)

    def _rows(self, step: Step, pending: Pending) -> None:
        ring, number = self._ring, step.number
        plan = self._state.plan(step.rows)
        count = int(plan.query_start[-1])
        if self._inlet is None:
            hidden = self._embed(number, plan)
        else:
            ring.part(_RECEIVE, number, self._inlet.edge.peer, count)
            hidden = self._inlet.take(number)
        ring.part(_FORWARD, number, -1, count, self._model.layer_range[0])
        out = self._model.run(hidden, plan.batch, self.cache.layers)
        if self._checks.looks_for_non_finite:
            self._finite.look(number, plan, hidden, out)
        if self._model.last:
            pending.retired.sampled = self._finish(number, plan, out)
            return
        self._send(number, out.contiguous())
        if self._tokens is not None and len(plan.sampled):
            self._tokens.expect(number, plan.sampled_slots)

    def _embed(self, number: int, plan: Plan) -> Tensor:
        on_device = plan.slots[plan.tokens == TOKEN_ON_DEVICE]
        if len(on_device):
            if self._tokens is None:
                raise ValueError(f"step {number} takes tokens from the device, but scheduler.schedule_ahead is off")
            on_device = self._tokens.tokens(on_device)
        self._ring.part(_EMBED, number, -1, int(plan.query_start[-1]))
        ids = torch.from_numpy(self._state.input_ids(plan, on_device))
        return self._model.embed(ids, plan.batch.positions)

    def _finish(self, number: int, plan: Plan, hidden: Tensor) -> list[Sampled]:
        """Sample on the last stage, and let the first one know."""
        rows = len(plan.sampled)
        if not rows:
            return []
        self._ring.part(_HEAD, number, -1, rows)
        wanted = hidden if rows == len(hidden) else hidden[torch.from_numpy(plan.last_tokens)]
        logits = self._model.logits(wanted)
        if self._checks.looks_for_non_finite:
            self._finite.look_at_logits(number, plan, logits)
        self._ring.part(_SAMPLE, number, -1, rows)
        slots, positions = plan.sampled_slots, plan.ends[plan.sampled]
        tokens, sampled = sample_rows(logits, self._state.requests, slots.tolist(), positions.tolist())
        if self.outbox is not None:
            self._send(number, tokens)
        elif self._tokens is not None:
            self._tokens.store(slots, tokens.numpy())
        return sampled

    def _send(self, number: int, tensor: Tensor) -> None:
        if self.outbox is None:
            return
        self._ring.part(_SEND, number, self.outbox.edge.peer, tensor.nbytes)
        try:
            self.outbox.put(number, tensor)
        finally:
            self._ring.end_part()
