"""The live requests of a report, each with the reason why it waits."""

from __future__ import annotations

from collections.abc import Iterable

from ppengine.core.latencies import itl_ms, itl_quantiles_ms, prepare_s, queue_s, ttft_s
from ppengine.core.scheduler import Scheduler
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.wait_reasons import Reasons
from ppengine.protocol.snapshot import RequestInfo


def request_infos(scheduler: Scheduler, requests: Iterable[Request], now: float) -> list[RequestInfo]:
    """Return the figures of requests at the time `now` of the clock. A turn of the core waits for it."""
    why = Reasons(scheduler).of
    return [
        RequestInfo(
            id=request.id,
            owner=request.owner,
            state=request.state,
            age_s=now - request.arrival_time,
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(request.output_ids),
            blocks=len(request.blocks),
            swap_blocks=len(request.host_blocks),
            why=why(request),
            revision=request.revision,
            computed_tokens=request.num_computed,
            cached_tokens=request.num_cached,
            in_flight=list(request.in_flight),
            preemptions=request.preemptions,
            finish_reason=request.finish_reason,
            priority=request.priority,
            prepare_s=prepare_s(request),
            queue_s=queue_s(request),
            ttft_s=ttft_s(request),
            itl_ms=itl_ms(request, now),
            itl_p99_ms=itl_quantiles_ms(request, now)[1],
            principal=request.principal,
            client=request.client,
            sources=request.sources,
        )
        for request in requests
    ]
