"""Processes beside the pipeline that are stopped or hang: which, since when, with which effect, what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnosis_world import evidence, healthy, with_stage
from monitor_helpers import core_report, make_config, remove, until
from msgspec.structs import replace
from ppengine.common.procfs import read_stat
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.evidence import CoreEvidence
from ppengine.diagnosis.helper_evidence import HelperEvidence
from ppengine.diagnosis.tracker import EvidenceTracker
from ppengine.gateway.helper_watch import HelperWatch, Sign
from ppengine.protocol.reports import ProcessInfo, Unanswered
from ppengine.protocol.snapshot import Verdict

SECOND = 1_000_000_000
HTTP = HelperEvidence(role="http0", pid=7, process_state="S", silent_for_s=0.7, open=3, of=2)


def found(*helpers: HelperEvidence, **changes: object) -> list[Verdict]:
    return diagnose(evidence(healthy(2), helpers=helpers, **changes))


def test_a_process_that_reports_is_no_fault_and_neither_is_a_slow_one() -> None:
    assert not found(HTTP, HelperEvidence(role="http1", pid=8, process_state="R", silent_for_s=4.5))


def test_a_process_that_begins_has_time() -> None:
    assert not found(HelperEvidence(role="http0", pid=7, process_state="R", silent_for_s=40.0, reported=False))
    (late,) = found(HelperEvidence(role="http0", pid=7, process_state="R", silent_for_s=61.0, reported=False))
    assert "has not come up for 61.0s" in late.summary


@pytest.mark.parametrize(
    ("changes", "how", "what"),
    [
        ({"process_state": "T", "stopped_for_s": 3.0}, "is stopped by a signal (state T)", "kill -CONT 7"),
        ({"process_state": "t", "stopped_for_s": 3.0, "tracer": "gdb (pid 9)"}, "is stopped by gdb", "9"),
        ({"frozen": "/sys/fs/cgroup/a/cgroup.freeze", "stopped_for_s": 3.0}, "is frozen by its cgroup", "echo 0"),
        ({"silent_for_s": 8.0}, "hangs: no report for 8.0s", "kill -KILL 7"),
    ],
)
def test_it_is_named_with_its_effect_and_the_way_out(changes: dict[str, object], how: str, what: str) -> None:
    (verdict,) = found(
        HelperEvidence(**{"role": "http0", "pid": 7, "process_state": "S", "open": 3, "of": 2} | changes)
    )
    assert verdict.cause == "process" and verdict.root and verdict.stage is None
    assert verdict.summary.startswith("http0 (HTTP process, pid 7) ") and how in verdict.summary
    assert verdict.since_s == (8.0 if "silent_for_s" in changes else 3.0)
    assert "1 of 2 new connections waits for it, as do 3 open answers" in verdict.evidence[1]
    assert what in verdict.suggest


def test_several_are_one_verdict_http_processes_first() -> None:
    stopped = {"process_state": "T", "stopped_for_s": 3.0}
    (verdict,) = found(
        HelperEvidence(role="supervisor", pid=6, **stopped), HelperEvidence(role="http0", pid=7, **stopped)
    )  # fmt: skip
    assert verdict.summary.startswith("http0 ") and verdict.subject == "http0"
    (other,) = verdict.further
    assert (other.subject, other.suggest) == ("supervisor", "kill -CONT 6")
    assert other.summary == "supervisor (pid 6) is stopped by a signal (state T)"


def test_children_of_the_same_role_differ_by_their_parents() -> None:
    stopped = {"role": "templates", "process_state": "T", "stopped_for_s": 3.0}
    (verdict,) = found(
        HelperEvidence(parent="http0", pid=8, **stopped), HelperEvidence(parent="http1", pid=9, **stopped)
    )  # fmt: skip
    assert [verdict.subject, *(one.subject for one in verdict.further)] == ["templates of http0", "templates of http1"]


def test_a_stage_comes_first_and_an_end_says_it_all() -> None:
    stopped = HelperEvidence(role="http0", pid=7, process_state="T", stopped_for_s=3.0)
    stages = with_stage(healthy(2), 1, process_state="T", stopped_for_s=0.4)
    verdicts = diagnose(evidence(stages, helpers=(stopped,)))
    assert [verdict.cause for verdict in verdicts] == ["stopped", "process"]
    assert not found(stopped, stopping=True)
    gone = CoreEvidence(role="supervisor", pid=6, exit_code=-9, dead_for_s=1.0)
    assert [verdict.cause for verdict in found(stopped, core=gone)] == ["core"]


def test_a_stopped_child_of_the_core_is_the_cause_why_nothing_is_scheduled() -> None:
    config, tracker = make_config(), EvidenceTracker(2, 10.0)
    child = HelperEvidence(role="grammar", parent="core", pid=9, process_state="T")

    def judged(at_s: float, *helpers: HelperEvidence) -> list[Verdict]:
        report = core_report(config, mono_ns=int(at_s * SECOND), steps_in_flight=[])
        report.queues.running = 1
        return diagnose(tracker.build(report.mono_ns, report, {}, None, (5, "S"), helpers=helpers))

    assert not judged(10) and [verdict.cause for verdict in judged(14)] == ["core"]
    (verdict,) = judged(15, replace(child, stopped_for_s=4.5))
    assert verdict.summary == "grammar (child of core, pid 9) is stopped by a signal (state T)"
    assert verdict.suggest == "kill -CONT 9" and "requests that need it wait" in verdict.evidence[1]
    assert not judged(16) and not judged(17), "the next one begins"
    assert [verdict.cause for verdict in judged(20)] == ["core"]
    remove(config)


def test_a_busy_child_of_the_core_is_named_in_its_place_when_its_answer_is_late() -> None:
    config, tracker = make_config(), EvidenceTracker(2, 10.0)
    child = HelperEvidence(role="grammar", parent="core", pid=9, process_state="R", reported=False)

    def judged(at_s: float, owes_for_s: float | None) -> list[Verdict]:
        report = core_report(config, mono_ns=int(at_s * SECOND), steps_in_flight=[])
        report.queues.running = 1
        helper = replace(child, owes_for_s=owes_for_s)
        return diagnose(tracker.build(report.mono_ns, report, {}, None, (5, "S"), helpers=(helper,)))

    assert not judged(10, None) and not judged(11, 1.0) and not judged(12.5, 2.5)
    (verdict,) = judged(14, 4.0)
    assert (verdict.cause, verdict.since_s) == ("process", 4.0)
    assert verdict.summary == "grammar (child of core, pid 9) has not answered the core for 4.0s"
    assert verdict.suggest == "kill -KILL 9 (another one is started)"
    assert not judged(15, None) and [verdict.cause for verdict in judged(18.5, None)] == ["core"]
    remove(config)


def test_children_of_the_core_are_found_by_their_modules() -> None:
    """A child of this test has the command line of a process for grammars."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "ppengine.grammar"]) as child:
        try:
            # A process that begins has no command line for a moment.
            until(lambda: b"ppengine.grammar" in Path(f"/proc/{child.pid}/cmdline").read_bytes())
            core = ProcessInfo(role="core", stage=None, rank=None, pid=os.getpid())
            late = [Unanswered(pid=child.pid, for_s=2.0)]
            found = {seen.pid: seen for seen in HelperWatch([], []).look(SECOND, [core], {}, late)}
            seen = found[child.pid]  # Other tests of this process may have left children, too.
            assert (seen.role, seen.parent, seen.silent_for_s, seen.owes_for_s) == ("grammar", "core", 0.0, 2.0)
        finally:
            child.kill()


