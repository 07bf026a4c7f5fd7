"""The rules of scheduling, one by one."""

import pytest
from ppengine.core.scheduler import DoesNotFit, block_tables, wait_reasons
from ppengine.core.scheduler.block_pool import STATES
from ppengine.protocol.steps import TOKEN_ON_DEVICE, TOKEN_REGISTERED, MoveKind, Sampled
from scheduler_world import World

PLAIN = {"ignore_eos": True}


def prompt(length, first=10):
    return [(first + index) % 50 for index in range(length)]


def finish_one(world):
    """Execute everything that was sent and retire the oldest step."""
    world.model.drain()
    return world.retire()


# --- batches --------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_an_undisturbed_run():
    world = World()
    requests = [world.add(prompt(5 + index, index), max_tokens=12)[0] for index in range(10)]
    world.run()
    world.verify_end()
    assert all(request.output_ids for request in requests)


def test_chunks_follow_each_other_in_consecutive_steps():
    world = World(stages=3, max_num_batched_tokens=8)
    (request,) = world.add(prompt(20), max_tokens=1)
    rows = [world.schedule().rows[0] for _ in range(3)]
    assert [(row.start, row.count, row.sample, row.token) for row in rows] == [
        (0, 8, False, TOKEN_REGISTERED), (8, 8, False, TOKEN_REGISTERED), (16, 4, True, TOKEN_REGISTERED),
    ]  # fmt: skip
    assert request.in_flight == [1, 2, 3]


@pytest.mark.parametrize(("stages", "ahead", "depth"), [(1, False, 1), (3, False, 3), (1, True, 2), (3, True, 4)])
def test_micro_batches_in_flight(stages, ahead, depth):
    world = World(stages=stages, schedule_ahead=ahead, max_num_batched_tokens=2, max_model_len=96, num_blocks=40)
    world.add(prompt(40))
    sent = 0
    while world.schedule() is not None:
        sent += 1
    assert sent == depth


def test_decodes_spread_evenly_over_the_stages():
    world = World(stages=3, max_num_seqs=8, num_blocks=60)
    for index in range(7):
        world.add(prompt(3, index), max_tokens=30, **PLAIN)
    finish = [world.round() for _ in range(9)]
    assert all(finish)
    sizes = [len(step.rows) for step in world.model.steps[-6:]]
    assert max(sizes) <= 3
    assert min(sizes) >= 1


def test_no_cap_on_prefills():
    world = World(stages=4, num_blocks=60)
    for index in range(6):
        world.add(prompt(4, index))
    assert len(world.schedule().rows) == 6


def test_a_request_with_an_unretired_decode_is_not_scheduled_again():
    world = World(stages=2)
    world.add(prompt(3))
    assert world.schedule() is not None
    assert world.schedule() is None


def test_schedule_ahead_takes_the_token_from_the_device_and_drops_it_at_the_end():
    world = World(stages=1, schedule_ahead=True)
    (request,) = world.add(prompt(3), max_tokens=8, stop_token_ids=list(range(50)), min_tokens=0)
    world.schedule()
    ahead = world.schedule()
    assert ahead.rows[0].token == TOKEN_ON_DEVICE
    assert world.schedule() is None
    world.model.drain()
    first = world.retire()
    assert first.finished == [request]
    assert request.finish_reason == "stop"
    assert world.scheduler.blocks.device.used == 1
    assert world.retire().tokens == []
    assert len(request.output_ids) == 1
    assert world.scheduler.blocks.device.used == 0


def test_schedule_ahead_knows_the_last_token_by_count():
    world = World(stages=1, schedule_ahead=True)
    world.add(prompt(3), max_tokens=1)
    world.schedule()
    assert world.schedule() is None


