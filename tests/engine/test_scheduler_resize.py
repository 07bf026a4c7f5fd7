"""Growing and shrinking the cache while requests run."""

import pytest
from ppengine.protocol.steps import MoveKind
from scheduler_world import World

LONG = {"ignore_eos": True}


def prompt(length, first=10):
    return [(first + index) % 50 for index in range(length)]


def busy(count=16, length=10, tokens=22, **config):
    """Return a world whose `count` greedy requests hold at least 90 % of the blocks."""
    config = {"stages": 2, "num_blocks": 69, "num_host_blocks": 40, "max_num_seqs": count, **config}
    world = World(block_size=4, max_model_len=40, max_num_batched_tokens=512, **config)
    requests = [world.add(prompt(length, index * 3), max_tokens=tokens, **LONG)[0] for index in range(count)]
    while world.scheduler.blocks.device.used < 0.9 * world.scheduler.blocks.device.size:
        assert world.round()
    return world, requests


@pytest.mark.parametrize("host", [40, 10, 0])
@pytest.mark.parametrize("ahead", [False, True])
def test_halving_a_full_cache_loses_no_token_and_happens_as_planned(host, ahead):
    world, requests = busy(num_host_blocks=host, schedule_ahead=ahead)
    world.schedule()
    plan = world.begin_resize(34)
    assert plan.before == 69
    assert plan.move > 0
    assert (plan.swap_requests > 0, plan.recompute_requests > 0) == (host > 0, host < 40)
    while not world.reports:
        assert world.round()
    report = world.reports[0]
    assert (report.before, report.after, world.scheduler.blocks.device.size) == (69, 34, 34)
    assert (report.swap_requests, report.recompute_requests) == (plan.swap_requests, plan.recompute_requests)
    assert (report.swap_blocks, report.recompute_blocks) == (plan.swap_blocks, plan.recompute_blocks)
    assert (report.move, report.cached_dropped) == (plan.move, plan.cached_dropped)
    world.begin_resize(69)
    world.run()
    assert world.scheduler.blocks.device.size == 69
    world.verify_end()
    assert all(request.finish_reason == "length" for request in requests)


def test_blocks_of_victims_do_not_move_first():
    world, requests = busy(num_host_blocks=0)
    world.act("abort", requests[0].id)
    world.model.drain()
    while world.retire() is not None:
        world.model.drain()
    while world.schedule() is not None:
        pass
    plan = world.begin_resize(34)
    fenced = [request for request in requests if request.fence is not None]
    assert fenced
    assert plan.recompute_requests > 0
    step = world.schedule()
    assert step.moves
    assert step.number not in {number for request in fenced for number in request.in_flight}
    while not world.reports:
        assert world.round()
    assert world.reports[0].move == plan.move
    world.run()
    world.verify_end()


def test_victims_of_a_shrink_are_the_newest():
    world, requests = busy()
    plan = world.scheduler.resize.plan(34)
    names = [request.id for request in reversed(requests)]
    assert [name for name, _ in plan.victims] == names[: len(plan.victims)]


def test_an_empty_tail_shrinks_at_once():
    world = World(num_blocks=40)
    plan = world.begin_resize(20)
    assert (plan.free_tail, plan.move, plan.cached_dropped) == (20, 0, 0)
    assert world.resize == (20, 1)
    world.run()
    assert world.reports[0].after == 20


def test_cached_tail_blocks_are_dropped_and_not_found_again():
    world = World(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=200)
    for index in range(4):
        world.add(prompt(32, index * 5), max_tokens=1)
    world.run()
    cached = world.scheduler.blocks.device.cached
    plan = world.begin_resize(20)
    assert plan.cached_dropped > 0
    assert world.scheduler.blocks.device.cached == cached - plan.cached_dropped
    for index in range(4):
        world.add(prompt(32, index * 5), max_tokens=3, **LONG)
    world.run()
    world.verify_end()