def test_the_fork_server_is_found_beside_the_listed_children_of_the_supervisor() -> None:
    code = "import time; time.sleep(600)"
    forkserver = subprocess.Popen([sys.executable, "-c", code, "ppengine.supervisor.launch.forkserver"])
    stage = subprocess.Popen([sys.executable, "-c", code, "ppengine.stage.worker"])
    try:
        for child in (forkserver, stage):
            until(lambda pid=child.pid: b"ppengine." in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(forkserver.pid, signal.SIGSTOP)
        until(lambda: (read_stat(forkserver.pid) or pytest.fail("it has ended")).state == "T")
        listed = [
            ProcessInfo(role="supervisor", stage=None, rank=None, pid=os.getpid()),
            ProcessInfo(role="stage", stage=0, rank=0, pid=stage.pid),
        ]
        watch = HelperWatch([], [])
        watch.look(SECOND, listed, {"supervisor": Sign(SECOND)})
        seen = {one.pid: one for one in watch.look(4 * SECOND, listed, {"supervisor": Sign(4 * SECOND)})}
        assert stage.pid not in seen
        (verdict,) = found(seen[forkserver.pid])
        name = f"forkserver (child of supervisor, pid {forkserver.pid})"
        assert verdict.summary == f"{name} is stopped by a signal (state T)"
        assert "no stage can be started" in verdict.evidence[1] and verdict.suggest == f"kill -CONT {forkserver.pid}"
    finally:
        for child in (forkserver, stage):
            child.kill()
            child.wait()


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def test_the_watch_sees_a_stop_and_grants_a_report_after_it(sleeper: int) -> None:
    watch, one = HelperWatch(["http0"], ["texts"]), ProcessInfo(role="http0", stage=None, rank=None, pid=sleeper)

    def look(at_s: float, reported_s: float) -> HelperEvidence:
        (seen,) = watch.look(int(at_s * SECOND), [one], {"http0": Sign(int(reported_s * SECOND), 4)})
        return seen

    def state() -> str | None:
        stat = read_stat(sleeper)
        return stat.state if stat is not None else None

    # The newest report is of a process before this one.
    assert not look(10, 9).reported
    assert look(12, 11).reported
    os.kill(sleeper, signal.SIGSTOP)
    until(lambda: state() == "T")
    assert look(13, 12).stopped_for_s == 0.0
    seen = look(43, 12)
    assert (seen.stopped_for_s, seen.process_state, seen.open) == (30.0, "T", 4)
    os.kill(sleeper, signal.SIGCONT)
    until(lambda: state() == "S")
    seen = look(44, 12)
    assert (seen.stopped_for_s, seen.silent_for_s) == (None, 0.0)
    assert look(50, 12).silent_for_s == 6.0
    # The gateway was away itself.
    watch.restart_clock(60 * SECOND)
    seen = look(61, 12)
    assert (seen.silent_for_s, seen.reported) == (1.0, True)


def test_processes_that_ended_or_run_elsewhere_are_not_looked_at() -> None:
    listed = [
        ProcessInfo(role="http0", stage=None, rank=None, pid=1, exit_code=0),
        ProcessInfo(role="http1", stage=None, rank=None, pid=1, node="b"),
        ProcessInfo(role="store0.0", stage=None, rank=None, pid=1),
    ]
    assert HelperWatch(["http0", "http1"], ["texts"]).look(SECOND, listed, {}) == ()


def test_the_port_serves_once_one_of_its_processes_has_reported_and_until_all_are_silent(sleeper: int) -> None:
    watch = HelperWatch(["http0", "http1"], ["texts"])
    one = ProcessInfo(role="http1", stage=None, rank=None, pid=sleeper)

    def serves(at_s: float, reported_s: float, *listed: ProcessInfo) -> bool | None:
        watch.look(int(at_s * SECOND), listed, {"http1": Sign(int(reported_s * SECOND))})
        return watch.http_serves

    assert HelperWatch([], ["texts"]).http_serves is None, "there is no port"
    assert watch.http_serves is False
    assert serves(10, 9, one) is False, "that was a process before this one"
    assert serves(11, 10.5, one) is True
    assert serves(16, 10.5, one) is False, "it is silent"
    assert serves(17, 16.5, one) is True
    assert serves(18, 16.5, replace(one, exit_code=1)) is False
