"""An operator's actions on one request: fences, results, holds, dry runs, refusals."""

import pytest
from ppengine.core.scheduler import Refused, wait_reasons
from ppengine.protocol.steps import MoveKind
from ppengine.protocol.verbs import Abort, Preempt, SwapOut
from scheduler_world import World

LONG = {"max_tokens": 30, "ignore_eos": True}


def prompt(length, first=10):
    return [(first + index) % 50 for index in range(length)]


def running(world, length=10, first=10):
    """Add a request and let its prompt retire."""
    (request,) = world.add(prompt(length, first), **LONG)
    world.schedule()
    world.model.drain()
    world.retire()
    assert request.state == "running"
    return request


def retire_all(world):
    """Execute and retire all steps in flight; schedule none."""
    world.model.drain()
    while world.retire() is not None:
        world.model.drain()


# --- abort ----------------------------------------------------------------------------------------------------


def test_abort_of_a_waiting_request_is_applied_at_once():
    world = World()
    (request,) = world.add(prompt(5))
    effect = world.act("abort", request.id)
    assert (effect.state, request.state, request.finish_reason) == ("applied", "finished", "abort")
    assert world.scheduler.fences.settled() == []


def test_abort_in_flight_is_fenced_and_its_tokens_are_dropped():
    world = World(stages=2)
    request = running(world)
    world.schedule()
    effect = world.act("abort", request.id)
    assert effect.state == "pending"
    assert effect.text == "abort by eve: waits for m2"
    assert world.schedule() is None
    assert world.scheduler.blocks.device.used == 3
    why = wait_reasons.why(world.scheduler, request)
    assert (why.code, why.text) == ("fenced", "abort by eve waits for m2")
    world.model.drain()
    result = world.retire()
    assert result.tokens == []
    assert result.finished == [request]
    assert (effect.state, effect.step) == ("applied", 2)
    assert world.scheduler.blocks.device.used == 0
    with pytest.raises(KeyError):
        world.scheduler.actions.abort(request.id)


def state_waiting(world):
    return world.add(prompt(6), **LONG)[0]


def state_prefilling(world):
    (request,) = world.add(prompt(40), max_tokens=2)
    world.schedule()
    return request


def state_in_flight(world):
    request = running(world)
    world.schedule()
    return request


def state_swapping_out(world):
    request = running(world)
    world.act("swap_out", request.id, False)
    world.schedule()
    return request


def state_swapped(world):
    request = running(world)
    world.scheduler.batcher.closed = True
    world.act("swap_out", request.id, False)
    world.schedule()
    retire_all(world)
    assert request.state == "swapped"
    return request


def state_held(world):
    request = running(world)
    world.act("swap_out", request.id)
    world.schedule()
    retire_all(world)
    assert request.state == "held"
    return request


def state_loading(world):
    request = state_held(world)
    world.act("swap_in", request.id)
    world.schedule()
    assert request.state == "loading"
    return request


STATES = [
    state_waiting, state_prefilling, state_in_flight, state_swapping_out, state_swapped, state_held, state_loading,
]  # fmt: skip


@pytest.mark.parametrize("reach", STATES)
def test_abort_in_every_state_gives_all_blocks_back(reach):
    world = World(stages=2, num_blocks=20)
    request = reach(world)
    effect = world.act("abort", request.id)
    retire_all(world)
    world.run()
    assert effect.state == "applied"
    assert request.finish_reason == "abort"
    world.verify_end()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("reach", STATES)
def test_preempt_and_hold_in_every_state_then_release(reach, mode):
    world = World(stages=2, num_blocks=20)
    request = reach(world)
    effect = world.act("preempt", request.id, mode, True)
    if reach is state_held:
        assert isinstance(effect, Refused)
    world.scheduler.batcher.closed = False
    world.run()
    assert request.state == "held"
    assert not request.blocks
    if reach is not state_held:
        assert effect.state == "applied"
        assert request.held_by == "preempt by eve"
        assert wait_reasons.why(world.scheduler, request).text == "preempt by eve"
    assert world.act("release", request.id).state == "applied"
    world.run()
    world.verify_end()


# --- swap -----------------------------------------------------------------------------------------------------


