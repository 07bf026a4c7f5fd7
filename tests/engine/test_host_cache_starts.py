"""Starts from the host cache: which blocks go out, what is loaded, and verbs and faults meanwhile."""

import pytest
from host_loads import LIMITS, PROMPT, VERBS, begin, evicted, finish, world_of
from ppengine.common.tier_config import TierConfig
from ppengine.core.scheduler import wait_reasons
from ppengine.core.scheduler.cache_copies import HostLimits, host_limits
from ppengine.protocol.steps import MoveKind
from scheduler_world import World


def test_an_evicted_prefix_comes_from_the_host_with_the_same_tokens():
    world = evicted()
    (request,) = world.add(PROMPT, seed=1)
    finish(world)
    sources = request.sources
    assert (sources.device, sources.host, sources.backends, sources.computed) == (0, 20, {}, 1)
    copies = world.scheduler.blocks.copies
    assert (copies.in_total, copies.totals.host, copies.totals.prompt) == (5, 20, 42)
    assert request.num_cached == 20


def test_blocks_that_a_step_fills_go_to_the_host_with_a_later_one():
    world = world_of(num_blocks=40)
    for seed in (1, 2):
        world.add(PROMPT, max_tokens=4, seed=seed)
    step = world.schedule()
    assert [(row.start, row.count) for row in step.rows] == [(0, 21), (20, 1)] and not step.moves
    finish(world)
    world.scheduler.blocks.device.drop_cache()
    (request,) = world.add(PROMPT, seed=3)
    finish(world)
    assert (request.sources.device, request.sources.host) == (0, 20)


def test_a_prompt_whose_positions_are_scored_is_computed():
    world = evicted()
    (request,) = world.add(PROMPT, seed=1, prompt_logprobs=1)
    finish(world)
    assert (request.sources.device, request.sources.host, request.sources.computed) == (0, 0, 21)


def test_the_host_continues_a_prefix_of_the_device():
    world = evicted()
    world.add(PROMPT[:9], max_tokens=1)
    world.run()
    (request,) = world.add(PROMPT, seed=1)
    finish(world)
    assert (request.sources.device, request.sources.host, request.sources.computed) == (8, 12, 1)


def test_a_load_goes_in_slices_and_no_row_comes_before_its_end():
    world = evicted()
    (request,) = begin(world)
    sent = [world.model.steps[-1]]
    while not any(step.rows for step in sent):
        assert request.state == "loading"
        why = wait_reasons.why(world.scheduler, request)
        assert (why.code, why.need) == ("loading", 5)
        world.model.drain()
        world.retire()
        sent += iter(world.schedule, None)
    slices = [[move.kind for move in step.moves] for step in sent if not step.rows]
    assert slices == [[MoveKind.LOAD] * 2, [MoveKind.LOAD] * 2, [MoveKind.LOAD]]
    assert why.text == "4 of 5 blocks loaded from the host cache"
    finish(world)


def test_a_short_prefix_is_computed():
    world = evicted(limits=LIMITS._replace(least_tokens=21))
    (request,) = world.add(PROMPT, seed=1)
    finish(world)
    assert (request.sources.host, request.sources.computed) == (0, 21)


def test_copies_out_go_with_other_steps_until_nothing_runs():
    world = world_of()
    world.add(PROMPT, max_tokens=2, ignore_eos=True)
    sent = list(iter(world.schedule, None))
    while world.model.drain() or world.retire() is not None:
        sent += iter(world.schedule, None)
    with_rows, alone = ([len(step.moves) for step in sent if bool(step.rows) == rows] for rows in (True, False))
    assert with_rows == [0, 2], "the blocks are full when the first step has retired"
    assert alone == [2, 1]
    world.verify_end()


def test_a_pause_makes_no_step_for_copies_out():
    world = world_of()
    world.add(PROMPT, max_tokens=1)
    world.schedule()
    world.scheduler.pause("eve", finish=False)
    world.model.drain()
    world.run()
    copies = world.scheduler.blocks.copies
    assert copies.out_total == 2, "they go along with the release of the request's slot"
    world.scheduler.resume()
    world.run()
    assert copies.out_total == 5


def test_blocks_that_the_host_has_are_not_copied_again():
    world = evicted()
    copies = world.scheduler.blocks.copies
    before = copies.out_total
    world.add(PROMPT, seed=1, max_tokens=1)
    finish(world)
    assert copies.out_total == before


def test_a_device_prefix_that_left_the_host_is_copied_again():
    world = world_of()
    world.add(PROMPT, max_tokens=1)
    world.run()
    copies = world.scheduler.blocks.copies
    copies.cache.forget_all()
    world.add(PROMPT, max_tokens=1)
    finish(world)
    assert copies.cache.cached == 5


def test_a_block_that_is_evicted_before_its_turn_is_dropped_and_counted():
    world = world_of(num_host_blocks=0)
    world.add(PROMPT, max_tokens=1)
    world.run()
    assert world.scheduler.blocks.copies.dropped_total == 0, "they wait on the device"
    world.scheduler.blocks.device.drop_cache()
    world.run()
    assert world.scheduler.blocks.copies.dropped_total == 5


def test_a_swap_takes_the_slots_of_cached_blocks():
    world = evicted(num_host_blocks=5, preemption="swap")
    (request,) = world.add(list(range(30, 47)), max_tokens=8, ignore_eos=True)
    world.round()
    assert world.act("swap_out", request.id, False).state in ("pending", "applied")
    world.run()
    assert request.swaps == 1
    finish(world)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("retired", [0, 1, 2])
