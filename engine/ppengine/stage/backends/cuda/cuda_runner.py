"""Executing steps on a GPU: launched without waiting, acknowledged when their events are done.

All work of a stage is on its compute stream, swaps excepted (`cuda.block_mover`). Between cards that reach each other
messages are part of that stream (`cuda.edges`). Elsewhere they go through pinned host memory: hidden states are copied
out behind the layers and sent once that copy is done; what comes in is copied on the stream `upload`, for which compute
waits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from ppkernels.gpu.sampling import Parameters, choose, logprobs
from torch import Tensor

from ppengine.common.ring import Kind
from ppengine.protocol.steps import TOKEN_ON_DEVICE, Move, MoveKind, Register, Retired, Sampled, Step
from ppengine.stage.backends.cuda.chunk_graphs import ChunkGraphs
from ppengine.stage.backends.cuda.decode_graphs import DecodeGraphs, Launched, embed
from ppengine.stage.backends.cuda.device_buffers import LANDING_SLOTS, SLOTS, CudaState
from ppengine.stage.backends.cuda.device_timing import DeviceTimer
from ppengine.stage.backends.cuda.host_copies import HostCopies
from ppengine.stage.batch_state import Ints, Plan
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.pending_step import Pending
from ppengine.stage.runner import MOVE_RECORDS, Runner
from ppengine.stage.wire import SupersededError

_DRAIN_S = 5.0
"""More than a survivor is given to leave its generation."""
_GLANCE_S = 1e-3


class CudaRunner(Runner):
    """A runner whose steps are launched; see `Runner`."""

    launches = True
    card: CudaState

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._timer = DeviceTimer(self._ring)
        self._copies = HostCopies(self._checks.ledger)

    def execute(self, step: Step) -> Pending:
        """See `Runner`."""
        self.card.progress.step = self.card.compute.order.step = step.number
        return super().execute(step)

    def while_waiting(self, act: Callable[[], bool], over: Callable[[], bool]) -> None:
        """See `Runner`."""
        super().while_waiting(act, over)
        order = self.card.compute.order

        def look() -> None:
            self._ring.tick()
            self.check_neighbours()
            if over():
                raise SupersededError("the device was waited for")

        order.look = look
        order.seen = lambda: self._ring.operation(Kind.DEVICE, order.step)

    def check_neighbours(self) -> None:
        """See `Runner`."""
        for end in self._served:
            end.edge.wire.check_open()

    def release(self) -> None:
        """See `Runner`."""
        for end in self._served:
            end.release()

    def leave(self) -> None:
        """See `Runner`. Raises TimeoutError where the device does not come to an end."""
        left, deadline = self.card.compute.record("left"), time.monotonic() + _DRAIN_S
        while not left.done():
            # Again and again: a neighbour's device that is not through writes its numbers over it.
            self.release()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device did not end its work within {_DRAIN_S:g} s")
            time.sleep(_GLANCE_S)
        # A swap may be under way that nobody will ask about.
        self.card.blocks.forget()
        super().leave()

    @property
    def _served(self) -> list[Any]:
        """The ends of edges that the device serves."""
        ends: tuple[Any, ...] = self._inlet, self.outbox, self._tokens
        return [end for end in ends if end is not None and end.by_device]

    def _register(self, step: Step) -> None:
        super()._register(step)
        sampling = self.card.sampling
        if sampling is not None and step.register:
            if (most := max(register.slot for register in step.register)) >= SLOTS:
                raise ValueError(f"slot {most}: a stage on a GPU knows {SLOTS} requests at most")
            with self.card.compute.doing("sampling parameters"), self.card.compute.use():
                sampling.set([one.slot for one in step.register], [_parameters(one) for one in step.register])

    def _move(self, number: int, moves: list[Move], pending: Pending) -> None:
        for kind, group in itertools.groupby(moves, key=lambda move: MoveKind(move.kind)):
            pairs = [(move.src, move.dst) for move in group]
            size = len(pairs) * self.cache.shape.block_bytes
            with self._ring.operation(MOVE_RECORDS[kind], number, size=size, detail=len(pairs)):
                event = self.card.mover.move(kind, pairs)
            if event is not None:
                pending.until(event)

    def _rows(self, step: Step, pending: Pending) -> None:
        number, card = step.number, self.card
        plan = self._state.plan(step.rows)
        count = int(plan.query_start[-1])
        fitting = () if self._checks.looks_inside else card.graphs
        graphs = next((graphs for graphs in fitting if graphs.serves(plan)), None)
        ids: Ints = np.zeros(count, np.int64) if self._inlet is not None else self._input_ids(plan)
        if graphs is not None:
            graphs.load(plan, ids)
        self._receive(number, count)
        card.compute.declare("layers", *self._touched(plan))
        self._launch(number, plan, ids, graphs, pending)
        if self._inlet is None and self._tokens is not None and len(plan.sampled):
            self._tokens.expect(number, plan.sampled_slots)

    def _touched(self, plan: Plan) -> tuple[list[Buffer], list[Buffer]]:
        """Return what the layers of a step read and write that others do as well, where the ledger is on."""
        if not self._checks.ledger.on:
            return [], []
        card, size, tables = self.card, plan.batch.block_size, plan.batch.block_tables.numpy()
        # Behind a row's last block its table has what was there before.
        used = np.arange(tables.shape[1]) < -(-plan.ends[:, None] // size)
        reads = card.blocks.known(tables[used])
        writes = card.blocks.known(plan.batch.slot_mapping.numpy() // size)
        return [card.fed, *reads], [card.blocks.whole, *writes]

    def _launch(
        self, number: int, plan: Plan, ids: Ints, graphs: DecodeGraphs | ChunkGraphs | None, pending: Pending
    ) -> None:
        """Launch the layers, and what becomes of what they give."""
        count, last = int(plan.query_start[-1]), self._model.last
        work = self._timer.work(self.card.compute, number, count, int(plan.ends.sum()))
        # Before the other ends of the step, which take time of the host, and may wait for a neighbour.
        pending.finally_do(work.tell)
        with self.card.compute.working(), work:
            with self._ring.operation(Kind.FORWARD, number, size=count, detail=self._model.layer_range[0]):
                out, slots, positions = self._eager(number, plan, ids, pending) if graphs is None else graphs.run()
            if last and len(plan.sampled):
                work.sampling()
                self._sample(number, plan, out, slots, positions, pending)
        pending.until(work)
        # Not part of that work: the stream may have to wait for the next stage to take what was sent before.
        if not last and self.outbox is not None:
            self._send_hidden(number, out, pending)

    def _input_ids(self, plan: Plan) -> Ints:
        """Return the input tokens [T]; -1 where only the device knows them."""
        on_device = plan.slots[plan.tokens == TOKEN_ON_DEVICE]
        if len(on_device):
            if self._tokens is None:
                raise ValueError("a step takes tokens from the device, but scheduler.schedule_ahead is off")
            on_device = self._tokens.tokens(on_device)
        return self._state.input_ids(plan, on_device)

    def _receive(self, number: int, count: int) -> None:
        """Let compute wait for what others give this step: hidden states [count, H], or sampled tokens.

        Strict order waits for what a device brings with the first work on it: who waits for a neighbour has begun
        nothing, and is told so from who is stuck.
        """
        if self._inlet is not None:
            with self._ring.operation(Kind.RECEIVE, number, self._inlet.edge.peer, count):
                hidden = self._inlet.take(number)
                if not self._inlet.by_device:
                    with self.card.upload.working():
                        self._upload(hidden, self._inlet.known)
        elif self._tokens is not None:
            self._tokens.arrive()

    def _upload(self, hidden: Tensor, buffer: Buffer) -> None:
        """Copy what came in to the device. The receive buffer is free again when this returns."""
        card, rows = self.card, len(hidden)
        assert card.incoming is not None
        turn = card.turn = (card.turn + 1) % LANDING_SLOTS
        arrived, read = card.arrived[turn], card.read[turn]
        if read is not None:
            card.upload.wait(read)
        landed = (card.landed[turn],)
        with card.upload.doing("upload", (buffer,), landed), card.upload.use():
            arrived[:rows].copy_(hidden, non_blocking=True)
        uploaded = card.upload.record("uploaded")
        card.compute.wait(uploaded)
        with card.compute.doing("taking in", landed, (card.fed,)), card.compute.use():
            card.incoming[:rows].copy_(arrived[:rows])
        card.read[turn] = card.compute.record("arrived read")
        uploaded.synchronize()

    def _eager(self, number: int, plan: Plan, ids: Ints, pending: Pending) -> Launched:
        """Launch any step operation by operation."""
        card, device, count = self.card, self.card.device, int(plan.query_start[-1])
        look, finite = self._checks.looks_for_non_finite, self._finite
        with card.compute.use():
            batch = card.batch(plan.batch)
            more = np.concatenate([ids, plan.last_tokens, plan.sampled_slots, plan.ends[plan.sampled], _owner(plan)])
            parts = torch.from_numpy(more).pin_memory().to(device, non_blocking=True)
            sampled = len(plan.sampled)
            tokens, last, slots, positions, owner = torch.split(parts, [len(ids), sampled, sampled, sampled, count])
            if card.incoming is None:
                hidden = embed(self._model, tokens, owner, batch.positions, card.latest)
            else:
                hidden = card.incoming[:count]
            card.compute.settle()
            behind = card.compute.settle if self._checks.ledger.strict else None
            out = self._model.run(hidden, batch, self.cache.layers, behind)
            if look:
                # The next step overwrites what came in.
                self._look(out, pending, partial(finite.explain, number, plan, batch, hidden.clone(), out))
            if self._model.last and sampled:
                out = self._model.logits(out[last])
                card.compute.settle()
                if look:
                    self._look(out, pending, partial(finite.explain_logits, number, plan, out))
        return Launched(out, slots, positions)

    def _look(self, values: Tensor, pending: Pending, explain: Callable[[], None]) -> None:
        """Have `explain` called at the end of the step, should `values` not all be finite."""
        compute = self.card.compute
        hosts = self._copies.launch(compute, torch.stack(torch.aminmax(values)))
        pending.until(compute.record("values looked at"))

        def judge() -> None:
            (ends,) = self._copies.read(hosts)
            if self._checks.looks_for_non_finite and not all(map(math.isfinite, ends.tolist())):
                with compute.use():
                    explain()

        pending.finally_do(judge)

    def _sample(
        self, number: int, plan: Plan, logits: Tensor, slots: Tensor, positions: Tensor, pending: Pending
    ) -> None:
        card, requests = self.card, [self._state.requests[slot] for slot in plan.sampled_slots.tolist()]
        assert card.sampling is not None
        greedy = not any(request.temperature > 0 for request in requests)
        most = max(request.logprobs for request in requests)
        with self._ring.operation(Kind.SAMPLE, number, size=len(requests)), card.compute.use():
            outbox: Any = self.outbox
            by_device = outbox is not None and outbox.by_device
            newest = outbox.newest if by_device else card.latest
            with card.compute.doing("sampling"):
                tokens = choose(logits, card.sampling, slots, positions, greedy=greedy, newest=newest)
            if by_device:
                self._send(number, tokens)
            parts = [tokens]
            if most >= 0:
                with card.compute.doing("log probabilities"):
                    shown = logprobs(logits, card.sampling, slots, tokens, min(max(most, 1), logits.shape[1]))
                parts += [shown.chosen, shown.tokens, shown.values]
            host = self._copies.launch(self.card.compute, *parts)
        pending.finally_do(lambda: self._told(number, requests, host, pending.retired))

    def _told(self, number: int, requests: list[Register], host: list[Tensor], retired: Retired) -> None:
        """Put what was sampled into the acknowledgement, and send it to the first stage unless the device did."""
        tokens = self._copies.read(host)[0]
        retired.sampled = [Sampled(one.slot, token) for one, token in zip(requests, tokens.tolist(), strict=True)]
        if len(host) > 1:
            chosen, ids, values = (part.tolist() for part in host[1:])
            for row, (request, sampled) in enumerate(zip(requests, retired.sampled, strict=True)):
                if request.logprobs >= 0:
                    sampled.logprob = chosen[row]
                    sampled.top = list(zip(ids[row], values[row], strict=True))[: request.logprobs]
        if self.outbox is not None and not self.outbox.by_device:
            self._send(number, tokens)

    def _send_hidden(self, number: int, out: Tensor, pending: Pending) -> None:
        """Launch the sending, or let it follow the step where the host has to send."""
        assert self.outbox is not None
        if self.outbox.by_device:
            with self.card.compute.use():
                self._send(number, out.contiguous())
            pending.until(self.card.compute.record("sent"))
            # What there is to wait for is the next stage, as on a CPU.
            self.card.compute.settle(
                partial(self._ring.operation, Kind.ROOM, number, self.outbox.edge.peer, out.nbytes)
            )
            return
        with self.card.compute.use():
            hosts = self._copies.launch(self.card.compute, out)
        pending.until(self.card.compute.record("copied out"))
        pending.finally_do(lambda: self._send(number, *self._copies.read(hosts)))


def _owner(plan: Plan) -> Ints:
    """Return the slot of each token's row [T]."""
    return np.repeat(plan.slots, np.diff(plan.query_start))


def _parameters(register: Register) -> Parameters:
    return Parameters(
        temperature=register.temperature,
        top_p=register.top_p,
        top_k=register.top_k,
        seed=register.seed,
        sample=register.sample,
        logprobs=register.logprobs,
        banned=register.stop_token_ids,
        banned_until=register.prompt_len + register.min_tokens if register.min_tokens else 0,
    )
