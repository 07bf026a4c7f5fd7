"""The check that no block, slot or request of a scheduler is lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ppengine.core.scheduler import Request, Scheduler
from ppengine.core.scheduler.block_pool import STATES, BlockPool, HostBlockPool
from ppengine.core.scheduler.cache_copies import CacheCopies
from ppengine.core.scheduler.host_cache import HostCache
from ppengine.core.scheduler.step_log import StepLog

_PLACES = {
    "waiting": 0, "swapped": 1, "held": 2, "running": 3, "loading": 3, "finding": 4, "fetching": 4, "finished": None,
}  # fmt: skip
"""The queue in which a request of each state is."""
_FREE, _NULL, _CACHED, _USED, _SHARED = range(len(STATES))


def check(scheduler: Scheduler, fetched: Sequence[int] = ()) -> None:
    """Raise AssertionError unless blocks, slots and queues agree with the requests. `fetched`: slots of fetches."""
    blocks, queues = scheduler.blocks, scheduler.queues
    requests = list(queues.requests.values())
    expected = Counter(block for request in requests for block in request.blocks)
    expected.update(scheduler.steps.pins())
    check_pool(blocks.device, dict(expected))
    reserved = [block for request in requests if request.fence for block in request.fence.host]
    check_host_pool(blocks.host, [block for request in requests for block in request.host_blocks] + reserved)
    if blocks.copies is not None:
        check_copies(scheduler, blocks.copies, fetched)
    owners = {request.slot: request for request in requests if request.slot is not None}
    assert len(owners) == sum(1 for r in requests if r.slot is not None), "two requests have one slot"
    check_slots(scheduler.steps, owners)
    for request in requests:
        _check_request(scheduler, request)
    check_late_rows(scheduler)
    for queue in (queues.waiting, queues.swapped, queues.prefilling):
        assert queue == sorted(queue, key=Request.order), f"a queue is out of order: {queue}"


def check_pool(pool: BlockPool, expected: dict[int, int]) -> None:
    """Raise AssertionError unless references are `expected` and counts agree."""
    refs = {block: count for block, count in enumerate(pool._refs) if count}
    assert refs == expected, "references"
    assert pool.used == len(refs), f"used is {pool.used}, {len(refs)} blocks have references"
    assert not any(pool._refs[pool._fresh :]), "a block is used that was never allocated"
    free, idle = {*pool._free, *range(pool._fresh, pool.limit)}, pool._idle.keys()
    assert len(free) == pool.free, "a block is free twice"
    assert 0 not in free and 0 not in refs and 0 not in idle, "the null block was allocated"
    assert not free & refs.keys() and not free & idle, "a free block is used or cached"
    assert not idle & refs.keys(), "a cached block is used"
    assert all(block < pool.limit for block in free | idle), "a tail block can be taken"
    total = len(free) + len(idle) + len(refs) + pool.withheld + 1
    assert total == pool.size, f"free, cached, used, withheld and null are {total} of {pool.size} blocks"
    states = bytes(_state(pool, block) for block in range(pool.size))
    assert pool.states == states, "states do not agree with references"
    assert pool.tail_live == sum(1 for block in refs if block >= pool.limit), "tail_live is wrong"
    named = {digest: block for block, digest in enumerate(pool._digests) if digest is not None}
    assert named == pool._by_digest, "digests and their index differ"
    assert all(pool._digests[block] is not None for block in idle), "a cached block has no digest"


def _state(pool: BlockPool, block: int) -> int:
    if block == 0:
        return _NULL
    references = pool.references(block)
    return min(_USED + references - 1, _SHARED) if references else _CACHED * pool.is_cached(block)


def check_host_pool(pool: HostBlockPool, expected: list[int]) -> None:
    """Raise AssertionError unless exactly `expected` are allocated, each once."""
    assert sorted(expected) == sorted(pool._used), "host blocks"
    assert pool.free + pool.used <= pool.size, "host blocks are doubled"
    assert pool.on_reuse is not None or pool.free + pool.used == pool.size, "host blocks are lost"


def check_host_cache(cache: HostCache) -> None:
    """Raise AssertionError unless every slot is in exactly one state and the index agrees with the slots."""
    pool, cached = cache._pool, cache._digests
    slots = sorted([*pool._empty, *pool._used, *cached, *cache._reserved, *cache._forgotten])
    assert slots == list(range(pool.size)), "a host slot is lost or doubled"
    assert {digest: slot for slot, digest in cached.items()} == cache._by_digest, "digests and their index differ"
    assert cached.keys() - cache._pins.keys() == pool.spare.keys(), "a slot is spare and pinned, or neither"
    assert cache._pins.keys() <= cached.keys() | cache._forgotten, "a slot is pinned and holds nothing"
    assert cache._forgotten <= cache._pins.keys(), "a slot is out of use for ever"
    assert cache._quarantined <= cache._reserved, "a slot in quarantine is not reserved"
    assert all(count > 0 for count in cache._pins.values()), "a pin is left"


def check_copies(scheduler: Scheduler, copies: CacheCopies, fetched: Sequence[int]) -> None:
    """Raise AssertionError unless the reserved and pinned slots are those of steps, loads and fetches."""
    check_host_cache(copies.cache)
    records = [*scheduler.steps.unretired, scheduler.steps.draft]
    entering = [slot for record in records for slot, _ in record.entering]
    assert sorted([*entering, *fetched]) == sorted(copies.cache._reserved), "a slot is reserved for nothing"
    assert {digest for record in records for _, digest in record.entering} == copies._under_way
    requests = scheduler.queues.requests.values()
    pins = Counter(slot for load in copies.loads.values() for slot in load.slots)
    pins.update(slot for request in requests for slot, _ in request.fetched or ())
    assert pins == copies.cache._pins, "pins"
    filling = [block for record in records for block in record.filling]
    for request, load in copies.loads.items():
        assert request in requests and (request.state in ("loading", "finished")), f"{request} has a load"
        begun, size = load.blocks[: load.begun], scheduler.blocks.block_size
        assert all(block.step for block in begun) and all(block.done for block in load.blocks[: load.done])
        assert {block.step for block in begun if not block.done} <= set(request.in_flight), f"{request} does not wait"
        assert request.num_computed == (load.blocks[0].index + load.begun) * size
        for block in load.blocks:
            assert request in block.users and (bool(block.step) == (block in filling or block.done))
            assert request.blocks[block.index] == block.block, "users of a loaded block have two"
    blocks = {block for load in copies.loads.values() for block in load.blocks if not block.done}
    assert {block.digest: block for block in copies._coming.values()} == copies._coming
    assert set(copies._coming.values()) <= blocks, "a block is expected that no load brings"


def check_slots(steps: StepLog, owners: dict[int, Request]) -> None:
    """Raise AssertionError unless every slot is free, owned once or being released."""
    returning = [slot for record in [*steps.unretired, steps.draft] for slot in record.slots]
    slots = sorted([*owners, *steps._free_slots, *returning])
    assert slots == list(range(steps._num_slots)), "a slot is lost or doubled"


def check_late_rows(scheduler: Scheduler) -> None:
    """Raise AssertionError unless late rows and their requests agree."""
    late = {request: record.number for record in scheduler.steps.unretired for request in record.late}
    given_up = {
        request: record.number
        for record in scheduler.steps.unretired
        for request, again in record.dropped.items()
        if again
    }
    assert not late.keys() & given_up.keys(), "a mask was given up and is waited for"
    assert not scheduler.steps.draft.late, "a draft with late rows was kept"
    known = {request: request.late_step for request in scheduler.queues.requests.values() if request.late_step}
    assert known == late | given_up, "late rows"
    assert all(request.pending for request in known), "a late row samples nothing"


def _check_request(scheduler: Scheduler, request: Request) -> None:
    queues = scheduler.queues
    lines = (queues.waiting, queues.swapped, queues.held, queues.running, queues.aside)
    places = [request in queue for queue in lines]
    parked = request.leader is not None and request in request.leader.followers
    place = None if parked and request.state == "waiting" else _PLACES[request.state]
    assert places == [at == place for at in range(len(lines))], f"{request} is in the wrong queue: {places}"
    assert request.queued == (request in queues.ready), f"{request} and the ready queue disagree"
    giving = request in queues.ready or request in queues.prefilling
    assert not giving or (request.state == "running" and request.fence is None), f"{request} may not get tokens"
    assert (request.fence is not None) == (request in scheduler.fences.leaving), f"{request} and its fence disagree"
    assert request.fence is None or request.in_flight, f"{request} has a fence and nothing in flight"
    if request.state == "running" and request.fence is None:
        lacks_mask = request.constrained and request.mask is None
        assert giving or request.in_flight or lacks_mask, f"{request} runs and will never get a token"
    if request.state == "loading" and request.fence is None:
        loads = scheduler.blocks.copies.loads if scheduler.blocks.copies is not None else {}
        assert request.in_flight or request in loads, f"{request} loads nothing"
    if request.fetched:
        assert request.state in ("waiting", "finding", "fetching"), f"{request} pins slots and will not start"
    if request.state in ("waiting", "finding", "fetching", "swapped", "held"):
        assert not request.blocks and not request.in_flight, f"{request} has device blocks or steps in flight"
    if request.blocks:
        assert len(request.blocks) >= scheduler.blocks.blocks_for(request.num_computed), f"{request} lacks blocks"
        assert request.slot is not None, f"{request} has blocks and no slot"
