"""The stage model catches planted errors: a stale block, a slot off by one, a lost copy."""

import pytest
from ppengine.core.scheduler.block_pool import BlockPool
from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.cache_copies import CacheCopies, HostLimits
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.host_cache import HostCache
from ppengine.core.scheduler.step_log import StepLog
from ppengine.protocol.steps import Move, MoveKind, Row
from scheduler_world import Driver, World
from stage_model import WrongRead


def prompt(length, first=10):
    return [(first + index) % 50 for index in range(length)]


def two_running():
    world = World(stages=2, num_blocks=40, max_num_batched_tokens=64)
    for first in (10, 30):
        world.add(prompt(10, first), max_tokens=20, ignore_eos=True)
    world.round()
    return world


def test_the_same_world_without_a_plant_is_clean():
    world = two_running()
    world.run()
    world.verify_end()


def test_a_stale_block_is_caught():
    world = two_running()
    state = world.model.stages[1]
    state.device[1], state.device[4] = state.device[4], state.device[1]
    with pytest.raises(WrongRead, match="reads block 1 at position 0"):
        world.run()


def test_one_stale_position_is_caught():
    world = two_running()
    world.model.stages[0].device[2][3] = 12345
    with pytest.raises(WrongRead, match="position 7"):
        world.run()


def test_a_slot_off_by_one_is_caught():
    world = two_running()
    step = world.scheduler.schedule()
    row = step.rows[0]
    step.rows[0] = Row(row.slot + 1, row.start, row.count, row.sample, row.token)
    world.model.send(step)
    with pytest.raises((WrongRead, ValueError)):
        world.run()


def test_a_position_off_by_one_is_caught():
    world = two_running()
    step = world.scheduler.schedule()
    row = step.rows[0]
    step.rows[0] = Row(row.slot, row.start + 1, row.count, row.sample, row.token)
    world.model.send(step)
    with pytest.raises((WrongRead, KeyError)):
        world.run()


def test_a_table_off_by_one_is_caught():
    world = World(stages=1)
    world.add(prompt(6), max_tokens=8, ignore_eos=True)
    world.round()
    while not (step := world.scheduler.schedule()).tables:
        world.model.send(step)
        world.model.drain()
        world.retire()
    slot, first, blocks = step.tables[0]
    step.tables[0] = (slot, first - 1, blocks)
    world.model.send(step)
    with pytest.raises((WrongRead, IndexError)):
        world.run()


def test_a_lost_copy_is_caught():
    world = World(stages=1)
    world.add(prompt(8), max_tokens=1)
    world.run()
    world.add(prompt(8), max_tokens=1)
    step = world.scheduler.schedule()
    assert step.moves.pop().kind == MoveKind.DEVICE
    world.model.send(step)
    with pytest.raises(WrongRead):
        world.run()


def test_a_copy_to_the_wrong_block_is_caught():
    world = two_running()
    request = next(iter(world.scheduler.queues.requests.values()))
    world.act("swap_out", request.id, False)
    planted = False
    with pytest.raises(WrongRead):
        for _ in range(60):
            step = world.scheduler.schedule()
            if step is not None:
                for index, move in enumerate(step.moves):
                    if move.kind == MoveKind.IN and not planted:
                        step.moves[index] = Move(move.kind, move.src + 1, move.dst)
                        planted = True
                world.model.send(step)
            world.model.drain()
            world.retire()
    assert planted


def hunt(monkeypatch_target, name, broken, monkeypatch, **world):
    """Break one function; random operations must notice within a few seeds."""
    monkeypatch.setattr(monkeypatch_target, name, broken)
    for seed in range(20):
        driver = Driver(seed, stages=3, preemption="swap", schedule_ahead=True, num_blocks=18, checked=False, **world)
        for _ in range(1500):
            driver.step()
        driver.finish()


def test_a_fence_that_does_not_wait_is_caught(monkeypatch):
    original = Fences.set

    def hasty(self, request, fence):
        in_flight, request.in_flight = request.in_flight, []
        original(self, request, fence)
        request.in_flight = in_flight + request.in_flight

    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        hunt(Fences, "set", hasty, monkeypatch)


def test_a_relocation_without_its_copy_is_caught(monkeypatch):
    original = BlockTables.relocate

    def lazy(self, block, owners):
        original(self, block, owners)
        self._steps._moves.pop()

    with pytest.raises(WrongRead):
        hunt(BlockTables, "relocate", lazy, monkeypatch)