def test_swap_out_keeps_device_blocks_until_the_copies_have_retired():
    world = World(stages=2)
    request = running(world)
    effect = world.act("swap_out", request.id)
    assert (effect.state, effect.text) == ("pending", "swap-out by eve: copies begin with the next step") or (
        effect.text == "swap-out by eve: waits for m2"
    )
    step = world.schedule()
    assert [(move.kind, move.src, move.dst) for move in step.moves] == [(MoveKind.OUT, b + 1, b) for b in range(3)]
    assert world.scheduler.blocks.device.used == 3
    retire_all(world)
    assert (request.state, request.held_by) == ("held", "swap-out by eve")
    assert (request.blocks, request.host_blocks) == ([], [0, 1, 2])
    assert world.scheduler.blocks.device.used == 0
    assert effect.state == "applied"
    assert effect.text == "swap-out by eve: 3 blocks swapped out, held"
    fences = world.scheduler.fences
    assert (fences.swaps_total, fences.preemptions_total) == (1, 1)
    assert request.slot is not None


def test_swap_in_brings_the_same_kv_back():
    world = World(stages=2)
    request = state_held(world)
    effect = world.act("swap_in", request.id)
    assert (effect.state, request.state) == ("pending", "loading")
    step = world.schedule()
    assert [move.kind for move in step.moves] == [MoveKind.IN] * 3
    assert step.rows == []
    assert world.scheduler.blocks.host.used == 3
    retire_all(world)
    assert (request.state, effect.state, world.scheduler.blocks.host.used) == ("running", "applied", 0)
    world.run()
    world.verify_end()


def test_swapped_requests_come_before_waiting_ones():
    world = World(stages=1, max_num_seqs=1)
    request = state_swapped(world)
    world.scheduler.batcher.closed = False
    (other,) = world.add(prompt(5, 30), **LONG)
    world.schedule()
    assert (request.state, other.state) == ("loading", "waiting")
    world.run()
    world.verify_end()


def test_memory_work_goes_on_while_paused():
    world = World(stages=2)
    request = running(world)
    world.scheduler.paused = True
    effect = world.act("swap_out", request.id)
    assert world.schedule().rows == []
    retire_all(world)
    assert effect.state == "applied"
    assert world.schedule() is None


def test_swap_out_is_refused_where_the_host_is_full():
    world = World(num_host_blocks=2)
    request = running(world)
    refusal = world.act("swap_out", request.id)
    assert refusal.code == "DOES_NOT_FIT"
    assert refusal.text == f"{request.id} needs 3 host blocks, 2 of 2 are free; recompute fits"
    assert request.revision == 0


def test_swap_in_is_refused_where_the_device_is_full():
    world = World(stages=1, num_blocks=13, max_num_seqs=2)
    request = state_held(world)
    running(world, 40, 30)
    refusal = world.act("swap_in", request.id)
    assert refusal.code == "DOES_NOT_FIT"
    assert refusal.text == f"{request.id} needs 3 device blocks, 2 are free or cached"


def test_swap_in_is_refused_where_all_places_are_taken():
    world = World(stages=1, num_blocks=40, max_num_seqs=1)
    request = state_held(world)
    running(world, 4, 30)
    assert "max_num_seqs is 1" in world.act("swap_in", request.id).text


@pytest.mark.parametrize(
    ("verb", "text"), [("release", "not held"), ("swap_in", "holds no blocks on the host"), ("preempt", "no device")]
)
def test_what_makes_no_sense_is_refused(verb, text):
    world = World()
    request = state_waiting(world)
    refusal = world.act(verb, request.id)
    assert isinstance(refusal, Refused)
    assert text in refusal.text


@pytest.mark.parametrize("verb", ["abort", "preempt", "swap_out", "swap_in", "release"])
def test_unknown_ids_are_key_errors(verb):
    with pytest.raises(KeyError):
        getattr(World().scheduler.actions, verb)("nobody")


# --- effects that meet ----------------------------------------------------------------------------------------


def test_a_later_act_supersedes():
    world = World(stages=2)
    request = state_in_flight(world)
    first = world.act("swap_out", request.id)
    second = world.act("preempt", request.id, "recompute", True)
    assert first.state == "superseded"
    assert first.text == "swap-out by eve was superseded by preempt by eve"
    retire_all(world)
    assert (second.state, request.state, world.scheduler.blocks.host.used) == ("applied", "held", 0)
    assert request.revision == 2


def test_abort_supersedes_a_swap_whose_copies_are_in_flight():
    world = World(stages=2)
    request = state_swapping_out(world)
    effect = world.act("abort", request.id)
    assert effect.state == "pending"
    assert "ending already" in world.act("preempt", request.id).text
    retire_all(world)
    world.run()
    assert effect.state == "applied"
    world.verify_end()