def test_token_budget_goes_to_decodes_then_prefills_then_waiting():
    world = World(stages=1, max_num_batched_tokens=8, num_blocks=60)
    world.add(prompt(4), max_tokens=20, **PLAIN)
    world.round()
    world.add(prompt(12, 20), max_tokens=20, **PLAIN)
    world.add(prompt(5, 30), max_tokens=20, **PLAIN)
    step = world.schedule()
    assert [row.count for row in step.rows] == [1, 7]
    finish_one(world)
    step = world.schedule()
    assert [row.count for row in step.rows] == [1, 5, 2]


def test_without_chunked_prefill_a_prompt_is_never_cut():
    world = World(stages=1, chunked_prefill=False, max_num_batched_tokens=8)
    world.add(prompt(5, 0))
    (second,) = world.add(prompt(6, 20))
    assert [row.count for row in world.schedule().rows] == [5]
    why = wait_reasons.why(world.scheduler, second)
    assert (why.code, why.need, why.have) == ("token_budget", 6, 3)
    with pytest.raises(DoesNotFit, match=r"9 tokens and chunked prefill is off.*at most 8 would fit"):
        world.add(prompt(9))
    world.run()
    world.verify_end()


# --- what never fits ------------------------------------------------------------------------------------------


def test_a_prompt_too_long_is_refused_with_numbers():
    world = World(max_model_len=48)
    with pytest.raises(DoesNotFit, match="48 tokens, max_model_len is 48; at most 47 would fit") as caught:
        world.add(prompt(48))
    assert (caught.value.need, caught.value.have) == (48, 47)
    (request,) = world.add(prompt(47), max_tokens=None)
    assert request.max_tokens == 1


def test_more_blocks_than_exist_is_refused_and_nothing_is_added():
    world = World(num_blocks=6, max_model_len=48)
    with pytest.raises(DoesNotFit, match="need 6 blocks, 5 exist; 21 tokens would fit"):
        world.add(prompt(18), max_tokens=4, n=3)
    assert not world.scheduler.queues.requests
    (fitting,) = world.add(prompt(18), max_tokens=3)
    with pytest.raises(ValueError, match="in use"):
        world.scheduler.admission.check([fitting])
    world.run()
    world.verify_end()


def test_an_empty_prompt_and_a_used_id_are_refused():
    world = World()
    with pytest.raises(DoesNotFit, match="empty"):
        world.add([])
    world.add([1], name="a")
    with pytest.raises(ValueError, match="'a' is in use"):
        world.add([1], name="a")


# --- prefix cache, forks --------------------------------------------------------------------------------------


def test_prefix_hit_computes_only_the_rest():
    world = World(stages=1)
    world.add(prompt(10), max_tokens=1)
    world.run()
    (request,) = world.add(prompt(11), max_tokens=1)
    step = world.schedule()
    assert request.num_cached == 8
    assert [(row.start, row.count) for row in step.rows] == [(8, 3)]
    assert world.scheduler.blocks.hit_tokens_total == 8


def test_full_prefix_hit_computes_one_token_in_a_copy_of_the_last_block():
    world = World(stages=1)
    world.add(prompt(8), max_tokens=1)
    world.run()
    (request,) = world.add(prompt(8), max_tokens=1)
    step = world.schedule()
    assert [(row.start, row.count, row.sample) for row in step.rows] == [(7, 1, True)]
    assert [(move.kind, move.src) for move in step.moves] == [(MoveKind.DEVICE, 2)]
    assert request.blocks[0] == 1
    assert request.blocks[1] == step.moves[0].dst != 2
    world.run()
    world.verify_end()


def test_a_full_hit_that_has_no_room_for_the_copy_recomputes_the_last_block():
    world = World(stages=1, num_blocks=3, max_model_len=9)
    world.add(prompt(8), max_tokens=1)
    world.run()
    world.add(prompt(8), max_tokens=1)
    step = world.schedule()
    assert [(row.start, row.count) for row in step.rows] == [(4, 4)]
    world.run()
    world.verify_end()


