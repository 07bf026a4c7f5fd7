"""Executing steps on a CPU: each step is done when `execute` returns."""

from __future__ import annotations

import itertools
import zlib

import torch
from ppkernels.block_copy import copy_layers
from torch import Tensor
from typing_extensions import override

from ppengine.common.ring import Kind
from ppengine.protocol.steps import TOKEN_ON_DEVICE, Move, MoveKind, Register, Step
from ppengine.stage.batch_state import Plan
from ppengine.stage.checksum import checksum
from ppengine.stage.pending_step import Pending
from ppengine.stage.prompt_positions import positions_of, score, scores_of
from ppengine.stage.runner import MOVE_RECORDS, Runner, RunnerParts
from ppengine.stage.sampler import masks_by_slot, sample_rows
from ppengine.stage.token_history import TokenHistory

# Plain integers: with cold caches, looking up a member of an enum costs as much as the record.
_RECEIVE, _EMBED, _FORWARD = Kind.RECEIVE.value, Kind.EMBED.value, Kind.FORWARD.value
_HEAD, _MASK, _SAMPLE = Kind.HEAD.value, Kind.MASK.value, Kind.SAMPLE.value


class CpuRunner(Runner):
    """A runner whose steps are done at once."""

    def __init__(self, parts: RunnerParts) -> None:
        super().__init__(parts)
        self._late_masks = parts.late_masks
        self._history = TokenHistory()

    @override
    def _registered(self, registers: list[Register]) -> None:
        if self._model.last:
            self._history.register(registers)

    @override
    def _move(self, number: int, moves: list[Move], pending: Pending) -> None:
        for kind, group in itertools.groupby(moves, key=lambda move: MoveKind(move.kind)):
            pairs = [(move.src, move.dst) for move in group]
            size = len(pairs) * self.cache.shape.block_bytes
            with self._ring.operation(MOVE_RECORDS[kind], number, size=size, detail=len(pairs)):
                source = self._swap.layers if kind.from_host else self.cache.layers
                target = self._swap.layers if kind.to_host else self.cache.layers
                copy_layers(source, target, pairs)

    @override
    def _rows(self, step: Step, pending: Pending) -> None:
        ring, number = self._ring, step.number
        plan = self._state.plan(step.rows)
        count = int(plan.query_start[-1])
        if self._receiver is None:
            hidden = self._embed(number, plan)
        else:
            ring.part(_RECEIVE, number, self._receiver.edge.peer, count)
            hidden = self._take(self._receiver, number, count)
            if self._checks.compares_checksums:
                self._checks.compare(number, self._receiver.edge, hidden)
        ring.part(_FORWARD, number, -1, count, self._model.layer_range[0])
        out = self._model.run(hidden, plan.batch, self.cache.layers)
        if self._checks.looks_for_non_finite:
            self._finite.look(number, plan, hidden, out)
        if self._model.last:
            self._finish(step, plan, out, pending)
            return
        if self._sender is not None:
            out = out.contiguous()
            self._sender.checksum = checksum(out) if self._checks.checksum else 0
            self._sender.send(number, out, pending)
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

    def _finish(self, step: Step, plan: Plan, hidden: Tensor, pending: Pending) -> None:
        """Sample on the last stage, and pass the tokens to the first one."""
        number, masks = step.number, step.masks
        for some in positions_of(plan, self._state):
            self._ring.part(_HEAD, number, -1, len(some.targets))
            found = scores_of(some, score(some, hidden, self._model.whole_logits))
            if not self.rank:
                pending.retired.prompts.append(found)
        rows = len(plan.sampled)
        if not rows:
            return
        self._ring.part(_HEAD, number, -1, rows)
        wanted = hidden if rows == len(hidden) else hidden[torch.from_numpy(plan.last_tokens)]
        logits = self._model.logits(wanted)
        if self._checks.looks_for_non_finite:
            self._finite.look_at_logits(number, plan, logits)
        if step.late:
            self._ring.part(_MASK, number, -1, len(step.late))
            masks = masks + self._late_masks(number)
        self._ring.part(_SAMPLE, number, -1, rows)
        slots, positions = plan.sampled_slots, plan.ends[plan.sampled]
        requests, history, model = self._state.requests, self._history, self._model
        tokens, sampled = sample_rows(
            logits,
            requests,
            history,
            slots.tolist(),
            positions.tolist(),
            model.shard,
            model.group,
            masks_by_slot(masks),
        )
        if self._token_sender is not None:
            self._token_sender.sampled(number, tokens)
        elif self._tokens is not None:
            self._tokens.store(slots, tokens.numpy())
        if self._group.size > 1:
            pending.retired.digest = zlib.crc32(tokens.numpy().tobytes())
        if not self.rank:
            pending.retired.sampled = sampled
