"""Executing steps on a GPU: launched without waiting, acknowledged when their events are done.

All work of a stage is on its compute stream, swaps excepted (`block_mover`). Between cards that
reach each other, messages are part of that stream (`device_edges`). Other messages go through
pinned host memory (`staged_edges`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from ppkernels.shared_prefixes import least_saved
from torch import Tensor
from typing_extensions import override

from ppengine.common.ring import Kind
from ppengine.protocol.steps import TOKEN_ON_DEVICE, Mask, Move, MoveKind, Register, Step
from ppengine.stage.backends.cuda.chunk_graphs import FEW_ROWS, ChunkGraphs
from ppengine.stage.backends.cuda.decode_graphs import DecodeGraphs, Launched, embed
from ppengine.stage.backends.cuda.device_buffers import DeviceBuffers
from ppengine.stage.backends.cuda.device_timing import DeviceTimer, TimedWork
from ppengine.stage.backends.cuda.late_sampling import LateSampling
from ppengine.stage.backends.cuda.split_sampling import BestTokens, best_tokens
from ppengine.stage.backends.cuda.staging import batch_on_device
from ppengine.stage.backends.cuda.step_sampler import StepSampler
from ppengine.stage.batch_state import Ints, Plan
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.pending_step import Pending
from ppengine.stage.prompt_positions import Positions, positions_of, score, scores_of, wants_positions
from ppengine.stage.runner import MOVE_RECORDS, Runner, RunnerParts
from ppengine.stage.wire import SupersededError


class _Prepared(NamedTuple):
    """The host's part of a step, before its launches."""

    number: int
    plan: Plan
    ids: Ints
    """[T]: input tokens on the first stage, zeros on others."""
    graphs: DecodeGraphs | ChunkGraphs | None
    """Those that have its integers; None: it is launched operation by operation."""


