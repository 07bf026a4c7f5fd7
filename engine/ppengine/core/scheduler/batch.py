"""Filling one micro-batch: decodes first, then open prefills, then who comes back, then who waits."""

from __future__ import annotations

from ppengine.common.config import SchedulerConfig
from ppengine.core.scheduler.actions import Acts
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines, by_arrival
from ppengine.core.scheduler.results import Fence
from ppengine.core.scheduler.step_log import Pipeline
from ppengine.core.scheduler.wait_reasons import blocks_text
from ppengine.protocol.snapshot import Why
from ppengine.protocol.steps import TOKEN_ON_DEVICE, TOKEN_REGISTERED, Row


class Batcher:
    """Chooses the rows of one step under one token budget."""

    def __init__(
        self, config: SchedulerConfig, *, stages: int, pipeline: Pipeline, kv: KvBlocks, lines: Lines, fences: Fences,
        acts: Acts,
    ) -> None:  # fmt: skip
        self._config = config
        self._stages = stages
        self._pipeline = pipeline
        self._kv = kv
        self._lines = lines
        self._fences = fences
        self._acts = acts
        self._forkable: list[Request] = []
        self._rows: list[Row] = []
        self._budget = 0
        self.head: tuple[Request, Why] | None = None
        self.starved: dict[Request, None] = {}
        self.admissions = True
        """False: nothing waiting or swapped begins to run (an engine that finishes what it has)."""
        self.cordon = ""
        """Why no request begins that never ran; empty: they do. Those that have run come back."""

    def fill(self) -> list[Row]:
        """Return the rows of the next step; empty when nobody can be given a token."""
        for leader in self._forkable:
            self._lines.unpark(leader)
        self._forkable.clear()
        self.head = None
        if self.starved:
            self.starved.clear()
        rows: list[Row] = []
        self._rows, self._budget = rows, self._config.max_num_batched_tokens
        if self._lines.ready:
            self._decodes(max(self._pipeline.draft.number - self._stages, self._fences.retired_step))
        for request in list(self._lines.prefilling):
            if self._budget <= 0:
                break
            self._chunk(request)
        # Who runs comes before who begins: no admission takes the block that a decode lacks.
        if self.admissions and not self.starved and not self._kv.device.tail_live:
            self._load()
            self._admit()
        if not rows and self._lines.ready and not self.starved:
            self._decodes(self._pipeline.draft.number)
        return rows

    def reset(self) -> None:
        """Forget what the last step has left to do in the next one."""
        self._forkable.clear()
        self.starved.clear()
        self.head = None

    # --- decodes --------------------------------------------------------------------------------------------

    def _decodes(self, newest: int) -> None:
        """Give one token each to the longest waiting, spread evenly over the stages' micro-batches.

        Only to those whose last row was in step `newest` or before. A token that is sampled now comes back to the first
        stage after as many steps as there are stages: a step that needs it earlier keeps the first stage waiting with
        all of its rows, chunks of prompts among them.
        """
        lines, size = self._lines, self._kv.block_size
        ready, max_pending = lines.ready, lines.max_pending
        record, rows = self._pipeline.draft, self._rows
        number, entries = record.number, record.rows
        share = -(-(len(lines.running) - len(lines.prefilling)) // self._stages)
        left = min(share, self._budget, len(ready))
        again: list[Request] = []
        while left > 0 and ready and ready.oldest_step <= newest:
            left -= 1
            request = ready.pop()
            request.queued = False
            start = request.num_computed
            if not start % size and start == len(request.blocks) * size and not self._grow(request):
                continue
            end = request.num_computed = start + 1
            request.last_step = number
            outputs = request.output_ids
            if request.pending:
                token = TOKEN_ON_DEVICE
            else:
                token = outputs[-1] if outputs else request.prompt_ids[-1]
            request.pending += 1
            in_flight = request.in_flight
            if not in_flight or in_flight[-1] != number:
                in_flight.append(number)
            rows.append(Row(request.slot, start, 1, True, token))  # type: ignore[arg-type]  # running has a slot
            entries.append((request, end, True))
            if request.pending < max_pending and len(outputs) + request.pending < request.max_tokens:
                again.append(request)
        for request in reversed(self.starved):
            request.queued = True
            ready.put_back(request)
        for request in again:
            lines.resume(request)
        self._budget -= len(rows)

    def _grow(self, request: Request) -> bool:
        """Get the next block of a decode, from a victim if need be; False when it has to wait or has to go."""
        if self._kv.grow(request):
            return True
        room = self._pressure(len(self.starved) + 1)
        if request.fence is not None or request.state != "running":
            return False
        if room and self._kv.grow(request):
            return True
        self.starved[request] = None
        return False

    def _pressure(self, demand: int) -> bool:
        """Make victims leave, the newest first, until a block is there; False if blocks are only on their way.

        Blocks that come back by themselves count, so that one shortage does not evict everybody.
        """
        device = self._kv.device
        while device.available < 1:
            if device.tail_live or self._fences.returning() >= demand:
                return False
            victims = [request for request in self._lines.running if request.fence is None]
            if not victims:
                return False
            self._evict(max(victims, key=by_arrival))
        return True

    def _evict(self, victim: Request) -> None:
        self.starved.pop(victim, None)
        need, free = self._kv.swap_need(victim), self._kv.host.free
        fence = Fence("recompute", "memory pressure")
        if self._config.preemption == "swap":
            if 0 < need <= free:
                fence = Fence("swap", "memory pressure", host=self._kv.host.allocate(need))
            else:
                fence.by = f"memory pressure, swap needs {need} host blocks and {free} are free"
        self._fences.set(victim, fence)

    # --- prefills -------------------------------------------------------------------------------------------

    def _chunk(self, request: Request) -> bool:
        """Give a request as many of its known tokens as the budget has; False when it may not be cut."""
        start, known = request.num_computed, request.num_tokens
        count = min(known - start, self._budget)
        budget = self._config.max_num_batched_tokens
        if count < known - start <= budget and not self._config.chunked_prefill:
            return False
        end = start + count
        sample = end == known
        number = self._pipeline.draft.number
        token = request.tokens(start, end)[0] if count == 1 else TOKEN_REGISTERED
        if request.slot is None:
            raise ValueError(f"{request.id} runs without a slot")
        self._rows.append(Row(request.slot, start, count, sample, token))
        self._pipeline.draft.rows.append((request, end, sample))
        self._pipeline.draft.prefill_tokens += count
        if not request.in_flight or request.in_flight[-1] != number:
            request.in_flight.append(number)
        request.num_computed = end
        self._budget -= count
        if start < request.num_prompt <= end:
            request.prompt_step = number
            if request.followers:
                self._forkable.append(request)
        if sample:
            request.pending = 1
            self._lines.leave(request)
            request.last_step = number
            self._lines.resume(request)
        else:
            self._lines.put_prefilling(request)
        return True

    # --- admissions -----------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Bring swapped requests back, first come first, before anybody who holds nothing."""
        lines, device = self._lines, self._kv.device
        while lines.swapped and len(lines.running) < self._config.max_num_seqs:
            request = lines.swapped[0]
            need = self._kv.load_need(request) + (self._kv.watermark if device.used else 0)
            if need > device.available:
                self.head = (request, blocks_text(need, device.available))
                return
            self._acts.begin_load(request)

    def _admit(self) -> None:
        """Begin waiting requests in their order, as long as blocks, places and tokens are there."""
        lines = self._lines
        while not lines.swapped and len(lines.running) < self._config.max_num_seqs:
            request = lines.first_waiting(begun=bool(self.cordon))
            if request is None:
                return
            if self._budget <= 0:
                text = f"the step's {self._config.max_num_batched_tokens} tokens are given"
                self.head = (request, Why(code="token_budget", need=1, have=0, text=text))
                return
            fit = self._kv.fit(request)
            left = request.num_tokens - fit.computed
            whole = self._config.max_num_batched_tokens
            if not self._config.chunked_prefill and self._budget < left <= whole:
                text = f"need {left} tokens in one step, have {self._budget}"
                self.head = (request, Why(code="token_budget", need=left, have=self._budget, text=text))
                return
            if not fit.fits:
                self.head = (request, blocks_text(fit.need, fit.have))
                return
            lines.waiting.remove(request)
            self._pipeline.register(request)
            self._kv.admit(request, fit)
            request.state = "running"
            lines.running[request] = None
            now = self._fences.now()
            if request.admitted_time is None:
                request.admitted_time = now
            request.note(now, f"waiting > running, {fit.computed} tokens found computed")
            self._chunk(request)
