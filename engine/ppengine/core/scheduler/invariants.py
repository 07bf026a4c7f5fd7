"""The check that no block, slot or request of a scheduler is lost or doubled."""

from __future__ import annotations

from collections import Counter

from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError unless blocks, slots and queues agree with the requests."""
    blocks, queues = scheduler.blocks, scheduler.queues
    requests = list(queues.requests.values())
    expected = Counter(block for request in requests for block in request.blocks)
    expected.update(scheduler.steps.pins())
    blocks.device.check(dict(expected))
    reserved = [block for request in requests if request.fence for block in request.fence.host]
    blocks.host.check([block for request in requests for block in request.host_blocks] + reserved)
    owners = {request.slot: request for request in requests if request.slot is not None}
    _require(len(owners) == sum(1 for r in requests if r.slot is not None), "two requests have one slot")
    scheduler.steps.check(owners)
    for request in requests:
        _check_request(scheduler, request)
    for queue in (queues.waiting, queues.swapped, queues.prefilling):
        _require(queue == sorted(queue, key=Request.order), f"a queue is out of order: {queue}")


def _check_request(scheduler: Scheduler, request: Request) -> None:
    queues, text = scheduler.queues, repr(request)
    places = [request in queue for queue in (queues.waiting, queues.swapped, queues.held, queues.running)]
    parked = request.leader is not None and request in request.leader.followers
    expected = {
        "waiting": [not parked, False, False, False],
        "swapped": [False, True, False, False],
        "held": [False, False, True, False],
        "running": [False, False, False, True],
        "loading": [False, False, False, True],
        "finished": [False] * 4,
    }
    _require(places == expected[request.state], f"{text} is in the wrong queue: {places}")
    _require(request.queued == (request in queues.ready), f"{text} and the ready queue disagree")
    giving = request in queues.ready or request in queues.prefilling
    _require(not giving or (request.state == "running" and request.fence is None), f"{text} may not get tokens")
    _require((request.fence is not None) == (request in scheduler.fences.leaving), f"{text} and its fence disagree")
    _require(request.fence is None or bool(request.in_flight), f"{text} has a fence and nothing in flight")
    if request.state == "running" and request.fence is None:
        _require(giving or bool(request.in_flight), f"{text} runs and will never get a token")
    if request.state in ("waiting", "swapped", "held"):
        _require(not request.blocks and not request.in_flight, f"{text} has device blocks or steps in flight")
    if request.blocks:
        _require(len(request.blocks) >= scheduler.blocks.blocks_for(request.num_computed), f"{text} lacks blocks")
        _require(request.slot is not None, f"{text} has blocks and no slot")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)
