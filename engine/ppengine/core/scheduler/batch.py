"""The rows of one micro-batch: decodes, then open prefills, swapped and waiting requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ppengine.common.profile_sections import SchedulerConfig
from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.masks import Masks
from ppengine.core.scheduler.pipeline_chunks import PromptSupply
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.core.scheduler.results import Fence
from ppengine.core.scheduler.step_log import StepLog
from ppengine.protocol.snapshot import Why
from ppengine.protocol.steps import TOKEN_GIVEN, TOKEN_ON_DEVICE, TOKEN_REGISTERED, Row


@dataclass(eq=False)
class Batcher:
    """Chooses the rows of one step within one token budget."""

    _config: SchedulerConfig
    _stages: int
    _steps: StepLog
    _blocks: BlockTables
    _queues: RequestQueues
    _fences: Fences
    _masks: Masks
    _supply: PromptSupply = field(init=False)
    _forkable: list[Request] = field(init=False, default_factory=list)
    _rows: list[Row] = field(init=False, default_factory=list)
    _most: int = field(init=False, default=0)
    """Tokens that the step may have, and those of them that are left."""
    _budget: int = field(init=False, default=0)
    head: tuple[Request, Why] | None = field(init=False, default=None)
    """First request in line that the last step could not start, and the reason."""
    starved: dict[Request, None] = field(init=False, default_factory=dict)
    """Running requests that lacked a block for their next token in the last step."""
    closed: bool = field(init=False, default=False)
    """Whether running requests finish and no waiting or swapped one starts."""
    cordon: str = field(init=False, default="")
    """Reason why requests that never ran do not start; empty: they do."""

    def __post_init__(self) -> None:
        self._supply = PromptSupply(self._stages, self._config.max_num_batched_tokens)

    def fill(self) -> list[Row]:
        """Return the rows of the next step; empty if no request can get a token."""
        for leader in self._forkable:
            self._queues.unpark(leader)
        self._forkable.clear()
        self.head = None
        if self.starved:
            self.starved.clear()
        rows: list[Row] = []
        self._rows = rows
        self._most = self._budget = self._config.max_num_batched_tokens
        if self._queues.ready:
            self._decode(max(self._steps.draft.number - self._stages, self._fences.retired_step))
        if self._stages > 1 and self._config.chunked_prefill:
            self._limit_prompts()
        for request in list(self._queues.prefilling):
            if self._budget <= 0:
                break
            # Another one's lack of blocks may have evicted it.
            if request.state == "running" and request.fence is None:
                self._prefill(request)
        # Running requests come first: no new one may take the block that a decode lacks.
        if not self.closed and not self.starved and not self._blocks.device.tail_live:
            self._start_swapped()
            self._start_waiting()
        if not rows and self._queues.ready and not self.starved:
            self._budget = self._config.max_num_batched_tokens
            self._decode(self._steps.draft.number)
        return rows

    def reset(self) -> None:
        """Drop the leftovers of the last step."""
        self._forkable.clear()
        self.starved.clear()
        self.head = None

    # --- decodes --------------------------------------------------------------------------------------------

    def _decode(self, newest: int) -> None:
        """Give one sample each to the requests that wait longest, an even share for each stage.

        Only requests whose last row was in step `newest` or before are chosen. A token sampled now
        reaches the first stage after one step per stage. A step that needs it earlier stalls the
        first stage with all its rows.
        """
        queues, size = self._queues, self._blocks.block_size
        max_pending = queues.max_pending
        record, rows = self._steps.draft, self._rows
        number, entries = record.number, record.rows
        share = -(-(len(queues.running) - len(queues.prefilling)) // self._stages)
        budget = self._budget
        again: list[Request] = []
        back: list[Request] = []
        for request in queues.take_ready(newest, min(share, budget)):
            if request.state != "running" or request.fence is not None:
                continue  # Another one's lack of blocks has evicted it.
            if budget <= 0:
                back.append(request)
                continue
            if request.constrained and not request.may_sample(max_pending):
                continue  # It was queued when its masks still came in time.
            start = request.num_computed
            end = request.num_tokens if request.constrained and not request.pending else start + 1
            if end - start > budget:
                queues.put_prefilling(request)
                continue
            if end > len(request.blocks) * size and not self._grow(request, end):
                continue
            budget -= end - start
            request.num_computed = end
            request.last_step = number
            outputs = request.output_ids
            if end - start > 1:
                token = TOKEN_GIVEN
                record.given.append(request.tokens(start, end))
            elif request.pending:
                token = TOKEN_ON_DEVICE
            else:
                token = outputs[-1] if outputs else request.prompt_ids[-1]
            request.pending += 1
            in_flight = request.in_flight
            if not in_flight or in_flight[-1] != number:
                in_flight.append(number)
            rows.append(Row(request.slot, start, end - start, True, token))  # type: ignore[arg-type]  # running has a slot
            entries.append((request, end, True))
            if request.constrained:
                self._masks.add(request)
                if request.late_step:
                    continue
            if request.may_sample(max_pending) and len(outputs) + request.pending < request.max_tokens:
                again.append(request)
        for request in [*reversed(back), *reversed(self.starved)]:
            queues.put_ready_back(request)
        for request in again:
            queues.resume(request)
        self._budget = budget

    def _grow(self, request: Request, end: int) -> bool:
        """Give a running request the blocks of its tokens before `end`; return False if it lacks one."""
        while end > len(request.blocks) * self._blocks.block_size:
            if not self._grow_by_one(request):
                return False
        return True

    def _grow_by_one(self, request: Request) -> bool:
        """Give a running request its next block, evicting if necessary; return False if it gets none."""
        if self._blocks.grow(request):
            return True
        room = self._make_room(len(self.starved) + 1)
        if request.fence is not None or request.state != "running":
            return False
        if room and self._blocks.grow(request):
            return True
        self.starved[request] = None
        return False

    def _make_room(self, demand: int) -> bool:
        """Evict victims, newest first, until a block is available; return whether one is.

        Blocks that will be freed anyway count, so that one shortage does not evict every request.
        """
        device = self._blocks.device
        while device.available < 1:
            if device.tail_live or self._fences.returning() >= demand:
                return False
            victims = self._queues.unfenced()
            if not victims:
                return False
            self._evict(max(victims, key=Request.order))
        return True

    def _evict(self, victim: Request) -> None:
        self.starved.pop(victim, None)
        need, free = self._blocks.swap_need(victim), self._blocks.host.free
        fence = Fence("recompute", "memory pressure")
        loading = self._blocks.copies is not None and victim in self._blocks.copies.loads
        # The host has the blocks of a load already.
        if self._config.preemption == "swap" and not loading:
            if 0 < need <= free:
                fence = Fence("swap", "memory pressure", host=self._blocks.host.allocate(need))
            else:
                fence.by = f"memory pressure, swap needs {need} host blocks and {free} are free"
        self._fences.set(victim, fence)

    # --- prefills -------------------------------------------------------------------------------------------

    def _limit_prompts(self) -> None:
        """Leave the rest of long prompts to later steps, so that all stages get work soon."""
        queues, config = self._queues, self._config
        may_start = 0 if self.closed else config.max_num_seqs - len(queues.running)
        decodes = self._most - self._budget
        self._most = min(self._most, decodes + self._supply.limit(queues.prefilling, queues.waiting, may_start))
        self._budget = self._most - decodes

    def _prefill(self, request: Request) -> None:
        """Give a request the known tokens that fit the budget; none if it must not be chunked."""
        start, known = request.num_computed, request.num_tokens
        count = min(known - start, self._budget)
        budget = self._config.max_num_batched_tokens
        if count < known - start <= budget and not self._config.chunked_prefill:
            return
        if start + count == known and request.constrained and request.mask is None:
            count -= 1  # The token behind the last one cannot be sampled yet.
            if not count:
                self._queues.put_prefilling(request)
                return
        end = start + count
        # Tokens that a grammar has forced since the start have no blocks yet.
        if end > len(request.blocks) * self._blocks.block_size and not self._grow(request, end):
            return
        sample = end == known
        draft = self._steps.draft
        token = TOKEN_REGISTERED
        if count == 1:
            token = request.tokens(start, end)[0]
        elif end > request.registered:
            token = TOKEN_GIVEN
            draft.given.append(request.tokens(start, end))
        if request.slot is None:
            raise ValueError(f"{request.id} runs without a slot")
        self._rows.append(Row(request.slot, start, count, sample, token))
        draft.rows.append((request, end, sample))
        draft.prefill_tokens += count
        if not request.in_flight or request.in_flight[-1] != draft.number:
            request.in_flight.append(draft.number)
        request.num_computed = end
        self._blocks.enter_ahead(request, start, end)
        self._budget -= count
        if start < request.num_prompt <= end:
            request.prompt_step = draft.number
            if request.followers:
                self._forkable.append(request)
        if sample:
            request.pending = 1
            if request.constrained:
                self._masks.add(request)
            self._queues.leave(request)
            request.last_step = draft.number
            self._queues.resume(request)
        else:
            self._queues.put_prefilling(request)

    # --- starts ---------------------------------------------------------------------------------------------

    def _start_swapped(self) -> None:
        """Load swapped requests in their order, before any waiting one starts."""
        queues, device = self._queues, self._blocks.device
        while queues.swapped and len(queues.running) < self._config.max_num_seqs:
            request = queues.swapped[0]
            need = self._blocks.load_need(request) + (self._blocks.watermark if device.used else 0)
            if need > device.available:
                self.head = (request, _lacks_blocks(need, device.available))
                return
            self._fences.start_load(request)

    def _start_waiting(self) -> None:
        """Start waiting requests in their order while blocks, sequences and tokens last."""
        queues = self._queues
        while not queues.swapped and len(queues.running) < self._config.max_num_seqs:
            request = queues.first_waiting(begun=bool(self.cordon))
            if request is None:
                return
            if self._budget <= 0:
                self.head = (request, self._lacks_tokens(1))
                return
            fit = self._blocks.fit(request)
            left = request.num_tokens - fit.computed
            whole = self._config.max_num_batched_tokens
            if not self._config.chunked_prefill and self._budget < left <= whole:
                self.head = (request, self._lacks_tokens(left))
                return
            if not fit.fits:
                self.head = (request, _lacks_blocks(fit.need, fit.have))
                return
            queues.put_running(request)
            self._steps.register(request)
            self._supply.started(request.num_tokens, fit.computed)
            self._blocks.allocate(request, fit)
            now = self._fences.now()
            if request.admitted_time is None:
                request.admitted_time = now
            if fit.host:
                loaded = len(fit.host) * self._blocks.block_size
                request.note(now, f"waiting > loading, {fit.computed} tokens found computed, {loaded} on the host")
                continue
            request.note(now, f"waiting > running, {fit.computed} tokens found computed")
            self._prefill(request)

    def _lacks_tokens(self, need: int) -> Why:
        text = f"step full, {self._most} tokens"
        if self._budget > 0:
            text = f"need {need} tokens in one step, have {self._budget}"
        return Why(code="token_budget", need=need, have=max(self._budget, 0), text=text)


def _lacks_blocks(need: int, have: int) -> Why:
    return Why(code="blocks", need=need, have=max(have, 0), text=f"have {max(have, 0)} of {need} blocks")
