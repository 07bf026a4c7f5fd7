"""Why a request gets nothing right now: the predicate that failed, with its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines
from ppengine.core.scheduler.step_log import Pipeline
from ppengine.protocol.snapshot import Why


@dataclass(slots=True)
class Situation:
    """What `why` reads; made anew by each call of the scheduler."""

    lines: Lines
    kv: KvBlocks
    pipeline: Pipeline
    paused: bool
    max_seqs: int
    depth: int
    admissions: bool
    cordon: str
    """Why no request begins that never ran; empty: they do."""
    head: tuple[Request, Why] | None
    """The request that stopped the last admission, and why."""
    starved: dict[Request, None]
    """Running requests for whose next block the last step found none."""


def why(request: Request, now: Situation) -> Why | None:
    """Return why `request` does not run, or what it waits for while it does; None when nothing keeps it."""
    if request.finished:
        return None
    if request.fence is not None:
        return Why(code="fenced", text=f"{request.fence.by} waits for {_steps(request)}")
    if request.state == "held":
        return Why(code="held", text=request.held_by)
    if request.in_flight:
        return Why(code="in_flight", need=len(request.in_flight), text=f"{_steps(request)} in flight")
    if now.paused:
        return Why(code="paused", text="the engine is paused")
    if request.state == "running":
        return _running(request, now)
    return _admission(request, now)


def _running(request: Request, now: Situation) -> Why | None:
    if request in now.starved:
        have = max(now.kv.device.available, 0)
        return Why(code="blocks", need=1, have=have, text=f"needs 1 more block, has {have}")
    if now.pipeline.micro_batches >= now.depth:
        flying = now.pipeline.micro_batches
        return Why(code="turn", need=1, have=0, text=f"its turn comes after {flying} micro-batches in flight")
    return None


def _admission(request: Request, now: Situation) -> Why:
    leader = request.leader
    if leader is not None and request in leader.followers:
        return Why(code="behind", text=f"forks {leader.id} when its prompt is computed")
    if now.cordon and not request.begun:
        return Why(code="cordoned", text=now.cordon)
    lines = now.lines
    first = lines.swapped[0] if lines.swapped else lines.first_waiting(begun=bool(now.cordon))
    if first is not None and request is not first:
        reason = predicate(first, now)
        text = f": {reason.text}" if reason is not None else ""
        return Why(code="behind", text=f"behind {first.id}{text}")
    return predicate(request, now) or Why(code="turn", text="next in line")


def predicate(request: Request, now: Situation) -> Why | None:
    """Return what keeps the first in line from being admitted, None if the next step takes it."""
    if not now.admissions:
        return Why(code="paused", text="the engine finishes what runs and begins nothing")
    running = len(now.lines.running)
    if running >= now.max_seqs:
        return Why(code="max_num_seqs", need=1, have=0, text=f"{running} run, max_num_seqs is {now.max_seqs}")
    if now.kv.device.tail_live:
        return Why(code="blocks", have=0, text=f"a shrink still moves {now.kv.device.tail_live} blocks")
    # The last attempt stands until the next: a thousand requests behind one head ask the same question.
    if now.head is not None and now.head[0] is request:
        return now.head[1]
    return None


def blocks_text(need: int, have: int) -> Why:
    """Return the predicate of an admission that lacks blocks."""
    return Why(code="blocks", need=need, have=max(have, 0), text=f"need {need}, have {max(have, 0)}")


def _steps(request: Request) -> str:
    return " ".join(f"m{number}" for number in request.in_flight) or "the next step"
