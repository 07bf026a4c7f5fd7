"""A stage that died is dead until its successor serves; one that was replaced on purpose is not."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from monitor_helpers import core_report, make_config, processes, remove, sample, stage_process
from ppengine.common.config import EngineConfig
from ppengine.diagnosis import fault_log
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.gateway import collector
from ppengine.gateway.collector import Collector
from ppengine.gateway.event_log import EventLog
from ppengine.protocol.facts import Exited, Lost, Serving
from ppengine.protocol.place import Place
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import Event, Verdict
from ppengine.protocol.stage_samples import AgentReport, StageSample

NEW = 2001
WORDS = "ValueError: gone"


class Rig:
    """A collector of two stages, fed by hand."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.events: list[Event] = []
        self.collector = Collector(config, EventLog(self.events.append))
        self.collector.take(core_report(config))
        self.look(sample(0), sample(1))
        self.collector.take(processes(stage_process(0), stage_process(1)))
        self.collector.judge(stopping=False)

    def look(self, *samples: StageSample) -> None:
        """Let the agent report."""
        self.collector.take(AgentReport(mono_ns=1, node=f"not {socket.gethostname()}", stages=list(samples)))

    def exits(self, pid: int = 1001, generation: int = 1, exit_code: int = -9, detail: str = "killed by SIGKILL"):
        """Let the process of stage 1 exit, by fact and report of the supervisor."""
        status = {"pid": pid, "generation": generation, "exit_code": exit_code, "detail": detail}
        self.collector.take(Exited(mono_ns=time.monotonic_ns(), role="stage", place=Place(1, 0), **status))
        self.collector.take(processes(stage_process(0), stage_process(1, **status)))

    def starts(self, pid: int = NEW, generation: int = 2, **changes: Any) -> None:
        """Let the supervisor report a process of stage 1."""
        self.collector.take(
            processes(stage_process(0), stage_process(1, pid=pid, generation=generation, **changes))
        )  # fmt: skip

    def says(self, generation: int = 1, words: str = WORDS, pid: int | None = 1001) -> None:
        """Let the core report last words of stage 1."""
        now_ns = time.monotonic_ns()
        self.collector.take(Lost(mono_ns=now_ns, place=Place(1, 0), generation=generation, words=words, pid=pid))

    def serves(self, generation: int = 2) -> None:
        """Let the engine serve again, with the process of stage 1 of `generation`."""
        serving = ((Place(0, 0), 1), (Place(1, 0), generation))
        self.collector.take(
            Serving(mono_ns=time.monotonic_ns(), generation=9, processes=serving, took_s=0.3, recomputed=0)
        )  # fmt: skip

    def roots(self) -> list[tuple[int | None, str]]:
        """Judge and return the roots."""
        self.collector.judge(stopping=False)
        found = self.collector.snapshot(1).verdicts
        return [(verdict.stage, verdict.cause) for verdict in found if verdict.root]

    @property
    def first(self):
        return self.collector.snapshot(1).verdicts[0]

    @property
    def evidence(self) -> StageEvidence:
        return self.collector._evidence.stages[1]

    def count_of(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)