def test_verbs_end_a_load_and_free_its_slots(verb, retired):
    world = evicted()
    (request,) = begin(world)
    for _ in range(retired):
        world.model.drain()
        world.retire()
        world.schedule()
    world.act(verb[0], request.id, *verb[1:])
    world.run()
    if request.state == "held":
        assert not world.scheduler.blocks.copies.loads
        world.act("release", request.id)
    finish(world)


def test_a_load_that_no_step_has_begun_leaves_no_trace_on_the_stages():
    world = evicted()
    (first,) = world.add(list(range(40, 48)), max_tokens=4, ignore_eos=True)
    while world.schedule() is not None:
        pass
    (request,) = world.add(PROMPT, seed=1)
    assert world.act("abort", request.id).state == "applied"
    finish(world)
    assert first.finish_reason == "length"


def test_a_shrink_moves_the_blocks_of_a_load():
    world = evicted(num_blocks=24, stages=2)
    (other,) = world.add(list(range(40, 49)) * 3, max_tokens=4, ignore_eos=True)
    world.schedule()
    (request,) = begin(world)
    assert max(request.blocks) >= 13
    world.begin_resize(13)
    finish(world)
    assert world.reports[-1].after == 13
    assert request.finish_reason == other.finish_reason == "length"


def test_a_lost_stage_ends_a_load_and_forgets_the_slots():
    world = evicted(stages=2)
    (request,) = begin(world)
    world.lose(1)
    copies = world.scheduler.blocks.copies
    assert (request.state, copies.loads, copies.cache.cached, copies.cache.moving) == ("waiting", {}, 0, 0)
    finish(world)
    assert (request.sources.host, request.sources.computed) == (0, 21)


def test_samples_fork_a_prompt_that_was_loaded():
    world = evicted()
    group = begin(world, n=3)
    assert [request.state for request in group] == ["loading", "waiting", "waiting"]
    finish(world)
    assert world.scheduler.blocks.copies.in_total == 5


def test_a_cordon_lets_a_load_go_on():
    world = evicted()
    (request,) = begin(world)
    world.run_cordoned()
    assert request.finished
    finish(world)


def test_slots_fetched_for_a_request_are_counted_for_their_backend():
    world = evicted()
    copies = world.scheduler.blocks.copies
    (request,) = world.add(PROMPT, seed=1)
    slots = copies.cache.lookup(request.full_digests(5, 4))
    world.scheduler.queues.set_aside(request, "fetching")
    copies.keep_for(request, slots[3:], "nvme0")
    assert copies.cache.reserve(23) is None, "fetched slots are pinned"
    world.scheduler.queues.take_back(request)
    finish(world)
    sources = request.sources
    assert (sources.device, sources.host, sources.backends, sources.computed) == (0, 12, {"nvme0": 8}, 1)
    assert copies.totals.backends == {"nvme0": 8}


@pytest.mark.parametrize("end", ["abort", "hold", "lose"])
def test_slots_fetched_for_a_request_that_does_not_start_are_let_go(end):
    world = evicted()
    copies = world.scheduler.blocks.copies
    (request,) = world.add(PROMPT, seed=1)
    copies.keep_for(request, copies.cache.lookup(request.full_digests(5, 4)), "nvme0")
    if end == "abort":
        world.act("abort", request.id)
    elif end == "hold":
        world.act("preempt", request.id, None, True)
        world.act("release", request.id)
    else:
        world.lose(0)
    assert request.fetched is None
    world.verify()
    finish(world)


def test_limits_in_blocks_of_the_place_with_the_largest():
    tiers = TierConfig(host=True, out_mib=1, in_mib=2.5, least_tokens=32)
    assert host_limits(tiers, 2**19, on_gpus=False) == HostLimits(2, 5, 32, 5)
    assert host_limits(tiers, 2**24, on_gpus=True) == HostLimits(1, 1, 32, 1), "at least one"
    assert host_limits(TierConfig(), 2**19, on_gpus=False) is None


def test_a_gpu_copies_more_in_a_step_than_a_cpu():
    tiers = TierConfig(host=True, least_tokens=32)
    assert host_limits(tiers, 2**20, on_gpus=False) == HostLimits(8, 16, 32, 64)
    assert host_limits(tiers, 2**20, on_gpus=True) == HostLimits(16, 128, 32, 512)


def test_a_load_that_nothing_waits_beside_goes_in_larger_slices():
    world = evicted(limits=LIMITS._replace(in_blocks=1, in_alone=3))
    (request,) = world.add(PROMPT, seed=1)
    assert len(world.schedule().moves) == 3
    world.model.drain()
    finish(world)
    assert request.sources.host == 20
    world = evicted(limits=LIMITS._replace(in_blocks=1, in_alone=3), stages=2)
    world.add([7, 8, 9], max_tokens=9, seed=2)
    world.schedule()
    (request,) = world.add(PROMPT, seed=1)
    assert len(world.schedule().moves) == 1, "the other one's next token waits for this step"
    finish(world)
    assert request.sources.host == 20


def test_without_a_host_cache_there_is_nothing_of_it():
    world = World()
    assert world.scheduler.blocks.copies is None
    (request,) = world.add(PROMPT)
    finish(world)
    assert request.sources is None
