"""Requests that are set aside: in no line, seen by verbs, and back at their place."""

import pytest
from ppengine.core.scheduler import wait_reasons
from scheduler_world import World


def aside_world():
    world = World(max_num_seqs=1)
    first, second, third = (world.add([number] * 6)[0] for number in (5, 6, 7))
    world.scheduler.queues.set_aside(second, "finding")
    world.verify()
    return world, first, second, third


def test_a_request_set_aside_is_in_no_line_and_others_pass_it():
    world, _, second, third = aside_world()
    counts = world.scheduler.queues.counts()
    assert (counts.waiting, counts.finding, counts.fetching) == (2, 1, 0)
    assert wait_reasons.why(world.scheduler, second).code == "finding"
    world.scheduler.queues.set_aside(second, "fetching", "fetching 2 of 3 chunks")
    assert wait_reasons.why(world.scheduler, second).text == "fetching 2 of 3 chunks"
    world.run()
    assert third.finished
    assert second.state == "fetching"
    world.scheduler.queues.take_back(second)
    world.run()
    world.verify_end()


def test_it_comes_back_to_its_place_by_its_order():
    world, first, second, third = aside_world()
    world.act("prioritize", second.id, -1)
    world.scheduler.queues.take_back(second)
    assert world.scheduler.queues.waiting == [second, first, third]


def test_abort_hold_and_a_lost_stage_take_it_from_aside():
    world, first, second, third = aside_world()
    queues = world.scheduler.queues
    assert world.act("abort", second.id).state == "applied"
    queues.set_aside(first, "fetching")
    assert world.act("preempt", first.id).code == "INVALID"
    assert world.act("preempt", first.id, None, True).state == "applied"
    assert (first.state, queues.aside) == ("held", {})
    queues.set_aside(third, "finding")
    world.lose(0)
    assert (third.state, queues.aside) == ("waiting", {})
    world.act("release", first.id)
    world.run()
    world.verify_end()


def test_a_follower_cannot_be_set_aside():
    world = World()
    _, follower = world.add([5] * 6, n=2)
    with pytest.raises(ValueError, match="not in the waiting queue"):
        world.scheduler.queues.set_aside(follower, "finding")