def test_requests_that_come_together_compute_their_prefix_once():
    world = World(stages=2, num_blocks=60, max_num_batched_tokens=64)
    requests = [world.add([*prompt(12), 40 + index], max_tokens=2)[0] for index in range(4)]
    step = world.schedule()
    assert [(row.start, row.count) for row in step.rows] == [(0, 13), (12, 1), (12, 1), (12, 1)]
    assert len({tuple(request.blocks[:3]) for request in requests}) == 1
    world.run()
    world.verify_end()


def test_a_prefix_in_chunks_is_shared_as_far_as_its_steps_are_sent():
    world = World(stages=1, num_blocks=60, max_num_batched_tokens=8, schedule_ahead=False)
    world.add([*prompt(16), 40], max_tokens=2)
    world.schedule()
    (late,) = world.add([*prompt(16), 41], max_tokens=2)
    assert world.scheduler.blocks.fit(late).computed == 8
    world.run()
    world.verify_end()
    assert late.num_cached == 16


def test_a_long_prompt_is_hashed_as_far_as_it_is_known_or_computed(monkeypatch):
    monkeypatch.setattr(block_tables, "HASHED_FIRST", 1)
    world = World(stages=1, num_blocks=60, max_num_batched_tokens=8, schedule_ahead=False)
    (first,) = world.add(prompt(40), max_tokens=1)
    world.schedule()
    assert len(first.digests) == 2, "those of its first step"
    world.run()
    assert len(first.digests) == 10
    (second,) = world.add([*prompt(28), *range(50, 65)], max_tokens=1)
    world.schedule()
    assert second.num_cached == 28 and len(second.digests) <= 9, "seven are known"
    world.run()
    world.verify_end()


def test_a_block_that_a_step_fills_is_not_copied_by_the_same_step():
    """Copies of a step come before its rows: the second prompt computes the last block of its own."""
    world = World(stages=1, num_blocks=60, max_num_batched_tokens=64, schedule_ahead=True)
    for _ in range(2):
        world.add(prompt(8), max_tokens=2)
    step = world.schedule()
    assert not step.moves and [(row.start, row.count) for row in step.rows] == [(0, 8), (4, 4)]
    world.add(prompt(8), max_tokens=2)
    step = world.schedule()
    assert [move.kind for move in step.moves] == [MoveKind.DEVICE], "a step that is sent comes first"
    world.run()
    world.verify_end()


def test_an_abort_leaves_the_prefix_that_its_steps_compute():
    world = World(stages=2, num_blocks=60, max_num_batched_tokens=8)
    (first,) = world.add([*prompt(16), 40], max_tokens=2)
    (second,) = world.add([*prompt(16), 41], max_tokens=2)
    world.schedule()
    world.schedule()
    world.act("abort", first.id)
    world.run()
    world.verify_end()
    assert second.num_cached >= 8


def test_a_lost_step_leaves_no_prefix():
    world = World(stages=2, num_blocks=60, max_num_batched_tokens=64)
    for last in (40, 41):
        world.add([*prompt(12), last], max_tokens=2)
    world.schedule()
    world.lose(1)
    (third,) = world.add([*prompt(12), 42], max_tokens=2)
    assert world.scheduler.blocks.fit(third).computed == 0
    world.run()
    world.verify_end()


def test_prefix_caching_off_shares_nothing():
    world = World(stages=1, prefix_caching=False)
    world.add(prompt(8), max_tokens=1)
    world.run()
    world.add(prompt(8), max_tokens=1)
    assert world.schedule().rows[0].count == 8


