"""Steps that come back: tokens that count, blocks that are full, requests that end, fences that open."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.core.scheduler.actions import Acts
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines
from ppengine.core.scheduler.results import Fence, Retirement
from ppengine.core.scheduler.step_log import InFlight, Pipeline
from ppengine.protocol.steps import Sampled


class Returns:
    """Takes back steps in order."""

    def __init__(self, pipeline: Pipeline, kv: KvBlocks, lines: Lines, fences: Fences, acts: Acts) -> None:
        self._pipeline = pipeline
        self._kv = kv
        self._lines = lines
        self._fences = fences
        self._acts = acts

    def retire(self, number: int, sampled: Sequence[Sampled]) -> Retirement:
        """See `Scheduler.retire`. Nothing has changed when it raises."""
        self._check(number, sampled)
        record = self._pipeline.retire(number)
        self._fences.retired_step = number
        result = Retirement(number, prompt_tokens=record.prefill_tokens)
        self._kv.unpin(record)
        self._take_rows(record, sampled, result)
        self._take_copies(record)
        if self._fences.ended:
            result.finished += self._fences.ended
            self._fences.ended = []
        return result

    def _check(self, number: int, sampled: Sequence[Sampled]) -> None:
        asked = [request.slot for request, _, wants in self._pipeline.oldest(number).rows if wants]
        answered = [answer.slot for answer in sampled]
        if asked != answered:
            raise ValueError(f"step {number} sampled slots {answered}; it was asked for slots {asked}")

    def _take_rows(self, record: InFlight, sampled: Sequence[Sampled], result: Retirement) -> None:
        """Append the tokens that count, enter full blocks, and let every request of the step go on."""
        number, size = record.number, self._kv.block_size
        lines, max_pending = self._lines, self._lines.max_pending
        answers = iter(sampled)
        for request, end, wants in record.rows:
            request.in_flight.remove(number)
            if request.num_entered < end // size and request.blocks and not request.finished:
                self._kv.enter(request, end)
            if wants:
                answer = next(answers)
                request.pending -= 1
                if request.fence is None or not request.fence.final:
                    self._take_token(request, answer, result)
            if request.fence is not None or request.finished:
                self._go_on(request)
            elif not request.queued and request.pending < max_pending:
                lines.resume(request)

    def _take_copies(self, record: InFlight) -> None:
        for request in record.touched:
            if record.number in request.in_flight:
                request.in_flight.remove(record.number)
        for request in record.outs:
            self._fences.copied_out(request)
        for request in record.loads:
            self._fences.loaded(request, self._acts.loading.pop(request, None))
        for request in record.touched:
            self._go_on(request)

    def _take_token(self, request: Request, answer: Sampled, result: Retirement) -> None:
        token, outputs = answer.token, request.output_ids
        outputs.append(token)
        result.tokens.append((request, token, answer.logprob, answer.top))
        count = len(outputs)
        if count == 1:
            request.first_token_time = self._fences.now()
        if token in request.stops and count >= request.sampling.min_tokens:
            self.end(request, "stop")
        elif count >= request.max_tokens:
            self.end(request, "length")
        else:
            return
        result.finished.append(request)

    def _go_on(self, request: Request) -> None:
        if request.in_flight:
            return
        if request.fence is not None:
            self._fences.apply(request)
        else:
            self._lines.resume(request)

    def end(self, request: Request, reason: str) -> None:
        """End a request now; what it holds comes back when nothing of it is in flight."""
        self._fences.mark_finished(request, reason)
        self._fences.set(request, Fence("finish", f"finished: {reason}", reason=reason))
