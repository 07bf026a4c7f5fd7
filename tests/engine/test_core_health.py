"""The records of the stages and the rank of the reasons why the engine does not serve."""

from __future__ import annotations

import itertools

import pytest
from core_world import CoreWorld
from ppengine.core.__main__ import _why_signalled
from ppengine.core.health import Health
from ppengine.core.stage_records import FOLLOWING, StageRecord, Stages
from ppengine.protocol import kept_files
from ppengine.protocol.facts import LinkBroke
from ppengine.protocol.kept_files import EngineEnd
from ppengine.protocol.place import Place


@pytest.mark.parametrize(("before", "after"), list(itertools.product(FOLLOWING, FOLLOWING)))
def test_a_record_enters_only_phases_that_may_follow(before, after):
    record = StageRecord(Place(2, 0), (0, 1), "stage 2", phase=before)
    if after in FOLLOWING[before]:
        record.transition(after)
        assert record.phase == after
    else:
        with pytest.raises(ValueError, match=f"stage 2 is {before}: it cannot become {after}"):
            record.transition(after)
        assert record.phase == before


def test_the_first_loss_stays_the_cause_when_it_is_confirmed():
    stages = Stages([(0, 1), (1, 2), (2, 3)])
    report = LinkBroke(mono_ns=1, stage=1, peer=2, text="lost stage 2", closed=True)
    assert stages.lose(stages.leader(2), "its connection closed", 1.5, report)
    assert stages.lose(stages.leader(0), "killed", 1.0)
    assert not stages.lose(stages.leader(2), "its connection closed", 1.7, report), "known"
    assert stages.lose(stages.leader(2), "out of memory", 1.0)
    assert not stages.lose(stages.leader(2), "its connection closed", 1.7, report), "confirmed"
    assert not stages.lose(stages.leader(0), "exit code 1", 1.2), "the first reason counts"
    assert [record.stage for record in stages.lost] == [2, 0]
    assert stages.loss == "stage 2 is lost: out of memory"


def test_a_loss_of_the_restarted_process_counts_again():
    stages = Stages([(0, 1)])
    record = stages.leader(0)
    assert stages.lose(record, "killed", 1.0)
    record.loss.due = None
    record.transition("lost")
    assert not stages.lose(record, "killed", 2.0), "no process was started in its place"
    record.start(2, 2.5)
    assert stages.lose(record, "no weights", 3.0)
    assert (record.loss.why, record.started) == ("no weights", 2)


def test_reasons_are_ranked():
    stages = Stages([(0, 1), (1, 2)])
    health = Health(stages)
    assert (health.state, health.message, health.failure) == ("loading", "stages are loading", "")
    health.progress("stage 1: 40%")
    assert health.message == "stage 1: 40%"
    stages.lose(stages.leader(1), "killed", 0.0)
    assert (health.state, health.message) == ("degraded", "stage 1 is lost: killed")
    health.recover()
    assert (health.state, health.message) == ("degraded", "stage 1 is lost: killed; stage 1: 40%")
    health.stay_down("stage 1 died again")
    assert (health.state, health.message, health.failure) == ("degraded", "stage 1 died again", "stage 1 died again")
    health.leave("signal")
    assert (health.state, health.failure) == ("stopped", "stage 1 died again")
    health.leave("stop by eve")
    assert health.leaving == "signal"


def test_an_engine_that_serves_has_no_reason():
    world = CoreWorld()
    health = world.engine.health
    assert (health.state, health.message, health.blocked) == ("serving", "", False)
    health.draining = True
    assert (health.state, health.message) == ("draining", "")
    world.scheduler.pause("ann", finish=False)
    assert health.state == "draining", "draining ranks before paused"
    health.draining = False
    assert health.state == "paused"
    health.fail("no memory")
    assert (health.state, health.failed, health.failure) == ("stopped", "no memory", "the engine stopped: no memory")


def test_a_signal_is_named_by_the_end_that_the_supervisor_has_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept_files.engine_folder("abc123").mkdir(parents=True)
    assert _why_signalled("abc123") == "signal"
    kept_files.write_end("abc123", EngineEnd(wall=1.0, reason="SIGTERM received", clean=True))
    assert _why_signalled("abc123") == "signal"
    kept_files.write_end("abc123", EngineEnd(wall=2.0, reason="ray ended: its head is gone", clean=False))
    assert _why_signalled("abc123") == "ray ended: its head is gone"
