"""The record of a request that has ended: times, counts and history, without its blocks."""

from __future__ import annotations

import time

from ppengine.core.outputs import Ending
from ppengine.core.scheduler.request import Request


def ending_of(request: Request, now: float) -> Ending:
    """Return the ending of `request` at `now` of the scheduler's clock."""
    arrival = request.arrival_time
    return Ending(
        owner=request.owner,
        wall=time.time(),
        finished_s=now - arrival,
        queued_s=since(request.admitted_time, arrival),
        first_token_s=since(request.first_token_time, arrival),
        computed_tokens=request.num_computed,
        cached_tokens=request.num_cached,
        revision=request.revision,
        preemptions=request.preemptions,
        swaps=request.swaps,
        priority=request.priority,
        history=history_of(request),
    )


def history_of(request: Request) -> list[str]:
    """Return the state changes of a request, oldest first: `0.012s waiting > running`."""
    return [f"{when - request.arrival_time:.3f}s {text}" for when, text in request.history]


def since(moment: float | None, arrival: float) -> float | None:
    """Return the seconds from `arrival` to `moment`; None without a moment."""
    return None if moment is None else moment - arrival