class CudaRunner(Runner):
    """A runner whose steps are launched, and done later."""

    def __init__(self, parts: RunnerParts, buffers: DeviceBuffers) -> None:
        super().__init__(parts)
        self.buffers = buffers
        self._timer, self._sampler = DeviceTimer(self._ring), StepSampler(parts, buffers)
        self._late = LateSampling(parts, buffers, self._sampler)
        self._prepared: _Prepared | None = None
        """The step that comes next."""
        order = buffers.compute.order

        def look() -> None:
            self._ring.tick()
            self.check_neighbours()
            if parts.over():
                raise SupersededError("the device was waited for")

        order.watch_waits(look, lambda: self._ring.operation(Kind.DEVICE, order.step))

    @override
    def execute(self, step: Step) -> Pending:
        self.buffers.progress.step = self.buffers.compute.order.step = step.number
        return super().execute(step)

    @override
    def prepare(self, step: Step) -> None:
        # Launches of memory work and of new requests belong behind the step that waits, and so do new checks. The first
        # stage knows the input tokens behind that step alone.
        first, begins = self._receiver is None, step.register or step.release or step.moves
        if first or begins or not step.rows or step.map_blocks is not None or step.checks is not None:
            return
        if self._prepared is None or self._prepared.number != step.number:
            self._state.set_tables(step.tables)
            self._prepared = self._planned(step)

    @override
    def leave(self) -> None:
        """Wait for the device, then close all edges. Raises TimeoutError if the device does not end its work."""
        self.buffers.compute.drain([self.release])
        if self.buffers.late_sampling is not None:
            self.buffers.late_sampling.drain([self.release])
        # Compute does not wait for what goes out, or is loaded. It would land in blocks and slots of later steps.
        self.buffers.mover.drain()
        self.buffers.kv_blocks.forget()
        super().leave()

    @override
    def _registered(self, registers: list[Register]) -> None:
        if registers:
            self._late.before(register.slot for register in registers)
        self._sampler.register(registers)

    @property
    @override
    def lacks_masks(self) -> int:
        return self._late.number

    @override
    def sample_late(self, masks: list[Mask]) -> None:
        self._late.sample(masks)

    @override
    def _move(self, number: int, moves: list[Move], pending: Pending) -> None:
        for kind, group in itertools.groupby(moves, key=lambda move: MoveKind(move.kind)):
            pairs = [(move.src, move.dst) for move in group]
            size = len(pairs) * self.cache.shape.block_bytes
            with self._ring.operation(MOVE_RECORDS[kind], number, size=size, detail=len(pairs)):
                event = self.buffers.mover.move(kind, pairs)
            if event is not None:
                pending.until(event)

    @override
    def _rows(self, step: Step, pending: Pending) -> None:
        number, buffers = step.number, self.buffers
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.number != number:
            prepared = self._planned(step)
        _, plan, ids, graphs = prepared
        count = int(plan.query_start[-1])
        if graphs is not None:
            graphs.send()
        self._receive(number, count, pending)
        buffers.compute.declare("layers", *self._touched(plan))
        self._launch(step, plan, ids, graphs, pending)
        if self._receiver is None and self._tokens is not None and len(plan.sampled):
            self._tokens.expect(number, plan.sampled_slots)

    def _planned(self, step: Step) -> _Prepared:
        """Return the plan of a step, and the graphs that it fits into, with its integers."""
        plan = self._state.plan(step.rows)
        scores = self._model.last and wants_positions(plan, self._state)
        # Ranks must launch the same, a graph has more rows than its step, and one rank finds a value before another.
        looks_inside = self._checks.looks_inside or (self._group.size > 1 and self._checks.finite)
        fitting = () if looks_inside or scores else self.buffers.graphs
        graphs = next((graphs for graphs in fitting if graphs.serves(plan)), None)
        first = self._receiver is None
        ids: Ints = self._input_ids(plan) if first else np.zeros(plan.query_start[-1], np.int64)
        if graphs is not None:
            graphs.fill(plan, ids)
        return _Prepared(step.number, plan, ids, graphs)

    def _touched(self, plan: Plan) -> tuple[list[Buffer], list[Buffer]]:
        """Return the buffers that the layers of a step read, and write, and share with others; for the ledger alone."""
        if not self._checks.ledger.on:
            return [], []
        buffers, size, tables = self.buffers, plan.batch.block_size, plan.batch.block_tables.numpy()
        # Behind a row's last block its table has older entries.
        used = np.arange(tables.shape[1]) < -(-plan.ends[:, None] // size)
        reads = buffers.kv_blocks.known(tables[used])
        writes = buffers.kv_blocks.known(plan.batch.slot_mapping.numpy() // size)
        return [buffers.input_buffer, *reads], [buffers.kv_blocks.whole, *writes]

    def _launch(
        self, step: Step, plan: Plan, ids: Ints, graphs: DecodeGraphs | ChunkGraphs | None, pending: Pending
    ) -> None:
        """Launch the layers, and sampling or sending behind them."""
        number = step.number
        count, compute = int(plan.query_start[-1]), self.buffers.compute
        requests = [self._state.requests[slot] for slot in plan.sampled_slots.tolist()] if self._model.last else []
        best = best_tokens(self._group, step, self._checks.finite, requests)
        work = self._timer.work(compute, number, count, int(plan.ends.sum()))
        # Before the other ends of the step, which take time of the host, and may wait for a neighbour.
        pending.finally_do(work.publish)
        with compute.working(), work:
            with self._ring.operation(Kind.FORWARD, number, size=count, detail=self._model.layer_range[0]):
                out, slots, positions = self._eager(number, plan, ids, pending) if graphs is None else graphs.run()
                if requests and best is None:
                    out = self._gathered(number, plan, out, pending)
            if requests:
                self._sample(step, requests, Launched(out, slots, positions), best, work, pending)
        pending.until(work)
        pending.finally_do(self._group.compare)
        # Not part of that work: the stream may have to wait for the next stage to take the message before.
        if self._sender is not None:
            self._sender.checksum = self.buffers.sums.make(out) if self._checks.checksum else 0
            self._sender.send(number, out, pending)

    def _sample(
        self, step: Step, requests: list[Register], launched: Launched, best: BestTokens | None, work: TimedWork,
        pending: Pending,
    ) -> None:  # fmt: skip
        """Launch sampling, or have it wait for masks. That of the step before comes first."""
        work.sampling()
        self._late.wait()
        if step.late and self._receiver is not None:
            self._late.keep(step, requests, launched, work, pending)
            return
        if step.late:
            # The layers of the next step read the tokens.
            step.masks = step.masks + self._late.masks_of(step)
        if self._late.settle() or step.late:
            work.goes_on()
        self._sampler.sample(step, requests, launched, best, pending)

    def _input_ids(self, plan: Plan) -> Ints:
        """Return the input tokens [T]; -1 where only the device knows them."""
        on_device = plan.slots[plan.tokens == TOKEN_ON_DEVICE]
        if len(on_device):
            if self._tokens is None:
                raise ValueError("a step takes tokens from the device, but scheduler.schedule_ahead is off")
            on_device = self._tokens.tokens(on_device)
        return self._state.input_ids(plan, on_device)

    def _receive(self, number: int, count: int, pending: Pending) -> None:
        """Let compute wait for the input that others give this step: hidden states [count, H], or sampled tokens.

        Strict order waits for a device's message with the first work on it: a stage that waits for
        its neighbour has begun nothing, so the diagnosis separates it from a stuck one.
        """
        if self._receiver is not None:
            with self._ring.operation(Kind.RECEIVE, number, self._receiver.edge.peer, count):
                hidden = self._take(self._receiver, number, count)
            if self._checks.compares_checksums:
                edge, source = self._receiver.edge, self.buffers.input_buffer
                self.buffers.sums.compare(edge, number, hidden, source, self._checks, pending)
        elif self._tokens is not None:
            self._tokens.arrive()

    def _eager(self, number: int, plan: Plan, ids: Ints, pending: Pending) -> Launched:
        """Launch any step operation by operation."""
        buffers, device, count = self.buffers, self.buffers.device, int(plan.query_start[-1])
        compute, incoming = buffers.compute, buffers.incoming
        look, finite = self._checks.looks_for_non_finite, self._finite
        with compute.use():
            # Graphs have launched the kernels that many rows need, with few rows there are more variants.
            layers = self.cache.layers
            shared = plan.shared_prefixes(least_saved(layers[0])) if len(plan.slots) > FEW_ROWS else None
            batch = batch_on_device(plan.batch, device, shared)
            more = np.concatenate([ids, plan.last_tokens, plan.sampled_slots, plan.ends[plan.sampled], _owner(plan)])
            # int32 as in graphs, or each kernel that reads them would be compiled once more.
            parts = torch.from_numpy(more.astype(np.int32)).pin_memory().to(device, non_blocking=True)
            sampled = len(plan.sampled)
            tokens, last, slots, positions, owner = torch.split(parts, [len(ids), sampled, sampled, sampled, count])
            if incoming is None:
                hidden = embed(self._model, tokens, owner, batch.positions, buffers.latest)
            else:
                hidden = incoming[:count]
            compute.settle()
            behind = compute.settle if self._checks.ledger.strict else None
            out = self._model.run(hidden, batch, self.cache.layers, behind)
            if look:
                # The next step overwrites `hidden`.
                self._look(out, pending, partial(finite.explain, number, plan, batch, hidden.clone(), out))
            if self._model.last:
                self._score(plan, out, pending)
            if self._model.last and sampled:
                out = self._model.logits(out[last])
                compute.settle()
        return Launched(out, slots, positions)

    def _gathered(self, number: int, plan: Plan, logits: Tensor, pending: Pending) -> Tensor:
        """Launch the exchange of logits, if ranks have parts of them; return the whole ones."""
        compute = self.buffers.compute
        with compute.use():
            if self._model.group.size > 1:
                logits = self._model.gather(logits)
                compute.settle()
            if self._checks.looks_for_non_finite:
                self._look(logits, pending, partial(self._finite.explain_logits, number, plan, logits))
        return logits

    def _score(self, plan: Plan, hidden: Tensor, pending: Pending) -> None:
        """Launch the log-probabilities of prompts; they come with the acknowledgement."""
        copies, retired = self.buffers.copies, pending.retired

        def report(wanted: Positions, hosts: list[Tensor]) -> None:
            found = scores_of(wanted, copies.read(hosts))
            if not self.rank:
                retired.prompts.append(found)

        for wanted in positions_of(plan, self._state):
            hosts = copies.launch(self.buffers.compute, *score(wanted, hidden, self._model.whole_logits))
            pending.finally_do(partial(report, wanted, hosts))

    def _look(self, values: Tensor, pending: Pending, explain: Callable[[], None]) -> None:
        """Have `explain` called at the end of the step if `values` are not all finite."""
        compute, copies = self.buffers.compute, self.buffers.copies
        hosts = copies.launch(compute, torch.stack(torch.aminmax(values)))
        pending.until(compute.record("values looked at"))

        def judge() -> None:
            (ends,) = copies.read(hosts)
            if self._checks.looks_for_non_finite and not all(map(math.isfinite, ends.tolist())):
                with compute.use():
                    explain()

        pending.finally_do(judge)


def _owner(plan: Plan) -> Ints:
    """Return the slot of each token's row [T]."""
    return np.repeat(plan.slots, np.diff(plan.query_start))
