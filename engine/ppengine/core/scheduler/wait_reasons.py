"""The reason why a request does not run now: the condition that failed, with its numbers."""

from __future__ import annotations

from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.scheduler import Scheduler
from ppengine.protocol.snapshot import Why

_ASIDE = {"finding": "looked for", "fetching": "read"}


def why(scheduler: Scheduler, request: Request) -> Why | None:
    """Return the reason why `request` waits; None if it does not."""
    return Reasons(scheduler).of(request)


class Reasons:
    """Reasons of many requests at one moment. Those that many share are made once: reports ask for a thousand."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._flying: dict[tuple[int, ...], Why] = {}
        """By the steps in flight that hold a request."""
        self._behind: tuple[Request | None, Why] | None = None
        """The first request in line, and the reason of all behind it."""

    def of(self, request: Request) -> Why | None:
        """Return the reason why a request waits; None if it does not."""
        if request.finished:
            return None
        scheduler = self._scheduler
        if (reason := scheduler.queues.aside.get(request)) is not None:
            return Why(code=request.state, text=reason or f"its chunks are {_ASIDE[request.state]} in backends")
        if request.fence is not None:
            return Why(code="fenced", text=f"{request.fence.by} waits for {_steps(request)}")
        if (loading := _loading(scheduler, request)) is not None:
            return loading
        if request.state == "held":
            return Why(code="held", text=request.held_by)
        if request.in_flight:
            return self._in_flight(request)
        if scheduler.paused:
            return Why(code="paused", text=_paused(scheduler))
        if request.state == "running":
            return _running(scheduler, request)
        return self._waiting(request)

    def _in_flight(self, request: Request) -> Why:
        key = tuple(request.in_flight)
        if (known := self._flying.get(key)) is None:
            known = self._flying[key] = Why(code="in_flight", need=len(key), text=f"{_steps(request)} in flight")
        return known

    def _waiting(self, request: Request) -> Why:
        scheduler, leader = self._scheduler, request.leader
        cordon = scheduler.batcher.cordon
        if leader is not None and scheduler.queues.follows(request):
            return Why(code="behind", text=f"forks {leader.id} when its prompt is computed")
        if cordon and not request.begun:
            return Why(code="cordoned", text=cordon)
        if self._behind is None:
            self._behind = _line(scheduler)
        first, reason = self._behind
        if first is not None and request is not first:
            return reason
        return _blocker(scheduler, request) or Why(code="turn", text="next in line")


def _line(scheduler: Scheduler) -> tuple[Request | None, Why]:
    """Return the first request in line, and the reason of all behind it."""
    queues = scheduler.queues
    first = queues.swapped[0] if queues.swapped else queues.first_waiting(begun=bool(scheduler.batcher.cordon))
    reason = None if first is None else _blocker(scheduler, first)
    text = f"{reason.text}; " if reason is not None else ""  # the cause first: tables cut the end
    return first, Why(code="behind", text="" if first is None else f"{text}behind {first.id}")


def _loading(scheduler: Scheduler, request: Request) -> Why | None:
    """Return the progress of a load from the host cache, None if the request has none."""
    copies = scheduler.blocks.copies
    load = copies.loads.get(request) if copies is not None else None
    if load is None:
        return None
    done, count = load.done, len(load.slots)
    return Why(code="loading", need=count, have=done, text=f"{done} of {count} blocks loaded from the host cache")


def _running(scheduler: Scheduler, request: Request) -> Why | None:
    if request.constrained and request.mask is None:
        return Why(code="mask", text="waits for the mask of its next token, from the grammar process")
    if request in scheduler.batcher.starved:
        have = max(scheduler.blocks.device.available, 0)
        return Why(code="blocks", need=1, have=have, text=f"needs 1 more block, has {have}")
    flying = scheduler.steps.micro_batches
    if scheduler.full:
        return Why(code="turn", need=1, have=0, text=f"its turn comes after {flying} micro-batches in flight")
    return None


def _blocker(scheduler: Scheduler, request: Request) -> Why | None:
    """Return why the first request in line does not start, None if the next step takes it."""
    batcher, limit = scheduler.batcher, scheduler.config.max_num_seqs
    running = len(scheduler.queues.running)
    if batcher.closed:
        first = f"; {running} running finish first" if running else ""
        return Why(code="paused", text=f"{_paused(scheduler)}{first}")
    if running >= limit:
        return Why(code="max_num_seqs", need=1, have=0, text=f"{running} run, max_num_seqs is {limit}")
    tail_live = scheduler.blocks.device.tail_live
    if tail_live:
        return Why(code="blocks", have=0, text=f"a shrink still moves {tail_live} blocks")
    # The reason of the last attempt is kept until the next: all requests behind one head share it.
    if batcher.head is not None and batcher.head[0] is request:
        return batcher.head[1]
    return None


def _paused(scheduler: Scheduler) -> str:
    return f"paused by {scheduler.paused_by}; resume goes on"


def _steps(request: Request) -> str:
    return " ".join(f"m{number}" for number in request.in_flight) or "the next step"