def test_a_swap_can_be_asked_again_after_a_recompute_while_its_copies_are_in_flight():
    world = World(stages=2)
    request = state_swapping_out(world)
    world.act("preempt", request.id, "recompute")
    world.act("swap_out", request.id)
    retire_all(world)
    assert (request.state, len(request.host_blocks)) == ("held", 3)
    assert world.scheduler.blocks.host.used == 3


def test_a_stop_ends_a_request_that_waits_behind_a_fence():
    world = World(stages=2)
    (request,) = world.add(prompt(10), max_tokens=1)
    world.schedule()
    effect = world.act("swap_out", request.id)
    retire_all(world)
    assert (request.state, effect.state) == ("finished", "superseded")
    world.run()
    world.verify_end()


def test_release_takes_the_hold_off_a_pending_preemption():
    world = World(stages=2)
    request = state_in_flight(world)
    world.act("preempt", request.id, "recompute", True)
    world.act("release", request.id)
    retire_all(world)
    assert request.state == "waiting"
    world.run()
    world.verify_end()


def test_a_recomputed_request_goes_in_front_of_who_waits():
    world = World(stages=1, max_num_seqs=1)
    request = running(world)
    (other,) = world.add(prompt(5), **LONG)
    world.act("preempt", request.id, "recompute")
    world.schedule()
    assert (request.state, other.state) == ("running", "waiting")
    assert request.preemptions == 1


# --- dry run --------------------------------------------------------------------------------------------------


def test_plan_of_a_swap_out_has_the_figures_and_changes_nothing():
    world = World(stages=2)
    request = state_in_flight(world)
    before = repr(request)
    lines, figures = world.scheduler.actions.plan(SwapOut(request=request.id), request.id, 2**20)
    assert repr(request) == before
    assert figures["blocks_back"] == 3
    assert figures["host_needed"] == 3
    assert figures["host_free"] == 12
    assert figures["in_flight"] == 1
    assert lines == [
        f"{request.id} is running, 3 device and 0 host", "3 device blocks come back",
        "mode swap: takes 3 host blocks (3.0 MiB) of 12 free", "after 1 step in flight: m2",
    ]  # fmt: skip


def test_plan_of_a_preemption_names_its_mode():
    world = World(stages=2)
    request = running(world)
    lines, _ = world.scheduler.actions.plan(Preempt(request=request.id, mode="recompute"), request.id, 2**20)
    blocks = len(request.blocks)
    assert f"mode recompute: {request.num_computed} computed tokens ({blocks}.0 MiB) are computed again" in lines
    lines, _ = world.scheduler.actions.plan(Preempt(request=request.id, mode="swap"), request.id, 2**20)
    assert any(line.startswith("mode swap: takes ") for line in lines)


def test_plan_raises_what_the_verb_raises():
    world = World(num_host_blocks=1)
    request = running(world)
    with pytest.raises(Refused, match="needs 3 host blocks"):
        world.scheduler.actions.plan(SwapOut(request=request.id), request.id, 2**20)
    with pytest.raises(KeyError):
        world.scheduler.actions.plan(Abort(request="nobody"), "nobody", 1024)


def test_shared_blocks_do_not_count_as_coming_back():
    world = World(stages=1, num_blocks=40)
    leader, _ = world.add(prompt(10), n=2, **LONG)
    world.round()
    world.schedule()
    assert world.scheduler.actions.plan(Abort(request=leader.id), leader.id, 1024)[1]["blocks_back"] == 1


def test_phases_are_the_copies_and_the_restarts_with_their_times():
    world = World()
    request = state_held(world)
    world.act("swap_in", request.id)
    world.schedule()
    retire_all(world)
    assert [(phase.kind, phase.text) for phase in request.phases] == [("swap-out", "swap-out by eve"), ("swap-in", "")]
    out, back = request.phases
    assert out.begin < out.end < back.begin < back.end
    copies = world.scheduler.fences.copies_out, world.scheduler.fences.copies_in
    assert [one.requests for one in copies] == [1, 1] and copies[0].blocks == copies[1].blocks > 0
    assert [one.seconds for one in copies] == [out.end - out.begin, back.end - back.begin]
    world.lose(0)
    restart = request.phases[2]
    assert (restart.kind, restart.text, restart.end) == ("restart", "stage lost", None)
    world.scheduler.restarted()
    assert restart.end > restart.begin