@pytest.fixture
def rig() -> Iterator[Rig]:
    config = make_config()
    yield Rig(config)
    remove(config)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an end be no news as soon as a successor serves."""
    monkeypatch.setattr(fault_log, "SHOWN_NS", 0)


def test_a_death_stays_the_verdict_until_the_successor_serves(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.roots() == []
    # Both reports come before anybody judges: the supervisor is that quick.
    rig.exits()
    rig.starts()
    assert rig.roots() == [(1, "dead")]
    assert rig.first.summary == "stage 1 was killed by SIGKILL"
    assert rig.collector.snapshot(1).stages[1].state == "loading"
    assert rig.collector.snapshot(1).stages[1].pid == NEW
    rig.look(sample(0), sample(1, pid=NEW, phase="load", op="load"))
    assert rig.roots() == [(1, "dead")]
    assert (rig.evidence.pid, rig.evidence.successor, rig.evidence.successor_phase) == (1001, NEW, "load")
    rig.look(sample(0), sample(1, pid=NEW))
    rig.serves()
    assert rig.roots() == [(1, "dead")], "it was back sooner than anybody reads"
    assert rig.first.suggest == f"ppconsole logs --stage 1 (pid {NEW} takes its place in phase serving)"
    monkeypatch.setattr(fault_log, "SHOWN_NS", 0)
    assert rig.roots() == []
    assert (rig.count_of("verdict.raised"), rig.count_of("verdict.cleared")) == (1, 1)
    cleared = next(event.text for event in rig.events if event.kind == "verdict.cleared")
    assert re.fullmatch(r"over: dead, reported for \d\.\ds: stage 1 was killed by SIGKILL", cleared), (
        "its time is that of the report, not of the fault"
    )


@pytest.mark.parametrize(("since_s", "age"), [(6.42, "6.4s"), (209.4, "3m29"), (7800.0, "2h10")])
def test_the_end_of_a_long_verdict_has_its_time_as_the_screens_write_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, since_s: float, age: str
) -> None:
    found = [Verdict(stage=None, cause="store", summary="backend disk is full", since_s=since_s)]
    monkeypatch.setattr(collector, "diagnose", lambda evidence: list(found))
    rig.roots()
    found.clear()
    rig.roots()
    cleared = next(event.text for event in rig.events if event.kind == "verdict.cleared")
    assert cleared == f"over: store, reported for {age}: backend disk is full"


def test_the_root_is_the_last_of_the_events_of_one_fault(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of two lines has the root then, and not what follows from it."""
    root = Verdict(stage=1, cause="stopped", summary="stopped", since_s=1.0)
    others = [Verdict(stage=stage, cause="starved", summary="starved", since_s=1.0, root=False) for stage in (0, 2)]
    monkeypatch.setattr(collector, "diagnose", lambda evidence: [root, *others])
    rig.roots()
    assert [event.text for event in rig.events if event.kind == "verdict.raised"][-1] == "stopped: stopped"


def test_without_an_agent_the_core_says_when_a_death_is_over(rig: Rig, quick: None) -> None:
    rig.exits()
    rig.starts()
    assert rig.roots() == [(1, "dead")]
    rig.serves()
    assert rig.roots() == []


def test_the_cgroup_is_asked_once_more_after_the_end(rig: Rig) -> None:
    rig.look(sample(0), sample(1, oom_kills=4))
    rig.roots()
    rig.exits()
    rig.starts()
    rig.roots()
    rig.look(sample(0), sample(1, oom_kills=5, process_state=None))
    rig.roots()
    assert "cgroup oom_kill +1" in rig.first.evidence


def test_the_cgroup_of_one_whose_successor_is_there_already(rig: Rig) -> None:
    rig.look(sample(0), sample(1, oom_kills=4))
    rig.roots()
    rig.exits()
    rig.roots()
    assert "no cgroup OOM" in rig.first.evidence
    # The agent has seen the successor before the supervisor tells of it.
    rig.look(sample(0), sample(1, pid=NEW, oom_kills=0, before=(1001, 5)))
    assert rig.roots() == [(1, "killed_oom")]
    rig.starts()
    assert rig.roots() == [(1, "killed_oom")]
    assert "cgroup oom_kill +1" in rig.first.evidence
    assert rig.evidence.sample_age_s is not None, "what was seen of it stays"


def test_a_cgroup_without_a_count_before_the_end_tells_nothing(rig: Rig) -> None:
    rig.exits()
    rig.look(sample(0), sample(1, pid=NEW, before=(1001, 5)))
    rig.starts()
    assert rig.roots() == [(1, "dead")]
    assert "cgroup oom_kill: not readable" in rig.first.evidence


def test_a_second_death_is_the_new_process_s(rig: Rig) -> None:
    rig.exits()
    rig.roots()
    rig.exits(pid=NEW, generation=2, exit_code=1, detail="no weights")
    assert rig.roots() == [(1, "crashed")]
    assert "no weights" in rig.first.summary
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "crashed")], "the rings of the dead say nothing of a successor"


