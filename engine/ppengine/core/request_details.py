"""The detail of a request, for inspections: while it lives, and after its end."""

from __future__ import annotations

import time

import msgspec

from ppengine.core.journal_records import Entered
from ppengine.core.latencies import itl_ms, itl_quantiles_ms, prepare_s, queue_s, ttft_s
from ppengine.core.output_state import Ending, Output
from ppengine.core.scheduler import Scheduler, wait_reasons
from ppengine.core.scheduler.request import Request
from ppengine.protocol.finished import FinishedInfo, ending_text
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.timings import Timings


def live_detail(scheduler: Scheduler, request: Request, now: float) -> RequestDetail:
    """Return the detail of a live request at `now` of the scheduler's clock."""
    why = wait_reasons.why(scheduler, request)
    return msgspec.structs.replace(
        _detail(request, now),
        why=why.text if why else "",
        block_table=list(request.blocks),
        shared_blocks=[block for block in request.blocks if scheduler.blocks.device.references(block) > 1],
        host_blocks=list(request.host_blocks),
        in_flight=list(request.in_flight),
        prompt_token_ids=request.prompt_ids.tolist(),
        output_token_ids=list(request.output_ids),
    )


def ending_of(request: Request, now: float) -> Ending:
    """Return the ending of `request` at `now` of the scheduler's clock, without its blocks."""
    detail = _detail(request, now)
    detail.state, detail.finished_s = "finished", detail.age_s
    detail.why = ending_text(request.finish_reason or "", request.model_limit, _author(request), request.loss)
    return Ending(now, detail, finished_info(request, now), timings_of(request, now))


def restored_ending(entered: Entered, index: int, info: FinishedInfo) -> Ending:
    """Return the ending of a sample that has ended in a core before this one; its history is gone with that."""
    at = entered.arrival + info.took_s
    history = [f"{info.took_s:.3f}s finished: {info.reason}; the core was restarted later"]
    detail = RequestDetail(
        id=info.id, owner=info.owner, state="finished", why=info.ending, prompt_tokens=info.prompt_tokens,
        output_tokens=info.output_tokens, computed_tokens=0, cached_tokens=0, block_table=[], shared_blocks=[],
        host_blocks=[], in_flight=[], sampling=entered.sampling, revision=0, age_s=info.took_s,
        prepared_s=info.prepare_s, queued_s=info.queue_s,
        first_token_s=info.ttft_s, inter_token_ms=info.itl_ms, finished_s=info.took_s,
        preemptions=info.preemptions, swaps=0, priority=entered.samples[index].priority,
        history=history, client=info.client, sources=info.sources,
    )  # fmt: skip
    return Ending(at, detail, info)


def ended_detail(output: Output, ending: Ending, now: float) -> RequestDetail:
    """Return the detail of a request, at `now`, whose first sample had this `ending`."""
    sample = output.samples[0]
    reason = sample.finish_reason or ""
    return msgspec.structs.replace(
        ending.detail,
        why=ending.detail.why if reason in ("length", "abort", "lost") else reason,
        age_s=ending.detail.age_s + now - ending.at,
        output_tokens=len(sample.tokens),
        prompt_token_ids=output.prompt_ids.tolist(),
        output_token_ids=sample.tokens.tolist(),
    )


def finished_info(request: Request, now: float) -> FinishedInfo:
    """Return the line of a request that ended at `now` of the scheduler's clock."""
    median, high = itl_quantiles_ms(request, now)
    return FinishedInfo(
        id=request.id,
        owner=request.owner,
        wall=time.time(),
        ended_s=0.0,
        took_s=now - request.arrival_time,
        prompt_tokens=request.num_prompt,
        output_tokens=len(request.output_ids),
        reason=request.finish_reason or "abort",
        by=_author(request),
        prepare_s=prepare_s(request),
        queue_s=queue_s(request),
        ttft_s=ttft_s(request),
        itl_ms=itl_ms(request, now),
        itl_p50_ms=median,
        itl_p99_ms=high,
        preemptions=request.preemptions,
        model_limit=request.model_limit,
        loss=request.loss,
        client=request.client,
        sources=request.sources,
    )


def timings_of(request: Request, now: float) -> Timings:
    """Return the times of a request that ended at `now` of the scheduler's clock."""
    return Timings(
        request.arrival_time, request.admitted_time, request.first_token_time, now, list(request.phases),
        request.preemptions, request.queued_time,
    )  # fmt: skip


def _author(request: Request) -> str:
    """Return who aborted a request that has ended by it."""
    return request.aborted_by if request.finish_reason in ("abort", None) else ""


def _detail(request: Request, now: float) -> RequestDetail:
    """Return the part of a detail that stays when the request has ended."""
    arrival, (median, high) = request.arrival_time, itl_quantiles_ms(request, now)
    return RequestDetail(
        id=request.id,
        owner=request.owner,
        state=request.state,
        why="",
        prompt_tokens=request.num_prompt,
        output_tokens=len(request.output_ids),
        computed_tokens=request.num_computed,
        cached_tokens=request.num_cached,
        block_table=[],
        shared_blocks=[],
        host_blocks=[],
        in_flight=[],
        sampling=request.sampling,
        revision=request.revision,
        age_s=now - arrival,
        prepared_s=prepare_s(request),
        queued_s=queue_s(request),
        first_token_s=ttft_s(request),
        inter_token_ms=itl_ms(request, now),
        itl_p50_ms=median,
        itl_p99_ms=high,
        preemptions=request.preemptions,
        swaps=request.swaps,
        priority=request.priority,
        history=[f"{when - arrival:.3f}s {text}" for when, text in request.history],
        principal=request.principal,
        client=request.client,
        sources=request.sources,
    )
