"""The retirement of a step: append its tokens, enter full blocks, end requests, apply fences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.core.scheduler.results import Fence
from ppengine.core.scheduler.step_log import StepRecord
from ppengine.protocol.steps import Sampled


@dataclass(slots=True, eq=False)
class Retirement:
    """The outcome of one step."""

    number: int
    """0: no step, but tokens that grammars force."""
    tokens: list[tuple[Request, int, float, list[tuple[int, float]]]] = field(default_factory=list)
    """(request, token, log-probability, best alternatives); none of ending requests."""
    began: list[Request] = field(default_factory=list)
    """Requests whose first token it has."""
    finished: list[Request] = field(default_factory=list)
    prompt_tokens: int = 0
    """Tokens that this step computed without a sample, or to catch up."""
    copied_out: int = 0
    """Blocks that it copied to the host cache."""
    copied_in: int = 0
    """Blocks that it loaded from there."""


@dataclass(eq=False)
class StepRetirer:
    """Applies a retired step to its requests."""

    _blocks: BlockTables
    _queues: RequestQueues
    _fences: Fences

    def take_rows(self, record: StepRecord, sampled: Sequence[Sampled], result: Retirement) -> None:
        """Append sampled tokens, enter full blocks, resume or fence each request."""
        number, size = record.number, self._blocks.block_size
        queues, max_pending = self._queues, self._queues.max_pending
        answers = iter(sampled)
        for request, end, samples in record.rows:
            request.in_flight.remove(number)
            dropped = record.dropped.get(request) if record.dropped else None
            if (request.num_entered + 1) * size <= end and request.blocks and not request.finished:
                # An aborted request takes no token any more, so its last blocks have no digest.
                self._blocks.enter(request, min(end - 1 if dropped else end, request.num_tokens))
            if samples:
                answer = next(answers)
                if dropped is None:
                    request.pending -= 1
                    if request.fence is None or not request.fence.final:
                        self._take_token(request, answer, result)
                elif dropped:
                    request.pending -= 1
                    request.num_computed -= 1
                    request.late_step = 0
            if request.fence is not None or request.finished:
                self._go_on(request)
            elif not request.queued and request.pending < max_pending:
                queues.resume(request)

    def take_copies(self, record: StepRecord) -> None:
        """Free the source blocks of the step's swap copies and let their requests go on."""
        for request in record.touched:
            if record.number in request.in_flight:
                request.in_flight.remove(record.number)
        for request in record.outs:
            self._fences.copied_out(request)
        for request in record.loads:
            self._fences.loaded(request)
        loaded = self._blocks.copies.retired(record) if self._blocks.copies is not None else []
        for request in loaded:
            if not request.finished:
                request.state = "running"
        for request in dict.fromkeys([*record.touched, *loaded]):
            self._go_on(request)

    def finish(self, request_id: str, reason: str) -> None:
        """End a request whose text met a stop text; tokens still in flight are dropped.

        Raises KeyError for an unknown or finished id.
        """
        request = self._queues.requests[request_id]
        if request.finished:
            raise KeyError(request_id)
        self._end(request, reason)

    def take_forced(self, request: Request, tokens: Sequence[int], result: Retirement) -> None:
        """Append outputs that the grammar of a request forces, up to one that ends it."""
        if request.fence is not None and request.fence.final:
            return
        for token in tokens:
            if request.finished:
                return
            request.output_ids.append(token)
            result.tokens.append((request, token, 0.0, []))
            if token in request.stops or len(request.output_ids) >= request.max_tokens:
                self._look_for_end(request, token, result)

    def _take_token(self, request: Request, answer: Sampled, result: Retirement) -> None:
        token, outputs = answer.token, request.output_ids
        outputs.append(token)
        if request.constrained:
            request.mask = None
            self._queues.unmasked[request] = None
        result.tokens.append((request, token, answer.logprob, answer.top))
        count = len(outputs)
        if count == 1:
            request.first_token_time = self._fences.now()
            result.began.append(request)
        if token in request.stops or count >= request.max_tokens:
            self._look_for_end(request, token, result)

    def _look_for_end(self, request: Request, token: int, result: Retirement) -> None:
        """End a request whose newest token is its last one, or a stop token that may end it."""
        count = len(request.output_ids)
        if token in request.stops and (request.constrained or count >= request.sampling.min_tokens):
            self._end(request, "stop")
        elif count >= request.max_tokens:
            self._end(request, "length")
        else:
            return
        result.finished.append(request)

    def _go_on(self, request: Request) -> None:
        if request.in_flight:
            return
        if request.fence is not None:
            self._fences.apply(request)
        else:
            self._queues.resume(request)

    def _end(self, request: Request, reason: str) -> None:
        """End a request now; its blocks are freed when its steps in flight have retired."""
        self._fences.mark_finished(request, reason)
        self._fences.set(request, Fence("finish", f"finished: {reason}", reason=reason))