def test_a_process_that_was_replaced_on_purpose_is_no_fault(rig: Rig) -> None:
    rig.starts(pid=1001, generation=1, replaced=True)
    rig.look(sample(0), sample(1, process_state=None))
    assert rig.roots() == []
    rig.starts()
    assert rig.roots() == []
    assert rig.collector.snapshot(1).stages[1].state == "loading"
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == []
    assert (rig.count_of("verdict.raised"), rig.count_of("stage.dead")) == (0, 0)


@pytest.mark.parametrize("stopping", [True, False])
def test_the_end_of_a_stage_is_an_event_unless_the_engine_stops(rig: Rig, stopping: bool) -> None:
    rig.exits(exit_code=0, detail="")
    rig.look(sample(0), sample(1, process_state=None))
    rig.collector.judge(stopping=stopping)
    assert rig.collector.snapshot(1).stages[1].state == "dead"
    assert rig.count_of("stage.dead") == (not stopping)


def test_a_stage_that_is_replaced_for_its_words_was_not_killed(rig: Rig) -> None:
    rig.says()
    rig.starts(pid=1001, generation=1, replaced=True)
    rig.look(sample(0), sample(1, process_state=None))
    assert rig.roots() == [(1, "crashed")]
    assert rig.first.evidence[0] == "pid 1001: cannot go on"
    rig.starts()
    assert rig.roots() == [(1, "crashed")]
    assert rig.first.evidence[0] == "pid 1001: cannot go on"


def test_an_exit_after_last_words_is_the_same_end(rig: Rig) -> None:
    rig.says()
    assert rig.roots() == [(1, "crashed")]
    rig.exits(exit_code=1, detail="exit code 1")
    assert rig.roots() == [(1, "crashed")]
    assert rig.first.summary == f"stage 1 exited with code 1: {WORDS}"
    assert rig.count_of("verdict.raised") == 1


def test_a_signal_is_not_repeated_as_last_words(rig: Rig) -> None:
    rig.exits(exit_code=-6, detail="killed by SIGABRT: CUDA error: device-side assert triggered")
    assert rig.roots() == [(1, "crashed")]
    assert rig.first.summary == "stage 1 was killed by SIGABRT: CUDA error: device-side assert triggered"


def test_last_words_are_told_for_a_while_though_another_process_serves(rig: Rig, monkeypatch) -> None:
    rig.says()
    rig.starts()
    rig.look(sample(0), sample(1, pid=NEW))
    rig.serves()
    assert rig.roots() == [(1, "crashed")]
    assert WORDS in rig.first.summary and f"pid {NEW} takes its place" in rig.first.suggest
    assert rig.evidence.pid == 1001, "what is told is of the one that said so"
    assert rig.roots() == [(1, "crashed")] and rig.count_of("verdict.raised") == 1
    monkeypatch.setattr(fault_log, "SHOWN_NS", 0)
    assert rig.roots() == []
    rig.says(generation=2, words="its own", pid=NEW)
    assert rig.roots() == [(1, "crashed")]
    assert "its own" in rig.first.summary and rig.evidence.pid == NEW


def test_words_of_a_successor_s_own_are_another_end(rig: Rig) -> None:
    rig.look(sample(0), sample(1, oom_kills=4))
    rig.roots()
    rig.exits()
    rig.look(sample(0), sample(1, oom_kills=5, process_state="Z"))
    assert rig.roots() == [(1, "killed_oom")]
    for phase in ("compile", "serving"):
        rig.starts()
        rig.look(sample(0), sample(1, pid=NEW, phase=phase))
        assert rig.roots() == [(1, "killed_oom")]
        assert (rig.evidence.successor, rig.evidence.successor_phase) == (NEW, phase)
    rig.says(generation=2, words="KeyError: 'w'", pid=NEW)
    assert rig.roots() == [(1, "crashed")]
    assert (rig.evidence.pid, rig.evidence.successor, rig.evidence.exit_code) == (NEW, None, None)


