"""The gateway's side of faults: what becomes of a command whose stage does not answer."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from ppengine.common.groups import Groups
from ppengine.drills.fault_desk import FaultDesk
from ppengine.drills.fault_messages import ToFaults
from ppengine.drills.fault_points import CoreParts, Points, StageParts
from ppengine.drills.stage_faults import FaultThread
from ppengine.protocol.control import Accepted, Command, Outcome
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.verbs import ClearFaults, Fault
from tier_world import TierWorld

FIRST, NEW = 100, 200
NUMBERS = itertools.count()
"""Ids of commands."""


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


@pytest.mark.parametrize("begun", [False, True], ids=["stopped before it", "behind it"])
def test_a_fault_of_a_failed_command_is_taken_back(silent: Any, begun: bool) -> None:
    """The stage was stopped, or its answer came too late: nothing of the fault is on when it goes on."""
    points, parts = Points(), StageParts(0, 2, ring=cast(Any, None), control=threading.current_thread())
    thread = FaultThread(cast(Any, None), cast(Any, None), points, parts)
    for kind in ("sleep-in-forward", "python-loop"):
        (answer,) = silent.desk.begin(
            Command(id=f"{next(NUMBERS):08}", epoch="e", by="eve", verb=Fault(kind=kind, stage=0))
        )
        assert isinstance(answer, Accepted)
        if kind == "sleep-in-forward":  # This one is on.
            (done,) = thread._serve(Codec(ToFaults), received(silent.stage, 1))
            assert not done.error
            silent.stage.send(encode(done))
            assert silent.desk.socket.poll(1000) and silent.desk.answers()
    messages = received(silent.stage, 1)
    if begun:
        assert len(list(thread._serve(Codec(ToFaults), messages))) == 1
        messages = []
        assert points._at["forward"].kind.name == "python-loop"
    (end,) = silent.desk.expire(1e18)
    assert isinstance(end, Outcome) and end.state == "failed"
    list(thread._serve(Codec(ToFaults), messages + received(silent.stage, 1)))
    assert [entry.kind.name for entry in thread._on] == ["sleep-in-forward"]
    assert not any(fault.kind.name == "python-loop" for fault in points._at.values())
    assert silent.desk.listing().on == ["sleep-in-forward at stage 0"]


def received(stage: Any, count: int) -> list[bytes]:
    """Return the next messages for a stage."""
    assert stage.poll(1000)
    return [stage.recv() for _ in range(count)]


def test_faults_of_the_core_begin_and_end_in_its_own_thread() -> None:
    context: Any = zmq.Context()
    config: Any = SimpleNamespace(
        endpoint="inproc://{}".format, stages=2, groups=Groups(2), listen_for_nodes=lambda *_: None,
        connect=lambda socket, name: socket.connect(f"inproc://{name}"),
    )  # fmt: skip
    desk = FaultDesk(config, context, lambda on, stage, rank: FIRST)
    engine = TierWorld().engine
    thread = FaultThread(context, config, Points(), CoreParts(engine, None))
    thread.start()
    try:
        assert ended(desk, Fault(kind="lookup-in-step")) == ("applied", "lookup-in-step at the core is on")
        assert desk.listing().on == ["lookup-in-step at core"]
        assert "consider" in vars(engine.tiers.finder)
        assert ended(desk, Fault(kind="lookup-in-step")) == ("failed", "the fault is on")
        assert ended(desk, ClearFaults()) == ("applied", "cleared lookup-in-step at core")
        assert "consider" not in vars(engine.tiers.finder)
    finally:
        thread.close()
        desk.close()
        context.term()


def ended(desk: FaultDesk, verb: Fault | ClearFaults) -> tuple[str, str]:
    """Return state and text of a command's end, once its thread is there."""
    for _ in range(3000):
        (answer,) = desk.begin(Command(id=f"{next(NUMBERS):08}", epoch="e", by="eve", verb=verb))
        if isinstance(answer, Accepted):
            while not (ends := desk.answers()):
                desk.socket.poll(1000)
            answer = ends[0]
        assert isinstance(answer, Outcome)
        if "cannot be reached" not in answer.text:
            return answer.state, answer.text
        time.sleep(0.01)
    raise AssertionError("the fault thread has not come")