def test_followers_fork_the_leaders_prompt():
    world = World(stages=1, num_blocks=40)
    leader, second, third = world.add(prompt(10), n=3, max_tokens=6, **PLAIN)
    step = world.schedule()
    assert len(step.rows) == 1
    assert world.scheduler.queues.counts().waiting == 2
    assert wait_reasons.why(world.scheduler, second).text == f"forks {leader.id} when its prompt is computed"
    finish_one(world)
    step = world.schedule()
    assert second.blocks[:2] == third.blocks[:2] == leader.blocks[:2]
    assert len({leader.blocks[2], second.blocks[2], third.blocks[2]}) == 3
    assert [move.src for move in step.moves] == [leader.blocks[2]] * 2
    assert [row.count for row in step.rows] == [1, 1, 1]
    states = [STATES[state] for state in world.scheduler.blocks.device.states]
    assert {states[block] for block in leader.blocks} == {"shared"}, "two by tables, the last one by what copies it"
    assert [states[block] for block in (second.blocks[2], 0)] == ["used", "null"]
    assert world.scheduler.blocks.device.references(leader.blocks[0]) == 3
    world.run()
    world.verify_end()
    assert len({tuple(request.output_ids) for request in (leader, second, third)}) == 3


def test_followers_go_on_without_their_leader():
    world = World(stages=1)
    leader, second = world.add(prompt(10), n=2)
    world.act("abort", leader.id)
    world.run()
    world.verify_end()
    assert second.finish_reason in ("stop", "length")


# --- stops ----------------------------------------------------------------------------------------------------


def sample(world, token):
    """Schedule one step and retire it with `token` for each of its rows."""
    step = world.schedule()
    number = step.number
    result = world.scheduler.retire(number, [Sampled(row.slot, token) for row in step.rows if row.sample])
    world.model.retired = number
    world.verify()
    return result


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({}, [9, 3], "stop"),
        ({"ignore_eos": True}, [3, 3, 3, 3], "length"),
        ({"stop_token_ids": [9]}, [9], "stop"),
        ({"min_tokens": 3}, [3, 3, 3], "stop"),
        ({"max_tokens": 1}, [3], "stop"),
        ({"max_tokens": None}, [9] * 44, "length"),
    ],
)
def test_stops(sampling, tokens, reason):
    world = World(stages=1, max_model_len=48)
    (request,) = world.add(prompt(4), **{"max_tokens": 4, **sampling})
    for token in tokens:
        assert not request.finished
        result = sample(world, token)
    assert result.finished == [request]
    assert (request.finish_reason, request.output_ids) == (reason, tokens)


def test_finish_drops_tokens_still_in_flight():
    world = World(stages=2, schedule_ahead=True)
    (request,) = world.add(prompt(4), max_tokens=20, **PLAIN)
    world.schedule()
    finish_one(world)
    world.schedule()
    world.scheduler.retirement.finish(request.id, "stop")
    assert request.finished
    assert request.finish_reason == "stop"
    with pytest.raises(KeyError):
        world.scheduler.retirement.finish(request.id, "stop")
    world.run()
    assert len(request.output_ids) == 1
    assert world.scheduler.blocks.device.used == 0


# --- memory pressure ------------------------------------------------------------------------------------------


def crowd(**config):
    world = World(stages=2, num_blocks=13, **config)
    requests = [world.add(prompt(8, index * 9), max_tokens=20, **PLAIN)[0] for index in range(4)]
    return world, requests


def test_pressure_takes_the_newest_and_the_oldest_is_never_touched():
    world, requests = crowd()
    world.run()
    world.verify_end()
    assert requests[0].preemptions == 0
    assert requests[-1].preemptions > 0
    assert world.scheduler.fences.preemptions_total == sum(request.preemptions for request in requests)


def test_pressure_swaps_where_the_host_has_room():
    world, requests = crowd(preemption="swap", num_host_blocks=20)
    world.run()
    world.verify_end()
    assert sum(request.swaps for request in requests) > 0
    kinds = {move.kind for step in world.model.steps for move in step.moves}
    assert kinds >= {MoveKind.OUT, MoveKind.IN}