def test_the_gateway_had_no_turn_while_a_stage_died_and_was_back(rig: Rig, monkeypatch) -> None:
    """All facts come at once, and the newest reports say that all is well: an operator is shown the end."""
    at_ns = time.monotonic_ns() - 60_000_000_000
    rig.collector.take(Lost(mono_ns=at_ns, place=Place(1, 0), generation=1, words=WORDS, pid=1001))
    rig.serves()
    rig.starts()
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "crashed")]
    assert rig.first.since_s == pytest.approx(60.0, abs=5.0)
    assert rig.roots() == [(1, "crashed")] and rig.count_of("verdict.raised") == 1


def test_the_end_of_a_process_that_was_never_seen_is_told(rig: Rig) -> None:
    rig.says(generation=2, words="gone", pid=None)
    rig.starts(generation=3)
    rig.look(sample(0), sample(1, pid=NEW))
    assert rig.roots() == [(1, "crashed")]
    assert rig.first.evidence[0] == "pid unknown: cannot go on" and f"pid {NEW} takes its place" in rig.first.suggest


def test_the_words_of_a_process_that_the_supervisor_has_not_reported(rig: Rig) -> None:
    rig.exits()
    rig.says(generation=2, words="its own", pid=NEW)
    assert rig.roots() == [(1, "crashed")]
    assert (rig.evidence.pid, rig.evidence.successor) == (NEW, None)


def test_ends_age_by_their_own_time(rig: Rig) -> None:
    """The core is silent, and the gateway judges: an end grows old all the same."""
    rig.says()
    rig.collector.judge(stopping=False)
    first = rig.evidence.lost_for_s
    time.sleep(0.02)
    rig.collector.judge(stopping=False)
    assert rig.evidence.lost_for_s >= first + 0.02


def finding(age_s: float, stage: int = 1, cause: Any = "stream_owner") -> Finding:
    return Finding(stage=stage, cause=cause, summary=f"stage {stage}: {age_s}", since_s=age_s)


def test_what_was_found_in_a_process_before_its_end_stays_with_it(rig: Rig, quick: None) -> None:
    """The core forgets findings as soon as its stages begin anew, which is before anybody has read the verdict."""
    found = finding(0.1)
    rig.says(words="RuntimeError: CUDA error: gone")
    rig.collector.take(core_report(rig.config, findings=[found, finding(0.1, stage=0), finding(60.0)]))
    rig.roots()
    assert rig.evidence.findings == (found,)
    rig.collector.take(core_report(rig.config))
    rig.starts()
    rig.look(sample(0), sample(1, pid=NEW, phase="compile"))
    rig.roots()
    assert (rig.evidence.pid, rig.evidence.findings) == (1001, (found,))
    assert rig.first.cause == "stream_owner"
    rig.serves()
    rig.roots()
    assert (rig.evidence.pid, rig.evidence.findings) == (NEW, ())
    rig.says(generation=2, pid=NEW)
    rig.roots()
    assert rig.evidence.findings == ()


def test_a_successor_that_dies_while_it_loads_has_not_done_what_its_predecessor_did(rig: Rig) -> None:
    """The core forgets what was found only when all stages have met."""
    began_ns = time.monotonic_ns()
    rig.collector.take(
        Exited(mono_ns=began_ns, role="stage", place=Place(1, 0), generation=1, pid=1001, exit_code=-11)
    )  # fmt: skip
    rig.collector.take(core_report(rig.config, findings=[finding(0.1)]))
    rig.roots()
    assert len(rig.evidence.findings) == 1
    rig.collector.take(
        Exited(mono_ns=began_ns + 3_000_000_000, role="stage", place=Place(1, 0), generation=2, pid=NEW, exit_code=-11)
    )  # fmt: skip
    rig.roots()
    assert (rig.evidence.pid, rig.evidence.findings) == (NEW, ())
