"""Requests that begin alike load a block from the host cache once: verbs, a shrink and a lost stage meanwhile."""

import pytest
from host_loads import LIMITS, PROMPT, VERBS, begin, evicted, finish


@pytest.mark.parametrize(("behind", "device", "host"), [(0, 0, 20), (1, 8, 12), (2, 16, 0)])
def test_requests_with_one_prefix_load_it_once(behind, device, host):
    """Blocks that have come are found on the device; the rest is computed if it is too short to be loaded."""
    world = evicted(stages=2, num_blocks=60)
    begin(world)
    for _ in range(behind):
        world.model.drain()
        world.retire()
        world.schedule()
    others = [request for seed in range(7) for request in world.add(PROMPT, seed=seed, max_tokens=3)]
    finish(world)
    assert world.scheduler.blocks.copies.in_total == 5
    assert (others[0].sources.device, others[0].sources.host) == (device, host)
    assert {request.num_cached for request in others[1:]} == {20}


def test_each_of_two_requests_loads_its_own_end_of_a_common_prefix():
    world = evicted(num_blocks=40)
    other = [*PROMPT[:12], *range(30, 39)]
    world.add(other, max_tokens=1)
    world.run()
    world.scheduler.blocks.device.drop_cache()
    before = world.scheduler.blocks.copies.in_total
    requests = [*begin(world), *world.add(other, seed=2)]
    finish(world)
    assert [request.sources.host for request in requests] == [20, 20]
    assert world.scheduler.blocks.copies.in_total - before == 5 + 2


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("retired", [0, 1, 2])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_verbs_on_one_of_several_leave_the_load_to_the_others(which, verb, retired):
    world = evicted(stages=2, num_blocks=60)
    requests = begin(world)
    for seed in (2, 3):
        requests += world.add(PROMPT, seed=seed, max_tokens=3)
        world.schedule()
    for _ in range(retired):
        world.model.drain()
        world.retire()
        world.schedule()
    world.act(verb[0], requests[which].id, *verb[1:])
    world.run()
    others = [request for request in requests if request is not requests[which]]
    assert all(request.finish_reason == "length" for request in others)
    assert world.scheduler.blocks.copies.in_total == 5, "the others need no second copy"
    if requests[which].state == "held":
        world.act("release", requests[which].id)
    finish(world)


def test_a_load_whose_fence_is_cancelled_goes_on_with_its_blocks_where_they_are():
    """A shrink must not move the blocks of a load for one of two requests: its fence may be cancelled yet."""
    world = evicted(num_blocks=60, stages=2, limits=LIMITS._replace(in_blocks=1))
    (low,) = world.add([3] * 45, max_tokens=3, ignore_eos=True)
    (large,) = world.add([4] * 41, max_tokens=7, ignore_eos=True, priority=-1)
    for _ in range(2):
        world.schedule()
        world.model.drain()
        world.retire()
    (first,) = begin(world, priority=1)
    (second,) = world.add(PROMPT, seed=2, max_tokens=3, ignore_eos=True)
    world.schedule()
    assert first.state == second.state == "loading" and first.in_flight == second.in_flight
    world.act("abort", low.id)
    world.model.drain()
    while low.id in world.scheduler.queues.requests:
        world.retire()
    world.schedule()
    load = world.scheduler.blocks.copies.loads[first]
    assert first.in_flight and load.begun < len(load.blocks)
    target = len({*large.blocks, *first.blocks, *second.blocks})
    assert world.begin_resize(target).victims == [(first.id, "swap")]
    assert min(first.blocks) >= target and first.fence is not None and second.fence is None
    world.schedule()
    assert max(large.blocks) < target, "blocks of its own move"
    world.begin_resize(60)
    assert first.fence is None
    assert first.blocks[:5] == second.blocks[:5]
    finish(world)
    assert world.scheduler.blocks.copies.in_total == 5


def test_a_lost_stage_ends_the_loads_of_a_common_prefix():
    world = evicted(stages=2, num_blocks=40)
    requests = begin(world)
    requests += world.add(PROMPT, seed=2)
    world.schedule()
    world.lose(1)
    assert not world.scheduler.blocks.copies.loads
    finish(world)
    assert [request.sources.host for request in requests] == [0, 0]
