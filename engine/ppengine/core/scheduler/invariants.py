"""Reading the scheduler: counts, and the check that nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter

from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines
from ppengine.core.scheduler.step_log import Pipeline
from ppengine.protocol.snapshot import Queues


def queues(lines: Lines, fences: Fences) -> Queues:
    """Return how many requests are in each state."""
    loading = sum(1 for request in lines.running if request.state == "loading")
    queued = len(lines.waiting) + lines.parked + len(lines.swapped) + len(lines.running)
    ending = sum(1 for request in fences.leaving if request.finished)
    return Queues(
        waiting=len(lines.waiting) + lines.parked,
        running=len(lines.running) - loading,
        swapped=len(lines.swapped),
        held=len(fences.requests) - queued - ending,
        loading=loading,
    )


def check(fences: Fences, lines: Lines, kv: KvBlocks, pipeline: Pipeline) -> None:
    """Raise AssertionError unless blocks, slots and queues agree with what the requests hold."""
    requests = list(fences.requests.values())
    expected = Counter(block for request in requests for block in request.blocks)
    expected.update(pipeline.pins())
    kv.device.check(dict(expected))
    reserved = [block for request in requests if request.fence for block in request.fence.host]
    kv.host.check([block for request in requests for block in request.host_blocks] + reserved)
    owners = {request.slot: request for request in requests if request.slot is not None}
    _require(len(owners) == sum(1 for r in requests if r.slot is not None), "two requests have one slot")
    pipeline.check(owners)
    for request in requests:
        _check_request(request, fences, lines, kv)
    waiting = [request.arrival for request in lines.waiting]
    _require(waiting == sorted(waiting), "the waiting line is out of order")


def _check_request(request: Request, fences: Fences, lines: Lines, kv: KvBlocks) -> None:
    text = repr(request)
    places = [request in lines.waiting, request in lines.swapped, request in lines.running]
    parked = request.leader is not None and request in request.leader.followers
    expected = {
        "waiting": [not parked, False, False],
        "swapped": [False, True, False],
        "running": [False, False, True],
        "loading": [False, False, True],
        "held": [False] * 3,
        "finished": [False] * 3,
    }
    _require(places == expected[request.state], f"{text} stands in the wrong line: {places}")
    _require(request.queued == (request in lines.ready), f"{text} and the line of decodes disagree")
    giving = request in lines.ready or request in lines.prefilling
    _require(not giving or (request.state == "running" and request.fence is None), f"{text} may not be given tokens")
    _require((request.fence is not None) == (request in fences.leaving), f"{text} and its fence disagree")
    _require(request.fence is None or bool(request.in_flight), f"{text} has a fence and nothing in flight")
    if request.state == "running" and request.fence is None:
        _require(giving or bool(request.in_flight), f"{text} runs and will never be given a token")
    if request.state in ("waiting", "swapped", "held"):
        _require(not request.blocks and not request.in_flight, f"{text} has device blocks or steps in flight")
    if request.blocks:
        _require(len(request.blocks) >= kv.blocks_for(request.num_computed), f"{text} has too few blocks")
        _require(request.slot is not None, f"{text} has blocks and no slot")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)
