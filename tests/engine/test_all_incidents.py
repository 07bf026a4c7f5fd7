"""Incidents of the pipeline and beside it: they last side by side, and count together."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from ppengine.diagnosis.tier_evidence import StoreEvidence
from ppengine.gateway import all_incidents, fault_record, incident_log
from ppengine.gateway.all_incidents import Incidents
from ppengine.gateway.fault_record import RESUME_S, FaultRecorder
from ppengine.gateway.history import History
from ppengine.gateway.incident_log import AROUND_S
from ppengine.protocol.incidents import Incident, incident_folders, newest_incident, read_incident
from ppengine.protocol.inspection import FaultDetail
from ppengine.protocol.snapshot import Cause, Event, FurtherFault, Verdict
from test_incident_log import Clock, served

HTTP = Verdict(stage=None, cause="process", subject="http0", summary="http0 is stopped", since_s=0.5)
STORE = Verdict(stage=None, cause="store", subject="backend a", summary="backend a is broken", since_s=2.0)
STAGE = Verdict(stage=1, cause="stopped", summary="stage 1 is stopped", since_s=0.5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (all_incidents, fault_record, incident_log):
        monkeypatch.setattr(module, "time", clock)
    return clock


def incidents(folder: Path) -> Incidents:
    return Incidents(folder, History(folder / "history", "e", "n", 60, 2**20))


def kept(folder: Path) -> list[Incident]:
    return [read_incident(path) for path in incident_folders(folder)]


def test_a_stopped_process_is_an_incident_until_nothing_shows_it(tmp_path: Path, clock: Clock) -> None:
    every = incidents(tmp_path)
    every.look(None, [HTTP])
    (begun,) = kept(tmp_path)
    assert (begun.info.number, begun.info.stage, begun.info.cause, begun.info.ended) == (1, None, "process", "")
    assert begun.info.wall == pytest.approx(clock.now - 0.5) and begun.fault.missing == ["no step waits for it"]
    clock.now += 30
    every.note_event(Event(seq=1, wall=clock.now, kind="stage.continued", text="stage 1 is continued"))
    every.look(None, [replace(HTTP, since_s=30.5)])
    clock.now += 1
    every.look(None, [], served(clock))
    (over,) = kept(tmp_path)
    assert over.info.over_wall == pytest.approx(clock.now) and over.info.summary == "http0 is stopped"
    assert over.info.ended == "nothing shows it any more", "no end of a fault of the pipeline is its own"
    assert every.newest == over.info


def test_it_hides_no_fault_of_the_pipeline_and_goes_on_beside_it(tmp_path: Path, clock: Clock) -> None:
    every = incidents(tmp_path)
    every.look(None, [HTTP, STORE])
    clock.now += 5
    stage = FaultDetail(number=1, wall=clock.now, verdict=STAGE, waits=[], retired=[])
    every.look(stage, [STAGE, HTTP])
    assert [(one.info.cause, one.info.ended != "") for one in kept(tmp_path)] == [
        ("process", False), ("store", True), ("stopped", False),
    ]  # fmt: skip
    assert every.newest is not None and every.newest.cause == "stopped"
    clock.now += 5
    stage.over_wall = clock.now
    every.look(stage, [HTTP])
    assert every.newest.cause == "process", "it lasts"
    clock.now += 5
    every.look(stage, [])
    assert every.newest.cause == "stopped" and all(one.info.over_wall for one in kept(tmp_path))
    pipeline, beside = newest_incident(tmp_path), newest_incident(tmp_path, "store")
    assert pipeline is not None and beside is not None
    assert (pipeline.info.number, beside.info.number) == (3, 2)


def test_an_incident_is_of_the_process_that_began_it(tmp_path: Path, clock: Clock) -> None:
    every = incidents(tmp_path)
    texts, http = "texts (pid 8) is stopped", "http0 (HTTP process, pid 7) is stopped"
    every.look(None, [replace(HTTP, subject="texts", summary=texts)])
    clock.now += 4
    # The evidence is words for operators, and names who it likes.
    both = replace(HTTP, summary=http, evidence=["pid 7: process state T", "also: agent (pid 9) is stopped"])
    every.look(None, [replace(both, further=[FurtherFault(subject="texts", summary=texts)])])
    assert [one.info.summary for one in kept(tmp_path)] == [texts], "the one of the first process lasts"
    clock.now += 4
    every.look(None, [replace(HTTP, summary=http, since_s=4.5, evidence=[f"also: {texts}"])])
    clock.now += 2
    every.look(None, [])
    first, second = kept(tmp_path)
    assert (first.info.summary, first.fault.verdict.summary, first.consequences) == (texts, texts, [http])
    assert (second.info.summary, second.consequences) == (http, [])
    assert first.info.over_wall == pytest.approx(first.info.wall + 8.5)
    assert second.info.over_wall == pytest.approx(second.info.wall + 6.5), "it began beside the first"


def test_a_process_without_descriptors_has_one_incident_beside_another_that_has_none(
    tmp_path: Path, clock: Clock
) -> None:
    """Each has a verdict of its own, in the order of the processes."""
    every = incidents(tmp_path)
    agent, texts = (replace(HTTP, cause="out_of_files", subject=name, summary=name) for name in ("agent", "texts"))
    for verdicts in ([texts], [agent, texts], [texts], []):
        every.look(None, verdicts)
        clock.now += 5
    (only,) = kept(tmp_path)
    assert (only.info.summary, only.consequences) == ("texts", ["agent"])


@pytest.mark.parametrize("cause", ["disk_full", "out_of_files"])
def test_a_stage_that_is_stopped_while_something_is_short_has_a_record_of_its_own(
    tmp_path: Path, clock: Clock, cause: Cause
) -> None:
    every, recorder = incidents(tmp_path), FaultRecorder(lambda question: "")

    def look(*verdicts: Verdict) -> None:
        recorder.look(list(verdicts), [], [1, 1])
        every.look(recorder.kept, verdicts)
        clock.now += 5

    short = Verdict(stage=None, cause=cause, summary="no room in the run folder", since_s=1.0)
    look(short)
    look(STAGE, short)
    look(short)
    assert [(one.info.stage, one.info.cause, bool(one.info.ended)) for one in kept(tmp_path)] == [
        (None, cause, False), (1, "stopped", True),
    ]  # fmt: skip
    assert recorder.kept is not None and recorder.kept.verdict == STAGE


def test_a_stage_that_cannot_start_for_a_full_disk_is_a_fault_of_the_pipeline(tmp_path: Path) -> None:
    recorder = FaultRecorder(lambda question: "")
    recorder.look([Verdict(stage=1, cause="disk_full", summary="it could not be started", since_s=1.0)], [], [1, 1])
    assert recorder.kept is not None
    incidents(tmp_path).look(recorder.kept, [recorder.kept.verdict])
    assert [one.info.stage for one in kept(tmp_path)] == [1]
    found = newest_incident(tmp_path)
    assert found is not None and newest_incident(tmp_path, "disk_full") is None


def test_an_incident_keeps_the_cause_that_began_it(tmp_path: Path, clock: Clock) -> None:
    every = incidents(tmp_path)
    every.look(None, [replace(STORE, summary="backend a is broken: refused")])
    every.look(None, [replace(STORE, summary="backend a is slow")])
    every.look(None, [])
    assert [one.info.summary for one in kept(tmp_path)] == ["backend a is broken: refused"]


def test_a_store_that_fails_again_and_again_is_one_incident(tmp_path: Path, clock: Clock) -> None:
    every = incidents(tmp_path)
    for _ in range(10):
        every.look(None, [STORE])
        clock.now += 3
        every.look(None, [])
        clock.now += AROUND_S - 5
    assert len(kept(tmp_path)) == 1
    clock.now += 10
    every.look(None, [STORE])
    assert [one.info.number for one in kept(tmp_path)] == [1, 2]


def test_stores_that_fail_in_turn_are_one_incident_each(tmp_path: Path, clock: Clock) -> None:
    every, begun = incidents(tmp_path), clock.now
    for _ in range(10):
        for name in ("the store of stage 0", "the store of stage 1"):
            clock.now += 3
            every.look(None, [replace(STORE, subject=name, summary=f"{name} hangs", since_s=0.0)])
            clock.now += 3
            every.look(None, [])
    first, second = kept(tmp_path)
    assert (first.info.number, second.info.number) == (1, 2)
    for place, one in enumerate((first, second)):
        assert one.info.summary == f"the store of stage {place} hangs"
        assert one.info.wall == pytest.approx(begun + 3 + 6 * place, abs=0.1)
        assert one.info.over_wall == pytest.approx(clock.now - 6 + 6 * place, abs=0.1)
    clock.now += AROUND_S
    every.look(None, [])
    again = "the store of stage 0"
    every.look(None, [replace(STORE, subject=again, summary=f"{again} hangs")])
    assert [one.info.number for one in kept(tmp_path)] == [1, 2, 3]


def test_one_that_comes_again_behind_its_gateway_ends_with_its_verdict(tmp_path: Path, clock: Clock) -> None:
    before = incidents(tmp_path)
    before.look(None, [STORE])
    clock.now += 3
    before.look(None, [])
    after = incidents(tmp_path)
    clock.now += 5
    after.look(None, [STORE])
    clock.now += 3
    after.look(None, [])
    (one,) = kept(tmp_path)
    assert one.info.over_wall == pytest.approx(clock.now, abs=0.1)


def test_another_process_that_stops_soon_after_is_another_incident(tmp_path: Path, clock: Clock) -> None:
    every = incidents(tmp_path)
    for name, since_s in (("http0", 1.0), ("http0", 2.0), ("texts", 1.0)):
        every.look(None, [replace(HTTP, subject=name, summary=f"{name} (pid 7) hangs: no report for {since_s}s")])
        clock.now += 3
        every.look(None, [])
    assert [one.info.summary.split()[0] for one in kept(tmp_path)] == ["http0", "texts"]


def test_another_store_that_hangs_soon_after_is_another_incident(tmp_path: Path, clock: Clock) -> None:
    every = incidents(tmp_path)
    names = [StoreEvidence(stage=stage, rank=rank).subject for stage, rank in ((0, 0), (0, 0), (0, 1), (1, 0), (11, 0))]
    for place, name in enumerate([*names, "backend a", "backend a", "backend b"], 1):
        every.look(None, [replace(STORE, subject=name, summary=f"{name} hangs: silent for {place}s")])
        clock.now += 3
        every.look(None, [])
    begun = [one.fault.verdict.summary.partition(" hangs")[0] for one in kept(tmp_path)]
    assert begun == [*names[1:], "backend a", "backend b"]


def test_it_goes_on_over_its_gateway_and_ends_with_the_engine(tmp_path: Path, clock: Clock) -> None:
    incidents(tmp_path).look(None, [HTTP])
    clock.now += 3
    after = incidents(tmp_path)
    after.look(None, [])
    assert after.newest is not None and after.newest.over_wall is None, "its evidence is not there yet"
    after.look(None, [replace(HTTP, since_s=0.2)])
    clock.now += RESUME_S
    after.look(None, [replace(HTTP, since_s=9.0)])
    assert [one.info.number for one in kept(tmp_path)] == [1]
    after.close()
    (one,) = kept(tmp_path)
    assert (one.info.over_wall, one.info.ended) == (None, "the engine ended before it was over")


def test_the_next_gateway_ends_it_if_its_verdict_does_not_come_again(tmp_path: Path, clock: Clock) -> None:
    incidents(tmp_path).look(None, [HTTP])
    after = incidents(tmp_path)
    clock.now += RESUME_S + 0.1
    after.look(None, [])
    (one,) = kept(tmp_path)
    assert one.info.ended == "nothing shows it any more"