def test_pressure_recomputes_where_the_host_is_full_and_says_so():
    world, requests = crowd(preemption="swap", num_host_blocks=1)
    world.run()
    world.verify_end()
    texts = [note.text for note in world.scheduler.fences.notes()]
    assert any("swap needs" in text and "1 are free" in text for text in texts)
    assert sum(request.swaps for request in requests) == 0


def test_one_shortage_takes_one_victim():
    world = World(stages=2, num_blocks=9, max_num_seqs=8)
    for index in range(4):
        world.add(prompt(8, index * 9), max_tokens=12, **PLAIN)
    world.round()
    leaving = []
    for _ in range(6):
        world.schedule()
        leaving.append(len(world.scheduler.fences.leaving))
        world.model.drain()
        world.retire()
    assert max(leaving) <= 1


def test_watermark_holds_back_an_admission_but_not_the_only_request():
    world = World(stages=1, num_blocks=11, watermark=0.3, max_model_len=40)
    (alone,) = world.add(prompt(36), max_tokens=1)
    assert world.schedule() is not None
    assert alone.state == "running"
    world.run()
    world.add(prompt(20, 1), max_tokens=4, **PLAIN)
    (second,) = world.add(prompt(12, 2), max_tokens=4, **PLAIN)
    world.schedule()
    why = wait_reasons.why(world.scheduler, second)
    assert (why.code, why.need, why.have) == ("blocks", 6, 5)
    assert why.text == "have 5 of 6 blocks"


# --- slots ----------------------------------------------------------------------------------------------------


def test_slots_are_reused_only_after_their_release_has_retired():
    world = World(stages=1)
    world.add(prompt(4), max_tokens=1)
    world.schedule()
    finish_one(world)
    world.add(prompt(5), max_tokens=1)
    step = world.schedule()
    assert (step.release, [entry.slot for entry in step.register]) == ([0], [1])
    finish_one(world)
    world.add(prompt(6), max_tokens=1)
    assert [entry.slot for entry in world.schedule().register] == [0]


def test_an_idle_engine_sends_the_last_release_alone():
    world = World(stages=2)
    world.add(prompt(4), max_tokens=1)
    world.run()
    last = world.model.steps[-1]
    assert (last.rows, last.release) == ([], [0])
    assert world.schedule() is None


def test_table_deltas_carry_only_what_changed():
    world = World(stages=1)
    world.add(prompt(6), max_tokens=8, **PLAIN)
    tables = []
    for _ in range(5):
        tables.append(world.schedule().tables)
        finish_one(world)
    assert tables == [[(0, 0, [1, 2])], [], [], [(0, 2, [3])], []]


def test_retirement_out_of_order_is_an_error():
    world = World(stages=2)
    world.add(prompt(4))
    world.schedule()
    with pytest.raises(ValueError, match="step 2 retires; the oldest unretired step is 1"):
        world.scheduler.retire(2, [])


def test_samples_of_another_slot_are_an_error():
    world = World(stages=2)
    world.add(prompt(4))
    world.schedule()
    with pytest.raises(ValueError, match=r"sampled slots \[5\], expected \[0\]"):
        world.scheduler.retire(1, [Sampled(5, 1)])


def test_paused_gives_no_rows():
    world = World(stages=1)
    (request,) = world.add(prompt(4))
    world.scheduler.paused = True
    assert world.schedule() is None
    assert wait_reasons.why(world.scheduler, request).code == "paused"
    world.scheduler.paused = False
    assert world.schedule() is not None


def test_max_num_seqs_and_who_stands_behind():
    world = World(stages=1, max_num_seqs=1)
    world.add(prompt(4))
    (second,) = world.add(prompt(4))
    (third,) = world.add(prompt(4))
    world.schedule()
    assert wait_reasons.why(world.scheduler, second).text == "1 run, max_num_seqs is 1"
    assert wait_reasons.why(world.scheduler, third).code == "behind"
    assert wait_reasons.why(world.scheduler, third).text == f"1 run, max_num_seqs is 1; behind {second.id}"