def test_shared_blocks_move_once_for_all_tables():
    world = World(stages=2, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=200)
    filler = world.add(prompt(40, 30), max_tokens=2, **LONG)[0]
    leader, *others = world.add(prompt(30), n=4, max_tokens=10, **LONG)
    for _ in range(3):
        world.round()
    assert filler.finished
    shared = [block for block in leader.blocks if world.scheduler.blocks.device.references(block) == 4]
    assert len(shared) == 7
    before = max(shared)
    plan = world.begin_resize(world.scheduler.resize.floor + 3)
    assert plan.move > 0
    step = world.schedule()
    sources = [move.src for move in step.moves if move.kind == MoveKind.DEVICE]
    assert len(sources) == len(set(sources))
    assert max(leader.blocks) < before or before < world.scheduler.resize.floor + 3
    assert [request.blocks[:7] for request in others if request.blocks] == [
        leader.blocks[:7] for request in others if request.blocks
    ]
    world.run()
    world.verify_end()


def test_too_few_for_one_request_is_refused_with_the_floor():
    world = World(max_model_len=48, num_blocks=24)
    plan = world.begin_resize(12)
    assert plan.refused == (
        "12 blocks are too few: one request of the model's length needs 12 and the null block 1; at least 13 would fit"
    )
    assert world.scheduler.blocks.device.limit == 24
    assert world.begin_resize(13).refused is None


def test_nothing_allocates_in_the_tail_once_a_shrink_began():
    world, _ = busy(num_host_blocks=0)
    world.begin_resize(34)
    while not world.reports:
        for step in (world.schedule(), world.schedule()):
            if step is not None:
                assert all(move.dst < 34 for move in step.moves if move.kind != MoveKind.OUT)
        world.model.drain()
        world.retire()
    assert all(block < 34 for request in world.scheduler.queues.requests.values() for block in request.blocks)


def test_growing_back_supersedes_a_shrink_and_calls_its_victims_back():
    world, requests = busy()
    world.schedule()
    plan = world.begin_resize(34)
    assert plan.swap_requests > 0
    fenced = [request for request in requests if request.fence is not None]
    assert fenced
    assert world.begin_resize(69).after == 69
    assert all(request.fence is None or request.fence.copying for request in fenced)
    world.run()
    assert world.scheduler.blocks.device.size == 69
    world.verify_end()


def test_a_deeper_shrink_supersedes_a_shrink():
    world, _ = busy()
    world.schedule()
    world.begin_resize(50)
    world.begin_resize(20)
    world.run()
    assert (world.scheduler.blocks.device.size, len(world.reports)) == (20, 1)
    world.verify_end()


def test_a_shrink_supersedes_a_growth_that_is_under_way():
    world = World(num_blocks=20)
    world.begin_resize(30)
    assert world.resize[1] is not None
    world.begin_resize(16)
    world.run()
    assert world.scheduler.blocks.device.size == 16
    assert world.model.stages[0].mapped == 16


def test_a_growth_that_a_stage_cannot_follow_ends_at_the_smallest_answer():
    world = World(num_blocks=20)
    step = world.scheduler.resize.map_step(30)
    assert step.map_blocks == 30
    assert world.scheduler.blocks.device.size == 20
    world.scheduler.retire(step.number, [])
    report = world.scheduler.resize.finish(24)
    assert (report.before, report.after) == (20, 24)
    assert world.scheduler.blocks.device.free == 23


def test_a_map_step_over_live_blocks_is_an_error():
    world, _ = busy()
    with pytest.raises(ValueError, match="still live"):
        world.scheduler.resize.map_step(34)


def test_a_shrink_while_paused_ends():
    world, _ = busy()
    world.scheduler.paused = True
    world.begin_resize(34)
    while not world.reports:
        assert world.round()
    world.scheduler.paused = False
    world.run()
    world.verify_end()


def test_swap_in_and_abort_race_a_shrink():
    world, requests = busy()
    held = requests[3]
    world.act("swap_out", held.id)
    while held.state != "held":
        assert world.round()
    world.act("swap_in", held.id)
    world.schedule()
    world.begin_resize(34)
    world.act("abort", requests[-1].id)
    world.act("abort", requests[0].id)
    world.run()
    assert world.scheduler.blocks.device.size == 34
    world.verify_end()
