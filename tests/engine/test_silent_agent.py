"""A hang while the agent is silent: the core's retirements name the stage, the kernel's state how it hangs."""

import os
import signal
import subprocess

import pytest
from diagnosis_world import FUTEX, PLACES, POLL, pipeline_held_at, stuck, with_stage
from monitor_helpers import processes, sample, stage_process, until
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.process_history import Glance, Sighting
from ppengine.diagnosis.tracker import EvidenceTracker
from ppengine.gateway.glance import AGENT_SILENT_S, glanced, silent_agent
from ppengine.protocol.reports import ProcessInfo

SECOND = 1_000_000_000


def unseen(count, k, age_s=3.4, **changes):
    """Return stages of which the agent has seen none for a while; stage `k` holds step 8."""
    stages = pipeline_held_at(count, k, age_s)
    for index in range(count):
        stages = with_stage(stages, index, sample_age_s=age_s, op_age_s=60.0, glanced=True, phase=None)
    return with_stage(stages, k, **{"process_state": "S", "wchan": FUTEX} | changes)


def roots(found):
    return [(verdict.stage, verdict.cause) for verdict in found if verdict.root]


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_first_stage_that_has_not_retired_is_named_alone(count, k):
    found = diagnose(stuck(unseen(count, k), 3.4, agent=(77, "T")))
    assert roots(found) == [(k, "self_stuck")]
    assert "the agent is silent" in found[0].summary and "m8" in found[0].summary
    assert found[0].suggest == f"ppconsole restart-stage {k} (and the agent: kill -CONT 77)"
    assert any(line.startswith("retired, by the core: stage 0 m") for line in found[0].evidence)
    starved = [verdict for verdict in found if not verdict.root]
    assert {verdict.stage for verdict in starved} == set(range(k + 1, count))
    assert all("has not retired" in verdict.summary for verdict in starved), "an old operation is not shown"
    assert all(verdict.since_s == 3.4 for verdict in starved), "nor its age"


def test_stage_before_with_a_newer_step_is_no_second_root():
    ahead = {"retired_step": 8, "unretired_age_s": 3.1, "unretired_step": 9, "wchan": POLL}
    assert roots(diagnose(stuck(with_stage(unseen(3, 2), 0, **ahead), 3.4))) == [(2, "self_stuck")]


def test_main_thread_in_a_poll_may_wait_for_a_lost_message():
    found = diagnose(stuck(unseen(3, 1, wchan=POLL), 3.4))
    assert roots(found) == [(1, "undetermined")]


def test_stage_that_has_stopped_is_named_without_an_agent():
    found = diagnose(stuck(unseen(3, 1, process_state="T", stopped_for_s=0.4), 3.4))
    assert roots(found) == [(1, "stopped")]


def test_stop_behind_an_old_sample_is_as_long_as_it_was_seen():
    """The agent is silent for 8 s, the stage stopped for 2.5 s. Its operation of then is no news of it."""
    tracker, now_ns = EvidenceTracker(2, 10.0), 100 * SECOND
    old = sample(1, pid=1001, op="receive", op_age_ms=5.0, op_peer=0, op_step=8)
    for ago_s in (2.5, 1.0, 0.1):
        at_ns = now_ns - int(ago_s * SECOND)
        seen = Sighting(old, now_ns - 8 * SECOND, glance=Glance(at_ns, "T", "do_signal_stop"))
        given = tracker.build(at_ns, None, {(1, 0): seen}, processes(stage_process(1, pid=1001)), None)
    given = tracker.build(now_ns, None, {(1, 0): seen}, processes(stage_process(1, pid=1001)), None)
    (found,) = diagnose(given)
    assert (found.stage, found.cause, found.since_s) == (1, "stopped", pytest.approx(2.5))
    assert found.summary == "stage 1 is stopped by a signal (pid 1001, state T)"
    assert not any("receive" in line for line in found.evidence)
    assert "missing: a sample of this moment; the newest is 8.0s old" in found.evidence


def test_agent_that_is_silent_is_no_fault_while_steps_retire():
    stages = unseen(3, 1)
    for index in range(3):
        stages = with_stage(stages, index, unretired_age_s=0.2)
    assert diagnose(stuck(stages, 0.2, agent=(77, "T"))) == []


# --- the gateway's own look ---------------------------------------------------------------------------------


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", "60"]) as one:
        yield one
        one.kill()


def test_gateway_looks_only_where_the_agent_does_not(process):
    late = int(AGENT_SILENT_S * SECOND) + 1
    known = {
        (0, 0): Sighting(sample(0, pid=process.pid), 0),
        (1, 0): Sighting(sample(1, pid=process.pid), late),
        (2, 0): Sighting(sample(2, pid=process.pid), 0, here=False),
    }
    found = glanced(known, late)
    assert [found[key].glance is not None for key in sorted(found)] == [True, False, False]
    until(lambda: glanced(known, late)[0, 0].glance.state == "S")
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: glanced(known, late)[0, 0].glance.state == "T")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert glanced(known, late)[0, 0].glance.state is None


def test_silent_agent_has_pid_and_state(process):
    until(lambda: silent_agent([ProcessInfo(role="agent", stage=None, rank=None, pid=process.pid)])[1] == "S")
    assert silent_agent([ProcessInfo(role="agent", stage=None, rank=None, pid=process.pid, exit_code=-9)]) is None
    assert silent_agent([]) is None


def test_stop_is_seen_by_glances_alone():
    tracker, seen = EvidenceTracker(1, 10.0), Sighting(sample(0), SECOND)

    def at(seconds, state):
        now_ns = int(seconds * SECOND)
        sighting = Sighting(seen.sample, seen.mono_ns, glance=Glance(now_ns, state))
        return tracker.build(now_ns, None, {(0, 0): sighting}, processes(stage_process(0)), None).stages[0]

    assert at(4.0, "S").stopped_for_s is None
    assert at(4.3, "T").stopped_for_s == 0.0
    later = at(4.6, "T")
    assert later.stopped_for_s == pytest.approx(0.3) and later.glanced and later.process_state == "T"
    assert at(4.9, None).dead_for_s == 0.0