# --- priority -------------------------------------------------------------------------------------------------


def test_requests_start_by_priority_then_by_arrival():
    world = World(max_num_seqs=1)
    named = {}
    for name, priority in (("a", 1), ("b", 0), ("c", -2), ("d", 1), ("e", 0)):
        (named[name],) = world.add(prompt(3, len(name)), name=name, priority=priority, max_tokens=2)
    assert [request.id for request in world.scheduler.queues.waiting] == ["c", "b", "e", "a", "d"]
    effect = world.act("prioritize", "d", -9)
    assert (effect.state, effect.text) == ("applied", "priority by eve: 1 -> -9")
    assert world.act("prioritize", "d", -9).text == "nothing changes: the priority of d is -9 already"
    assert named["d"].revision == 1
    world.run()
    assert [request.id for request in world.finished] == ["d", "c", "b", "e", "a"]


def test_a_running_request_is_not_preempted_and_is_queued_again_by_its_priority():
    world = World(stages=1, max_num_seqs=1)
    (first,) = world.add(prompt(3), name="first", max_tokens=8, **PLAIN)
    world.add(prompt(3), name="second", max_tokens=8, priority=1, **PLAIN)
    world.round()
    world.act("prioritize", "first", 2)
    world.round()
    assert first.state == "running"
    world.act("preempt", "first", "recompute")
    world.run()
    assert [request.id for request in world.finished] == ["second", "first"]


def test_swapped_requests_come_back_by_priority_and_a_held_one_keeps_its_own():
    world = World(stages=1, num_blocks=40, max_num_batched_tokens=64)
    requests = [world.add(prompt(6, start), max_tokens=20, name=f"r{start}", **PLAIN)[0] for start in (10, 20, 30)]
    world.round()
    for request in requests:
        world.act("swap_out", request.id)
    world.round()
    world.scheduler.paused = True
    queues = world.scheduler.queues
    assert set(queues.held) == set(requests)
    world.act("prioritize", "r30", -1)
    for request in requests:
        world.act("release", request.id)
    assert [request.id for request in queues.swapped] == ["r30", "r10", "r20"]
    world.act("prioritize", "r10", 5)
    assert [request.id for request in queues.swapped] == ["r30", "r20", "r10"]
    world.scheduler.paused = False
    world.run()
    world.verify_end()


def test_prefills_go_on_by_priority():
    world = World(stages=1, max_num_batched_tokens=4)
    world.add(prompt(12), name="a", max_tokens=2)
    world.schedule()
    world.add(prompt(12, 30), name="b", max_tokens=2, priority=-1)
    assert [request.id for request in world.scheduler.queues.prefilling] == ["a"]
    world.scheduler.queues.put_running(world.all["b"])
    world.scheduler.queues.put_prefilling(world.all["b"])
    assert [request.id for request in world.scheduler.queues.prefilling] == ["b", "a"]
    with world.scheduler.queues.reordering(world.all["b"]):
        world.all["b"].priority = 1
    assert [request.id for request in world.scheduler.queues.prefilling] == ["a", "b"]


def test_pressure_takes_the_last_by_priority():
    world = World(stages=1, num_blocks=9, max_num_seqs=2, preemption="recompute")
    first, second = (world.add(prompt(10, start), max_tokens=20, **PLAIN)[0] for start in (10, 30))
    world.round()
    world.act("prioritize", first.id, 1)
    while not first.preemptions + second.preemptions:
        world.round()
    assert (first.preemptions, second.preemptions) == (1, 0)
    world.run()
    world.verify_end()


def test_a_request_that_is_ending_has_no_priority_to_change():
    world = World(stages=2)
    (request,) = world.add(prompt(6), max_tokens=20, **PLAIN)
    world.schedule()
    world.act("abort", request.id)
    assert world.act("prioritize", request.id, 1).code == "CONFLICT"
