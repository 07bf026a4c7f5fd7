"""The gateway's side of faults: what becomes of a command whose stage does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from ppengine.common.groups import Groups
from ppengine.drills.fault_desk import FaultDesk
from ppengine.protocol.control import Accepted, Command, Outcome
from ppengine.protocol.verbs import ClearFaults, Fault

FIRST, NEW = 100, 200


@pytest.fixture
def silent() -> Any:
    """A desk and the stage behind it, which takes what it is told and never answers; `pids` can be changed."""
    context: Any = zmq.Context()
    pids = {0: FIRST, 1: FIRST + 1}
    endpoint = "inproc://{}".format
    config: Any = SimpleNamespace(endpoint=endpoint, stages=2, groups=Groups(2), listen_for_nodes=lambda *_: None)
    desk = FaultDesk(config, context, lambda on, stage, rank: pids[stage])
    stage = context.socket(zmq.DEALER)
    stage.setsockopt(zmq.IDENTITY, b"f0")
    stage.connect("inproc://faults")
    yield SimpleNamespace(desk=desk, pids=pids, stage=stage)
    stage.close(0)
    desk.close()
    context.term()


def begin(desk: FaultDesk) -> None:
    (answer,) = desk.begin(Command(id="0" * 8, epoch="e", by="eve", verb=Fault(kind="foreign-device", stage=0)))
    assert isinstance(answer, Accepted)


def test_a_stage_that_dies_of_a_fault_before_it_answers_was_struck(silent: Any) -> None:
    begin(silent.desk)
    assert silent.desk.expire(0.0) == []
    silent.pids[0] = NEW
    (end,) = silent.desk.expire(0.0)
    assert isinstance(end, Outcome)
    assert (end.state, end.text) == ("applied", "foreign-device at stage 0: its process ended before it answered")
    assert silent.desk.expire(1e18) == [], "a command ends once"
    assert silent.desk.listing().on == []
    (answer,) = silent.desk.begin(Command(id="1" * 8, epoch="e", by="eve", verb=ClearFaults()))
    assert isinstance(answer, Outcome) and answer.state == "applied"


def test_a_stage_that_lives_and_does_not_answer_in_time_was_not(silent: Any) -> None:
    begin(silent.desk)
    (end,) = silent.desk.expire(1e18)
    assert isinstance(end, Outcome)
    assert (end.state, end.text) == ("failed", "the fault thread of stage 0 gave no answer")
