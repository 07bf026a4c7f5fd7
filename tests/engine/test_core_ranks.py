"""Ranks in the core: a place each is waited for, lost and restarted; a stage is operated as a whole."""

from __future__ import annotations

from core_world import CoreWorld
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo, ProcessReport
from ppengine.protocol.stage_info import PlaceLinks
from ppengine.protocol.stage_lifecycle import Drained, StageReady
from ppengine.protocol.steps import Retired, Sampled
from ppengine.protocol.verbs import Cordon, RestartStage, SetMemory


def ranked(**options) -> CoreWorld:
    return CoreWorld(stages=2, tensor=2, **options)


def lose(world: CoreWorld, place: Place, generation: int = 1) -> None:
    info = ProcessInfo(
        role="stage", stage=place.stage, rank=place.rank, pid=9, exit_code=-9, detail="killed by SIGKILL",
        generation=generation,
    )  # fmt: skip
    world.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))
    world.engine.advance()


def back(world: CoreWorld, *restarted: Place) -> None:
    """Let all meet in the present generation."""
    for place in world.engine.stages.places:
        if place not in restarted:
            world.engine.stage_messages.take(Drained(world.generation, *place))
    world.ready()
    world.run()


def test_it_serves_once_every_rank_has_met():
    world = ranked(serve=False)
    world.ready(stages=[0])
    world.engine.advance()
    assert world.engine.health.serving is None
    world.ready(stages=[1])
    world.run()
    assert world.engine.health.serving is not None
    assert world.events[-1].text.endswith("stage 0 rank 0 is binding")


def test_the_place_with_the_least_room_decides_and_is_named():
    world = ranked(serve=False)
    for place in world.engine.stages.places:
        world.engine.stage_messages.take(
            StageReady(
                stage=place.stage, rank=place.rank, generation=1, pid=1, host="h", layers=[0, 1], device_kind="cpu",
                device_name="", device_uuid=None, total_bytes=10_000, weights_bytes=1000,
                peak_bytes=2000 if place == (1, 1) else 1000, block_bytes=10, quantum_blocks=1, reserved_blocks=900,
                swap_blocks=50, links=PlaceLinks(carrier=f"rank {place.rank}"),
            )
        )  # fmt: skip
    world.run()
    assert "stage 1 rank 1 is binding" in world.events[-1].text
    views = {(view.index, view.rank): view for view in world.engine.reporter.build().stages}
    assert [key for key, view in views.items() if view.binding] == [(1, 1)]
    assert [view.links.carrier for view in views.values()] == ["rank 0", "rank 1"] * 2
    assert views[1, 1].capacity == views[1, 0].capacity - 100
    plan = world.say(SetMemory(utilization=0.6), dry_run=True)[-1]
    assert any("stage 1 rank 1 is binding" in line for line in plan.plan), plan


def test_a_step_retires_when_every_rank_has_and_rank_0_gives_the_tokens():
    world = ranked()
    world.submit(max_tokens=2)
    world.engine.advance()
    step = world.steps.popleft()
    first, *others = [place for place in world.engine.stages.places if place != (1, 0)], Place(1, 0)
    for place in first:
        world.engine.stage_messages.take(Retired(step.generation, step.number, *place))
    assert world.engine.stages.retired_step < step.number
    sampled = [Sampled(row.slot, 7) for row in step.rows if row.sample]
    world.engine.stage_messages.take(Retired(step.generation, step.number, *others[0], sampled=sampled))
    assert world.engine.stages.retired_step == step.number
    world.engine.advance()
    assert world.steps, "the token came, and the next step goes out"


def test_a_lost_rank_is_restarted_alone_and_its_stage_meets_again():
    world = ranked()
    world.submit(name="r", max_tokens=4)
    world.engine.advance()
    world.told_to_leave.clear()
    lose(world, Place(0, 1))
    assert world.places_started == [(Place(0, 1), 2)]
    assert sorted(stage for stage, _ in world.told_to_leave) == [0, 1, 1]
    assert any(event.text == "stage 0 rank 1: killed by SIGKILL" for event in world.events)
    back(world, Place(0, 1))
    assert len(world.tokens("r")) == 4


def test_a_rank_that_a_peer_of_its_stage_reports_is_the_one_that_is_lost():
    world = ranked()
    closed = Retired(
        1, 0, 1, 0, error="lost stage 1 rank 1: it closed the connection", fatal=True, peer=1, peer_rank=1
    )  # fmt: skip
    world.engine.stage_messages.take(closed)
    assert [record.name for record in world.engine.stages.lost] == ["stage 1 rank 1"]
    lose(world, Place(1, 1))
    assert world.places_started == [(Place(1, 1), 2)]


def test_restart_stage_restarts_all_of_its_ranks():
    world = ranked()
    answers = world.say(RestartStage(stage=1), dry_run=True)
    assert "stage 1 (pids 1 and 11) is ended and restarted, generation 2" in answers[-1].plan
    name = f"c{world._count + 1}"
    world.say(RestartStage(stage=1))
    world.engine.advance()
    assert [place for place, _ in world.places_started] == [(1, 0), (1, 1)]
    back(world, Place(1, 0), Place(1, 1))
    assert world.last(name).text.startswith("stage 1 is pids 1 and 11; all stages are back")


def test_a_cordon_holds_for_every_rank():
    world = ranked()
    world.say(Cordon(stage=1), reason="to look")
    assert world.engine.stages.cordons == "stage 1 is cordoned by eve"
    lose(world, Place(1, 1))
    assert world.places_started == []
    world.say(Cordon(stage=1, undo=True))
    world.engine.advance()
    assert [place for place, _ in world.places_started] == [(1, 1)]


def test_ranks_that_sample_different_tokens_are_a_finding_until_they_meet_again():
    world = ranked()
    world.submit(max_tokens=3)
    world.engine.advance()
    step = world.steps.popleft()
    for place in world.engine.stages.places:
        sampled = [Sampled(row.slot, 7) for row in step.rows if row.sample] if place == (1, 0) else []
        digest = {Place(1, 0): 11, Place(1, 1): 12}.get(place, 0)
        world.engine.stage_messages.take(Retired(step.generation, step.number, *place, sampled=sampled, digest=digest))
    world.engine.advance()
    (finding,) = world.engine.checks.findings()
    assert (finding.stage, finding.cause) == (1, "mismatch")
    assert finding.summary == f"stage 1: rank 1 sampled other tokens than rank 0 in m{step.number}"
    lose(world, Place(1, 1))
    back(world, Place(1, 1))
    assert world.engine.checks.findings() == []