def test_blocks_entered_before_they_are_computed_are_caught(monkeypatch):
    original = BlockTables.allocate

    def eager(self, request, plan):
        original(self, request, plan)
        for index, digest in enumerate(request.full_digests(request.num_tokens // self.block_size, self.block_size)):
            self.device.enter(request.blocks[index], digest)

    # Steps are small: one that computes a whole prompt also writes its blocks before any other step reads them.
    with pytest.raises(WrongRead):
        hunt(BlockTables, "allocate", eager, monkeypatch, max_num_batched_tokens=8)


HOST_CACHE = {"num_host_blocks": 30, "host_cache": HostLimits(2, 1, 4)}


def test_a_slot_with_the_digest_of_another_block_is_caught(monkeypatch):
    original, last = HostCache.enter, []

    def shifted(self, slot, digest):
        last.append(digest)
        return original(self, slot, last[-2] if len(last) > 1 else digest)

    with pytest.raises(WrongRead):
        hunt(HostCache, "enter", shifted, monkeypatch, **HOST_CACHE)


def test_a_load_whose_slots_are_not_pinned_is_caught(monkeypatch):
    monkeypatch.setattr(HostCache, "unpin", lambda self, slots: None)
    with pytest.raises(WrongRead):
        hunt(HostCache, "pin", lambda self, slots: None, monkeypatch, **HOST_CACHE)


def test_a_request_that_runs_before_its_load_is_caught(monkeypatch):
    original = CacheCopies.start

    def hasty(self, request, *arguments):
        original(self, request, *arguments)
        request.state = "running"

    with pytest.raises((WrongRead, AssertionError, ValueError, KeyError)):
        hunt(CacheCopies, "start", hasty, monkeypatch, **HOST_CACHE)


def lost_step():
    """Lose the steps that fill a prompt, then run two requests that begin like it."""
    world = World(stages=2, max_num_batched_tokens=4, checked=False)
    world.add(prompt(14), max_tokens=2, ignore_eos=True)
    sent = list(iter(world.schedule, None))
    assert [(row.start, row.count) for step in sent for row in step.rows] == [(0, 4), (4, 4)]
    world.lose(1)
    assert world.scheduler.queues.waiting, "it begins again"
    world.run()
    world.verify_end()
    return world


def test_a_prefix_of_a_lost_step_is_not_found():
    assert lost_step().scheduler.blocks.hit_tokens_total == 0


def test_a_prefix_of_a_lost_step_that_is_found_is_caught(monkeypatch):
    monkeypatch.setattr(BlockPool, "drop_cache", lambda self: 0)
    with pytest.raises(WrongRead, match="reads block 1 at position 0"):
        lost_step()


def prefix_under_way():
    """Begin a load of a block a step, then run a request with the same prefix beside it; return both."""
    world = World(stages=2, num_blocks=24, num_host_blocks=24, host_cache=HostLimits(8, 1, 4), checked=False)
    world.add(prompt(21), max_tokens=1)
    world.run()
    world.scheduler.blocks.device.drop_cache()
    requests = []
    for _ in range(2):
        requests += world.add(prompt(21), max_tokens=3, ignore_eos=True)
        world.schedule()
    assert requests[0].state == "loading"
    world.run()
    world.verify_end()
    return requests


def test_a_hit_on_a_block_under_way_from_the_host_waits_for_it():
    assert [request.sources.host for request in prefix_under_way()] == [20, 20]


def test_a_hit_on_a_block_under_way_from_the_host_that_does_not_wait_is_caught(monkeypatch):
    original = CacheCopies.start

    def eager(self, request, *arguments):
        original(self, request, *arguments)
        for block, digest in zip(request.blocks, request.digests, strict=False):
            self._device.enter(block, digest)

    monkeypatch.setattr(CacheCopies, "start", eager)
    with pytest.raises(WrongRead, match=r"which step \d may still load"):
        prefix_under_way()


def test_a_request_that_shares_a_load_and_does_not_wait_for_it_is_caught(monkeypatch):
    original = BlockTables.fit

    def hasty(self, request):
        plan = original(self, request)
        plan.shared, plan.host, plan.coming = plan.shared + plan.coming, plan.host[len(plan.coming) :], []
        return plan

    monkeypatch.setattr(BlockTables, "fit", hasty)
    with pytest.raises(WrongRead, match=r"which step \d may still load|which holds something else"):
        prefix_under_way()


def copied_and_filled():
    """Let two requests begin alike: the second one queues blocks for the host that the first one fills now."""
    world = World(num_host_blocks=24, host_cache=HostLimits(2, 1, 4), num_blocks=40, max_num_batched_tokens=64)
    for seed in (1, 2):
        world.add(prompt(21), max_tokens=2, seed=seed)
    assert world.schedule().moves == []
    world.run()
    world.verify_end()


def test_a_block_is_copied_to_the_host_behind_the_step_that_fills_it():
    copied_and_filled()


def test_a_copy_to_the_host_of_a_block_that_the_same_step_fills_is_refused(monkeypatch):
    monkeypatch.setattr(StepLog, "fills", lambda self, block: False)
    with pytest.raises(ValueError, match="block 1 is copied by step 1, whose rows fill it"):
        copied_and_filled()
