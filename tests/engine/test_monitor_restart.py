"""A stage that died is dead until its successor serves; one that was replaced on purpose is not."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest
from monitor_helpers import core_report, make_config, processes, remove, sample, stage, stage_process, view
from ppengine.common.config import EngineConfig
from ppengine.diagnosis import recent_deaths
from ppengine.diagnosis.recent_deaths import RecentDeaths
from ppengine.diagnosis.tracker import EvidenceTracker
from ppengine.gateway.collector import Collector
from ppengine.gateway.events import EventLog
from ppengine.protocol.reports import AgentReport, Finding, StageSample
from ppengine.protocol.snapshot import Event

KILLED = {"exit_code": -9, "detail": "killed by SIGKILL"}
NEW = 2001


class Rig:
    """A collector of two stages, fed by hand."""

    def __init__(self, config: EngineConfig) -> None:
        self.events: list[Event] = []
        self.collector = Collector(config, EventLog(self.events.append))
        self.collector.take(core_report(config))
        self.look(sample(0), sample(1))
        self.collector.take(processes(stage_process(0), stage_process(1)))
        self.collector.judge(stopping=False)

    def look(self, *samples: StageSample) -> None:
        """Let the agent report."""
        self.collector.take(AgentReport(mono_ns=1, node=f"not {socket.gethostname()}", stages=list(samples)))

    def roots(self) -> list[tuple[int | None, str]]:
        """Judge and return the roots."""
        self.collector.judge(stopping=False)
        found = self.collector.snapshot(1).verdicts
        return [(verdict.stage, verdict.cause) for verdict in found if verdict.root]

    def told(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)


@pytest.fixture
def rig() -> Iterator[Rig]:
    config = make_config()
    yield Rig(config)
    remove(config)


def test_a_death_stays_the_verdict_until_the_successor_serves(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.roots() == []
    # Both reports come before anybody judges: the supervisor is that quick.
    rig.collector.take(processes(stage_process(0), stage_process(1, **KILLED)))
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW)))
    assert rig.roots() == [(1, "dead")]
    assert rig.collector.snapshot(1).verdicts[0].summary == "stage 1 was killed by SIGKILL"
    assert rig.collector.snapshot(1).stages[1].state == "loading"
    assert rig.collector.snapshot(1).stages[1].pid == NEW
    rig.look(sample(0), sample(1, pid=NEW, phase="load", op="load"))
    assert rig.roots() == [(1, "dead")]
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "dead")], "it was back sooner than anybody reads"
    monkeypatch.setattr(recent_deaths, "_SHOWN_NS", 0)
    assert rig.roots() == []
    assert (rig.told("verdict.raised"), rig.told("verdict.cleared")) == (1, 1)


def test_the_cgroup_is_asked_once_more_after_the_end(rig: Rig) -> None:
    rig.look(sample(0), sample(1, oom_kills=4))
    rig.roots()
    rig.collector.take(processes(stage_process(0), stage_process(1, **KILLED)))
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW)))
    rig.roots()
    rig.look(sample(0), sample(1, oom_kills=5, process_state=None))
    rig.roots()
    assert "cgroup oom_kill +1" in rig.collector.snapshot(1).verdicts[0].evidence


def test_the_cgroup_of_one_whose_successor_is_there_already(rig: Rig) -> None:
    rig.look(sample(0), sample(1, oom_kills=4))
    rig.roots()
    rig.collector.take(processes(stage_process(0), stage_process(1, **KILLED)))
    rig.roots()
    # The agent has seen the successor before the supervisor tells of it.
    rig.look(sample(0), sample(1, pid=NEW, oom_kills=0, before=(1001, 5)))
    rig.roots()
    assert "no cgroup OOM" in rig.collector.snapshot(1).verdicts[0].evidence, "what was seen of it stays"
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW)))
    assert rig.roots() == [(1, "killed_oom")]
    assert "cgroup oom_kill +1" in rig.collector.snapshot(1).verdicts[0].evidence


def test_a_second_death_is_the_new_process_s(rig: Rig) -> None:
    rig.collector.take(processes(stage_process(0), stage_process(1, **KILLED)))
    rig.roots()
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW, exit_code=1, detail="no weights")))
    assert rig.roots() == [(1, "crashed")]
    assert "no weights" in rig.collector.snapshot(1).verdicts[0].summary
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "crashed")], "the rings of the dead say nothing of a successor"


def test_a_process_that_was_replaced_on_purpose_is_no_fault(rig: Rig) -> None:
    rig.collector.take(processes(stage_process(0), stage_process(1, replaced=True)))
    rig.look(sample(0), sample(1, process_state=None))
    assert rig.roots() == []
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW)))
    assert rig.roots() == []
    assert rig.collector.snapshot(1).stages[1].state == "loading"
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == []
    assert (rig.told("verdict.raised"), rig.told("stage.dead")) == (0, 0)


def test_last_words_are_told_for_a_while_though_another_process_serves():
    recent_deaths, second = RecentDeaths(), 1_000_000_000
    says = stage(0, pid=1, phase="serving", lost="ValueError: gone", lost_for_s=0.0)
    assert recent_deaths.keep(10 * second, (says,), {}, []) == (says,)
    back = stage(0, pid=2, phase="serving")
    (told,) = recent_deaths.keep(11 * second, (back,), {}, [])
    assert (told.pid, told.lost, told.lost_for_s) == (1, "ValueError: gone", 1.0)
    assert recent_deaths.keep(13 * second, (back,), {}, []) == (back,)
    assert recent_deaths.keep(14 * second, (back,), {}, []) == (back,), "it is forgotten"


def test_words_of_a_successor_s_own_are_another_end():
    recent_deaths, second = RecentDeaths(), 1_000_000_000
    dead = stage(0, pid=1, dead_for_s=0.0, exit_code=-9, oom_kills=1)
    assert recent_deaths.keep(10 * second, (dead,), {}, []) == (dead,)
    for phase in ("compile", "serving"):
        follows = stage(0, pid=2, phase=phase)
        (told,) = recent_deaths.keep(11 * second, (follows,), {}, [])
        assert (told.pid, told.dead_for_s, told.oom_kills, told.lost) == (1, 1.0, 1, "")
        assert (told.successor, told.successor_phase) == (2, phase)
    own = stage(0, pid=2, phase="serving", lost="ValueError: gone", lost_for_s=0.0)
    assert recent_deaths.keep(14 * second, (own,), {}, []) == (own,)
    back = stage(0, pid=3, phase="serving")
    assert recent_deaths.keep(17 * second, (back,), {}, []) == (back,)


@pytest.mark.parametrize("known", [False, True], ids=["the core is late", "the core knows"])
def test_who_serves_is_not_blamed_for_what_the_core_has_lost_before_it(rig: Rig, known: bool) -> None:
    """The core tells of a loss until its next report behind the meeting of all: a fork serves before that."""
    config, words = rig.collector._config, "killed by SIGKILL"
    lost = core_report(config, stages=[view(0), view(1, lost=words)])
    rig.collector.take(processes(stage_process(0), stage_process(1, **KILLED)))
    if known:
        rig.collector.take(lost)
    assert rig.roots() == [(1, "dead")]
    rig.collector.take(lost)
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW, generation=2)))
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "dead")]
    told = rig.collector.snapshot(1).verdicts[0]
    assert told.summary == "stage 1 was killed by SIGKILL"
    assert told.suggest == f"ppconsole logs --stage 1 (pid {NEW} takes its place in phase serving)"
    rig.collector.take(core_report(config, stages=[view(0), view(1, lost="its own", lost_generation=2)]))
    assert rig.roots() == [(1, "crashed")]
    assert "its own" in rig.collector.snapshot(1).verdicts[0].summary


def test_words_that_nobody_saw_before_another_process_served_are_told_once(rig: Rig, monkeypatch) -> None:
    config = rig.collector._config
    assert rig.roots() == []
    lost = core_report(config, stages=[view(0), view(1, lost="ValueError: gone")])
    rig.collector.take(lost)
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW, generation=2)))
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "crashed")]
    told = rig.collector.snapshot(1).verdicts[0]
    assert "ValueError: gone" in told.summary and f"pid {NEW} takes its place" in told.suggest
    assert rig.collector._evidence.stages[1].pid == 1001, "what is told is of the one that said so"
    monkeypatch.setattr(recent_deaths, "_SHOWN_NS", 0)
    assert rig.roots() == [], "the core still tells of it, and it was told"
    rig.collector.take(core_report(config, stages=[view(0), view(1, lost="ValueError: gone", lost_generation=2)]))
    assert rig.roots() == [(1, "crashed")], "those are its own"
    assert rig.collector._evidence.stages[1].pid == NEW


def test_a_loss_that_was_made_good_between_two_looks_is_told(rig: Rig) -> None:
    """The gateway had no turn for as long as a fork takes: the newest report says that all is well."""
    config = rig.collector._config
    rig.collector.take(core_report(config, stages=[view(0), view(1, lost="ValueError: gone")]))
    rig.collector.take(core_report(config))
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW, generation=2)))
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "crashed")]
    assert rig.roots() == [(1, "crashed")] and rig.told("verdict.raised") == 1


def test_the_end_of_a_process_that_was_never_seen_is_told(rig: Rig) -> None:
    config = rig.collector._config
    rig.collector.take(core_report(config, stages=[view(0), view(1, lost="gone", lost_generation=2)]))
    rig.collector.take(processes(stage_process(0), stage_process(1, pid=NEW, generation=3)))
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "crashed")]
    told = rig.collector.snapshot(1).verdicts[0]
    assert told.evidence[0] == "pid unknown: cannot go on" and f"pid {NEW} takes its place" in told.suggest


def test_a_process_that_serves_again_after_its_words_may_say_them_again() -> None:
    recent_deaths, second = RecentDeaths(), 1_000_000_000
    lost = stage(0, pid=1, phase="serving", lost="gone", lost_for_s=0.0)
    assert recent_deaths.keep(10 * second, (lost,), {}, []) == (lost,)
    back = stage(0, pid=1, phase="serving")
    assert recent_deaths.keep(13 * second, (back,), {}, []) == (back,)
    follows = stage(0, pid=2, phase="load", generation=4, lost="gone", lost_for_s=0.0, lost_generation=1)
    (told,) = recent_deaths.keep(20 * second, (follows,), {}, [])
    assert (told.pid, told.lost, told.successor) == (1, "gone", 2)


def test_what_was_found_in_a_process_before_its_end_stays_with_it():
    """The core forgets findings as soon as its stages begin anew, which is before anybody has read the verdict."""
    recent_deaths, second = RecentDeaths(), 1_000_000_000
    found = Finding(stage=0, cause="stream_owner", summary="stage 0: x", since_s=0.1)
    later = Finding(stage=0, cause="stream_order", summary="stage 0: y", since_s=0.0)
    others = [Finding(stage=1, cause="stream_owner", summary="stage 1: x", since_s=0.1)]
    old = [Finding(stage=0, cause="stream_order", summary="stage 0: z", since_s=60.0)]
    lost = stage(0, pid=1, phase="serving", lost="RuntimeError: gone", lost_for_s=0.0)
    (told,) = recent_deaths.keep(10 * second, (lost,), {}, [], [found, *others, *old])
    assert told.findings == (found,)
    follows = stage(0, pid=2, phase="compile")
    (told,) = recent_deaths.keep(11 * second, (follows,), {}, [])
    assert (told.pid, told.findings) == (1, (found,))
    back = stage(0, pid=2, phase="serving")
    (told,) = recent_deaths.keep(13 * second, (back,), {}, [], [later])
    assert (told.pid, told.findings) == (2, ())
    again = stage(0, pid=2, phase="serving", lost="RuntimeError: gone too", lost_for_s=0.0)
    (told,) = recent_deaths.keep(14 * second, (again,), {}, [])
    assert told.findings == ()


def test_a_successor_that_dies_while_it_loads_has_not_done_what_its_predecessor_did():
    """The core forgets what was found only when all stages have met."""
    recent_deaths, second = RecentDeaths(), 1_000_000_000
    found = Finding(stage=0, cause="stream_owner", summary="stage 0: x", since_s=0.1)
    lost = stage(0, pid=1, phase="serving", dead_for_s=0.0, exit_code=-11)
    (told,) = recent_deaths.keep(10 * second, (lost,), {}, [], [found])
    assert told.findings == (found,)
    for at_s in (3, 4):
        there = msgspec.structs.replace(found, since_s=at_s + 0.1)
        dead = stage(0, pid=2, phase="load", dead_for_s=at_s - 3.0, exit_code=-11)
        (told,) = recent_deaths.keep((10 + at_s) * second, (dead,), {}, [], [there])
        assert (told.pid, told.findings) == (2, ())


def test_what_was_lost_before_a_process_was_there_does_not_make_its_own_end_older() -> None:
    """The core tells of the last process for as long as its successor loads."""
    config = make_config()
    tracker, second = EvidenceTracker(2, 10.0), 1_000_000_000

    def lost_for(at_s: int, words: str, generation: int = 2) -> float | None:
        report = core_report(config, stages=[view(0), view(1, lost=words, lost_generation=generation)])
        here = processes(stage_process(0), stage_process(1, pid=NEW, generation=2))
        return tracker.build(at_s * second, report, {}, here, None).stages[1].lost_for_s

    try:
        assert [lost_for(10, "RuntimeError: gone", 1), lost_for(12, "RuntimeError: gone", 1)] == [0.0, 2.0]
        assert [lost_for(20, "RuntimeError: gone"), lost_for(21, "RuntimeError: gone")] == [0.0, 1.0], "its own"
        assert lost_for(23, "") is None
        assert [lost_for(60, "RuntimeError: gone"), lost_for(61, "RuntimeError: gone")] == [0.0, 1.0]
        assert [lost_for(69, "KeyError: w"), lost_for(70, "KeyError: w")] == [0.0, 1.0], "other words are another end"
    finally:
        remove(config)
