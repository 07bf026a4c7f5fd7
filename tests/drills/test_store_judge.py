"""How the soak of KV tiers judges alarms."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ppengine.protocol.snapshot import Verdict
from store_judge import Alarms
from store_soak import FAULTS
from watching import Seen

STOPPED = "the store of stage {0} is stopped by a signal (state T); it owes 1 jobs, the oldest for 0.6s"


def seen(summary: str, cause: str = "store", stage: int | None = None) -> Seen:
    """Return a snapshot with one root verdict."""
    verdict = Verdict(stage=stage, cause=cause, summary=summary, since_s=1.0, evidence=[], suggest="", root=True)  # type: ignore[arg-type]
    return Seen(time.monotonic(), ((stage, cause),), (verdict,))


def judged(kind: str, stage: int, *summaries: str) -> Alarms:
    """Return the judge after a fault of a store, and the verdicts that it raised."""
    watcher: Any = SimpleNamespace(changes=[])
    alarms, (owed, may) = Alarms(watcher), FAULTS[kind]
    alarms.begin(f"store@None: (?:{may.format(stage)})")
    watcher.changes += map(seen, summaries)
    alarms.end(kind, owed=owed)
    return alarms


@pytest.mark.parametrize(
    ("kind", "summary", "right"),
    [
        ("store-stop", STOPPED.format(1), True),
        ("store-stop", STOPPED.format(0), False),
        ("store-stop", "backend disk is slow: a job waits 1.6s at the store of stage 1", True),
        ("store-stop", "backend disk is slow: a job waits 1.6s at the store of stage 0", False),
        ("store-stop", "backend disk gave 2 corrupt shards", False),
        ("store-flip", "backend disk gave 2 corrupt shards", True),
        ("store-full", "backend small is broken: no space", False),
        ("store-full", "backend disk is broken: no space", True),
        ("store-full", "backend disk fails: no space", True),
        ("store-full", "backend disk fails writes, and is read on: no space", True),
    ],
)
def test_cause_and_place(kind: str, summary: str, right: bool) -> None:
    alarms = judged(kind, 1, summary)
    assert (not alarms.false) == right
    assert (not alarms.silent) == right, "a false alarm names no fault"


def test_a_fault_that_is_not_named_is_a_problem_if_an_alarm_is_owed() -> None:
    assert judged("store-stop", 0).silent
    assert not judged("store-kill", 0).silent


def test_an_alarm_after_the_fault_is_false() -> None:
    watcher: Any = SimpleNamespace(changes=[])
    alarms = Alarms(watcher)
    alarms.begin("dead@1: ")
    watcher.changes.append(seen("stage 1 was killed", "dead", 1))
    alarms.end("stage killed", owed=True)
    assert not alarms.false
    assert alarms.row("stage killed").startswith("named 1")
    watcher.changes.append(seen("stage 1 was killed", "dead", 1))
    alarms.judge()
    assert len(alarms.false) == 1
