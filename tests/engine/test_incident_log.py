"""Incidents: begun by a new fault, ended by the event that says so, on disk at both moments."""

import pytest
from ppengine.gateway import incident_log as module
from ppengine.gateway.history import History
from ppengine.gateway.incident_log import AGAIN_S, AROUND_S, IncidentLog, Numbers
from ppengine.protocol.facts import Serving
from ppengine.protocol.incidents import incident_folders, read_incident
from ppengine.protocol.inspection import FaultDetail
from ppengine.protocol.snapshot import Event, Verdict


class Clock:
    """Time that a test sets."""

    now = 1_800_000_000.0
    set_by = 0.0

    def time(self) -> float:
        return self.now + self.set_by

    def monotonic(self) -> float:
        return self.now - 1_700_000_000

    def monotonic_ns(self) -> int:
        return int((self.now - 1_700_000_000) * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def log(tmp_path, clock):
    return IncidentLog(tmp_path, History(tmp_path / "history", "e", "n", 60, 2**20), Numbers(tmp_path))


def verdict(stage=1, cause="dead", *, root=True, since_s=0.5):
    return Verdict(stage=stage, cause=cause, summary=f"stage {stage} {cause}", since_s=since_s, root=root)


def fault(clock, number=1, **options):
    return FaultDetail(number=number, wall=clock.now, verdict=verdict(**options), waits=[], retired=[])


def event(clock, kind, text="", by=""):
    return Event(seq=1, wall=clock.now, kind=kind, text=text, by=by)


def served(clock, by=""):
    return Serving(mono_ns=clock.monotonic_ns(), generation=2, processes=(), took_s=1.9, recomputed=5, by=by)


def kept(tmp_path):
    return [read_incident(folder) for folder in incident_folders(tmp_path)]


def test_a_healed_fault_is_kept_with_its_end_and_its_consequences(tmp_path, clock, log):
    log.note_event(event(clock, "stage.dead", "long before"))
    clock.now += 10
    log.note_event(event(clock, "stage.dead", "stage 1 is dead"))
    clock.now += 0.1
    record = fault(clock)
    log.look(record, [record.verdict, verdict(0, "starved", root=False)])
    (begun,) = kept(tmp_path)
    assert (begun.info.number, begun.info.over_wall, begun.info.ended) == (1, None, "")
    assert begun.info.wall == pytest.approx(clock.now - 0.5)
    assert [one.text for one in begun.events] == ["stage 1 is dead"]
    clock.now += 1.9
    healed, again = clock.now, served(clock)
    clock.now += 3
    record.over_wall = clock.now
    log.look(record, [], again)
    (over,) = kept(tmp_path)
    assert over.info.over_wall == pytest.approx(healed)
    assert (over.info.ended, over.info.recomputed) == ("all stages serve again, generation 2", 5)
    assert over.consequences == ["stage 0 starved"] and over.info.by == ""
    assert log.newest == over.info


def test_an_incident_keeps_its_own_consequences_although_another_begins_soon(tmp_path, clock, log):
    first = fault(clock)
    log.look(first, [first.verdict, verdict(0, "starved", root=False)])
    first.over_wall = clock.now
    log.look(first, [])
    clock.now += 5
    second = fault(clock, 2, stage=2)
    log.look(second, [second.verdict, verdict(3, "starved", root=False)])
    clock.now += AROUND_S
    log.look(second, [second.verdict], None)
    log.close()
    assert [one.consequences for one in kept(tmp_path)] == [["stage 0 starved"], ["stage 3 starved"]]


def test_a_clock_that_is_set_back_does_not_hold_up_an_end(clock, log, monkeypatch):
    settled = []
    monkeypatch.setattr(log, "_settle", settled.append)
    record = fault(clock)
    log.look(record, [record.verdict])
    record.over_wall = clock.time()
    log.look(record, [])
    clock.set_by = -3600.0
    clock.now += module.AROUND_S - 1
    log.look(record, [])
    assert not settled
    clock.now += 1
    log.look(record, [])
    assert len(settled) == 1


@pytest.mark.parametrize("jump", [-3600.0, 3600.0, 86_400.0])
@pytest.mark.parametrize("how", ["event", "fact", "verdict"])
def test_an_incident_is_as_long_as_it_was_if_the_clock_is_set(tmp_path, clock, log, jump, how):
    record = fault(clock)
    log.look(record, [record.verdict])
    clock.now += 4.0
    clock.set_by = jump
    if how == "event":
        log.note_event(Event(seq=2, wall=clock.time(), kind="stage.continued", text="it is continued"))
    fact = served(clock) if how == "fact" else None
    clock.now += 1.0
    record.over_wall = record.wall + 5.0
    log.look(record, [], fact)
    (over,) = kept(tmp_path)
    lasted = 5.5 if how == "verdict" else 4.5
    assert over.info.over_wall - over.info.wall == pytest.approx(lasted, abs=0.01), "it was there 0.5 s before"


def test_the_author_of_the_command_that_mended_it_is_kept(tmp_path, clock, log):
    record = fault(clock, cause="stopped")
    log.look(record, [record.verdict])
    log.note_event(event(clock, "op.refused", "abort r-1: unknown", by="bob"))
    log.note_event(event(clock, "op.applied", "continue 1: sent SIGCONT", by="ann"))
    log.note_event(event(clock, "op.applied", "submit r-19aa: 3 prompt tokens queued", by="carl"))
    log.note_event(event(clock, "stage.continued", "stage 1 is continued, now computing"))
    record.over_wall = clock.now
    log.look(record, [])
    (one,) = kept(tmp_path)
    assert (one.info.by, one.info.ended) == ("ann", "stage 1 is continued, now computing")


def test_a_recovery_before_it_did_not_end_it(tmp_path, clock, log):
    before = served(clock, by="ann")
    clock.now += 5
    record = fault(clock)
    log.look(record, [record.verdict], before)
    clock.now += 1
    record.over_wall = clock.now
    log.look(record, [], before)
    (one,) = kept(tmp_path)
    assert (one.info.by, one.info.recomputed, one.info.over_wall) == ("", None, clock.now)
    record = fault(clock, number=2)
    log.look(record, [record.verdict], before)
    clock.now += 1
    again = served(clock, by="bob")
    record.over_wall = clock.now + 2
    log.look(record, [], again)
    assert (kept(tmp_path)[1].info.by, kept(tmp_path)[1].info.recomputed) == ("bob", 5)


def test_the_cause_is_the_last_one_known(tmp_path, clock, log):
    record = fault(clock, cause="undetermined")
    log.look(record, [record.verdict])
    record.verdict = verdict(cause="self_stuck")
    record.over_wall = clock.now + 1
    log.look(record, [])
    (one,) = kept(tmp_path)
    assert (one.info.cause, one.info.summary) == ("self_stuck", "stage 1 self_stuck")
    assert one.info.ended == "it ended without a command or a restart"


def test_the_end_of_the_engine_is_the_end_of_its_incident(tmp_path, clock, log):
    record = fault(clock, stage=None, cause="core")
    log.look(record, [record.verdict])
    log.close()
    assert kept(tmp_path)[0].info.ended == "the engine ended before it was over"


def test_a_verdict_that_the_end_of_the_engine_cleared_did_not_heal(tmp_path, clock, log):
    record = fault(clock)
    log.look(record, [record.verdict])
    record.over_wall = clock.now + 0.1
    log.look(record, [])
    clock.now += 0.5
    log.close()
    (one,) = kept(tmp_path)
    assert one.info.over_wall is None and one.info.ended == "the engine ended before it was over"


def test_recordings_around_it_come_a_minute_after_it(tmp_path, clock):
    linked = []

    class Around(History):
        def around(self, begin, end, folder):
            linked.append((begin, end, folder.name))

    log = IncidentLog(tmp_path, Around(tmp_path / "history", "e", "n", 60, 2**20), Numbers(tmp_path))
    record = fault(clock)
    begin = clock.now - 0.5
    log.look(record, [record.verdict])
    clock.now += 5
    record.over_wall = clock.now
    log.look(record, [])
    clock.now += AROUND_S - 1
    log.look(record, [])
    assert linked == []
    clock.now += 1.5
    log.look(record, [])
    assert linked == [(begin - AROUND_S, record.over_wall + AROUND_S, "1")]
    log.look(record, [])
    assert len(linked) == 1


def test_a_successor_of_the_gateway_counts_on(tmp_path, clock, log):
    log.look(fault(clock), [])
    again = IncidentLog(tmp_path, History(tmp_path / "history", "e", "n", 60, 2**20), Numbers(tmp_path))
    again.look(fault(clock), [])
    assert [one.info.number for one in kept(tmp_path)] == [1, 2]


def test_a_second_fault_ends_the_record_of_the_first(tmp_path, clock, log):
    first, second = fault(clock), fault(clock, number=2, stage=0)
    log.look(first, [])
    first.over_wall = clock.now + 1
    log.look(second, [])
    log.look(second, [])
    assert [(one.info.number, one.info.stage) for one in kept(tmp_path)] == [(1, 1), (2, 0)]


def test_a_verdict_that_comes_and_goes_is_one_incident(tmp_path, clock, log):
    begun = clock.now
    for number in range(1, 6):
        record = fault(clock, number, cause="straggler", since_s=2.0)
        log.look(record, [record.verdict])
        clock.now += 3
        record.over_wall = clock.now
        log.look(record, [])
        clock.now += AGAIN_S - 1
    (one,) = kept(tmp_path)
    assert one.info.wall == begun - 2 and one.info.over_wall == clock.now - AGAIN_S + 1
    clock.now += 2
    later = fault(clock, 6, cause="straggler")
    log.look(later, [later.verdict])
    assert [each.info.number for each in kept(tmp_path)] == [1, 2]


def test_what_was_healed_and_comes_again_is_another_incident(tmp_path, clock, log):
    for number in (1, 2):
        record = fault(clock, number)
        log.look(record, [record.verdict])
        clock.now += 1
        record.over_wall = clock.now
        log.look(record, [], served(clock))
    assert len(kept(tmp_path)) == 2


def test_the_oldest_incidents_go(tmp_path, clock, log, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 3)
    for number in range(1, 6):
        log.look(fault(clock, number=number), [])
    assert [one.info.number for one in kept(tmp_path)] == [3, 4, 5]


def test_a_disk_that_cannot_be_written_never_raises(tmp_path, clock, log, caplog):
    (tmp_path / "incidents").write_text("a file where the folder belongs")
    record = fault(clock)
    log.look(record, [record.verdict])
    log.close()
    assert "incident 1 is not kept" in caplog.text and log.newest.number == 1


def test_an_incident_under_load_keeps_the_events_that_are_about_it(tmp_path, clock, log):
    log.note_event(event(clock, "stage.stopped", "stage 1 is stopped"))
    for _ in range(300):
        log.note_event(event(clock, "request.finished", "r-1 stop, 3 tokens"))
    record = fault(clock)
    log.look(record, [record.verdict])
    for _ in range(300):
        log.note_event(event(clock, "request.finished", "r-1 stop, 3 tokens"))
    log.note_event(event(clock, "stage.continued", "stage 1 is continued, now idle"))
    clock.now += 60
    record.over_wall = clock.now
    log.look(record, [])
    (incident,) = kept(tmp_path)
    assert [each.kind for each in incident.events] == ["stage.stopped", "stage.continued"]
    assert incident.info.ended == "stage 1 is continued, now idle"
