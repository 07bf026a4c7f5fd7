"""Answers to inspections: one request in full, the block map, the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ppengine.core.block_map import BlockMap
from ppengine.core.endings import history_of, since
from ppengine.core.health import Health
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.outputs import Ending, Output, OutputHub
from ppengine.core.scheduler import wait_reasons
from ppengine.core.scheduler.request import Request
from ppengine.core.serving import Serving
from ppengine.core.stage_records import Stages
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import RequestDetail


@dataclass(eq=False)
class Details:
    """Answers inspections of an engine that serves."""

    _health: Health
    _stages: Stages
    _requests: LiveRequests
    _outputs: OutputHub
    _checks: Checks
    _block_map: BlockMap
    _clock: Callable[[], float]

    def answer(self, question: Inspect) -> Inspected | Failed:
        """Return the answer to an Inspect of a request, of the blocks or of the ledger."""
        detail: msgspec.Struct
        serving, nonce = self._health.serving, question.nonce
        if serving is None:
            return Failed(nonce=nonce, code="BUSY", text=self._health.text)
        if question.what == "blocks":
            detail = self._block_map.answer(serving, question.cells, question.request)
        elif question.what == "ledger":
            if question.stage is not None and question.stage >= len(self._stages):
                return Failed(nonce=nonce, code="NOT_FOUND", text=self._stages.unknown(question.stage))
            detail = self._checks.ledger(question.stage)
        elif question.what == "request":
            name = question.request or ""
            members, output = self._requests.members(name), self._outputs.get(name)
            if members:
                detail = self._live(serving, members[0])
            elif output is not None:
                detail = _finished(output)
            else:
                return Failed(nonce=nonce, code="NOT_FOUND", text=self._requests.gone_text(name))
        else:
            return Failed(nonce=nonce, code="UNSUPPORTED", text=f"the core cannot inspect {question.what}")
        return Inspected(nonce=nonce, what=question.what, data=msgspec.Raw(msgspec.msgpack.encode(detail)))

    def _live(self, serving: Serving, request: Request) -> RequestDetail:
        scheduler, now = serving.scheduler, self._clock()
        why, output = wait_reasons.why(scheduler, request), self._outputs.get(request.group)
        first, outputs = request.first_token_time, len(request.output_ids)
        return RequestDetail(
            id=request.id,
            owner=request.owner,
            state=request.state,
            why=why.text if why else "",
            prompt_tokens=len(request.prompt_ids),
            output_tokens=outputs,
            computed_tokens=request.num_computed,
            cached_tokens=request.num_cached,
            block_table=list(request.blocks),
            shared_blocks=[block for block in request.blocks if scheduler.blocks.device.references(block) > 1],
            host_blocks=list(request.host_blocks),
            in_flight=list(request.in_flight),
            sampling=request.sampling,
            revision=request.revision,
            age_s=now - request.arrival_time,
            queued_s=since(request.admitted_time, request.arrival_time),
            first_token_s=since(first, request.arrival_time),
            inter_token_ms=None if first is None or outputs < 2 else (now - first) / (outputs - 1) * 1e3,
            preemptions=request.preemptions,
            swaps=request.swaps,
            priority=request.priority,
            prompt_token_ids=request.prompt_ids,
            output_token_ids=list(request.output_ids),
            output_text=output.samples[request.sample].text if output else "",
            history=history_of(request),
        )


def _finished(output: Output) -> RequestDetail:
    sample = output.samples[0]
    detail = RequestDetail(
        id=output.request, owner=output.session, state="finished", why=sample.finish_reason or "",
        output_text=sample.text,
        prompt_tokens=len(output.prompt_ids), output_tokens=len(sample.tokens), computed_tokens=0, cached_tokens=0,
        block_table=[], shared_blocks=[], host_blocks=[], in_flight=[], sampling=output.sampling, revision=0,
        age_s=0.0, prompt_token_ids=output.prompt_ids, output_token_ids=list(sample.tokens),
    )  # fmt: skip
    return detail if sample.ending is None else _with_ending(detail, sample.ending)


def _with_ending(detail: RequestDetail, ending: Ending) -> RequestDetail:
    first, steps = ending.first_token_s, detail.output_tokens - 1
    return msgspec.structs.replace(
        detail,
        owner=ending.owner,
        age_s=ending.finished_s + max(0.0, time.time() - ending.wall),
        queued_s=ending.queued_s,
        first_token_s=first,
        finished_s=ending.finished_s,
        inter_token_ms=None if first is None or steps < 1 else (ending.finished_s - first) / steps * 1e3,
        computed_tokens=ending.computed_tokens,
        cached_tokens=ending.cached_tokens,
        revision=ending.revision,
        preemptions=ending.preemptions,
        swaps=ending.swaps,
        priority=ending.priority,
        history=ending.history,
    )
