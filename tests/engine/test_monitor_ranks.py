"""The gateway with several ranks a stage: pictures, events, processes, stacks and the record of a fault by place."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from monitor_helpers import core_report, make_config, processes, remove, sample, stage_process, until, view
from ppengine.common.config import EngineConfig
from ppengine.common.procfs import read_stat
from ppengine.gateway.agent_desk import _stacks
from ppengine.gateway.collector import Collector
from ppengine.gateway.continue_stage import continue_stage
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.fault_record import FaultRecorder
from ppengine.gateway.stack_probe import StackProbe
from ppengine.protocol.control import Command, Inspect, Outcome
from ppengine.protocol.discovery import process_start
from ppengine.protocol.inspection import StacksDetail, StageStacks
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Cause, Event, Verdict
from ppengine.protocol.stage_info import Waiting
from ppengine.protocol.stage_samples import AgentReport
from ppengine.protocol.verbs import Continue

PLACES = [Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1)]
ANY: Any = {}


@pytest.fixture
def config() -> Iterator[EngineConfig]:
    made = make_config()
    parallel = msgspec.structs.replace(made.profile.parallel, tensor=2)
    profile = msgspec.structs.replace(made.profile, parallel=parallel)
    yield msgspec.structs.replace(made, profile=profile)
    remove(made)


def pid(place: Place) -> int:
    return 1000 + 10 * place.stage + place.rank


class World:
    """A collector with the reports of all places; the samples may differ by place."""

    def __init__(self, config: EngineConfig) -> None:
        self.from_ns = time.monotonic_ns() - 2_600_000_000
        """Samples that are older than two seconds do not count."""
        self.events: list[Event] = []
        self.collector = Collector(config, EventLog(self.events.append))
        stages = [view(each.stage, rank=each.rank, pid=pid(each), retired_step=7 + each.rank) for each in PLACES]
        self.collector.take(core_report(config, stages=stages))
        listed = [stage_process(each.stage, rank=each.rank, pid=pid(each)) for each in PLACES]
        self.collector.take(processes(*listed))

    def look(self, second: float, changes: dict[Place, dict[str, Any]] = ANY) -> None:
        seen = [sample(p.stage, rank=p.rank, pid=pid(p), **changes.get(p, {})) for p in PLACES]
        self.collector.take(
            AgentReport(mono_ns=self.from_ns + int(second * 1e9), node=self.collector.node, stages=seen)
        )
        self.collector.judge(stopping=False)


def test_a_picture_has_all_ranks_with_their_waits(config: EngineConfig) -> None:
    world = World(config)
    waits = Waiting(stage=1, rank=0, what="collective", since_ms=40.0)
    joins = {"op": "all_reduce", "op_step": 8, "op_peer": 0, "waiting_on": waits, "rank_wait": 0.4}
    world.look(1.0, {Place(1, 1): joins})
    shown = {(each.index, each.tensor_rank): each for each in world.collector.snapshot(0).stages}
    assert list(shown) == PLACES and [each.pid for each in shown.values()] == list(map(pid, PLACES))
    waiting = shown[1, 1]
    assert (waiting.state, waiting.op, waiting.rank_wait) == ("gathering", "all_reduce<0 m8", 0.4)
    assert waiting.waiting_on is not None and waiting.waiting_on.rank == 0
    assert shown[1, 0].rank_wait is None and world.collector.retired() == [7, 8, 7, 8]
    assert set(world.collector.pids()) >= set(PLACES)


def test_a_stop_of_one_rank_is_a_state_and_an_event_of_that_rank(config: EngineConfig) -> None:
    world = World(config)
    world.look(1.0)
    world.look(2.0, {Place(1, 1): {"process_state": "T"}})
    world.look(2.3, {Place(1, 1): {"process_state": "T"}})
    states = [each.state for each in world.collector.snapshot(0).stages]
    assert states == ["idle", "idle", "idle", "stopped"]
    (verdict,) = world.collector.verdicts
    assert (verdict.stage, verdict.rank, verdict.cause) == (1, 1, "stopped")
    world.look(2.6)
    told = [event.text for event in world.events if event.kind.startswith("stage.")]
    name = f"stage 1 rank 1 (pid {pid(Place(1, 1))})"
    assert told == [f"{name} is stopped", f"{name} is continued, now idle"]


def test_a_rank_that_has_ended_is_dead_and_its_peers_are_not(config: EngineConfig) -> None:
    world = World(config)
    world.look(1.0)
    listed = [stage_process(each.stage, rank=each.rank, pid=pid(each)) for each in PLACES[1:]]
    world.collector.take(processes(stage_process(0, pid=1000, exit_code=-9, detail="killed by SIGKILL"), *listed))
    world.collector.judge(stopping=False)
    assert [each.state for each in world.collector.snapshot(0).stages] == ["dead", "idle", "idle", "idle"]
    assert "stage 0 rank 0 (pid 1000) is dead: killed by SIGKILL" in [event.text for event in world.events]


def test_continue_reaches_the_ranks_that_are_stopped() -> None:
    command = Command(id="1", epoch="e", by="eve", verb=Continue(stage=1))
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        found = {f"stage 1 rank {rank}": (one.pid, process_start(one.pid) or 0) for rank, one in enumerate(ranks)}
        os.kill(ranks[1].pid, signal.SIGSTOP)
        until(lambda: state(ranks[1].pid) == "T")
        planned = list(continue_stage(msgspec.structs.replace(command, dry_run=True), "g", 1, found))
        assert isinstance(planned[0], Outcome) and planned[0].plan == [
            f"send SIGCONT to pid {ranks[1].pid} of stage 1 rank 1"
        ]
        *_, done = continue_stage(command, "g", 1, found)
        assert isinstance(done, Outcome) and done.text == f"sent SIGCONT to stage 1 rank 1 (pid {ranks[1].pid})"
        until(lambda: state(ranks[1].pid) == "S")
        *_, done = continue_stage(command, "g", 1, found)
        assert isinstance(done, Outcome) and "stage 1 rank 0" in done.text and "stage 1 rank 1" in done.text
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def state(of: int) -> str:
    stat = read_stat(of)
    return "" if stat is None else stat.state


def verdict(cause: Cause, rank: int | None = 1) -> Verdict:
    return Verdict(stage=1, rank=rank, cause=cause, summary="x", since_s=1.0)


def test_stacks_are_requested_once_a_stage_and_kept_by_process() -> None:
    asked: list[Inspect] = []
    probe = StackProbe(lambda question: asked.append(question) or "")  # type: ignore[func-returns-value]
    pids = {each: pid(each) for each in PLACES}
    probe.look([verdict("self_stuck")], pids)
    probe.look([verdict("self_stuck")], pids)
    assert [question.stage for question in asked] == [1]
    probe.look([], pids)
    probe.look([verdict("self_stuck", None)], pids)
    assert [question.stage for question in asked] == [1, 1], "the answer has all ranks"
    probe.look([verdict("deadlock")], pids)
    assert [question.stage for question in asked] == [1, 1, 0]


def test_answers_of_two_nodes_keep_each_rank() -> None:
    def stacks(rank: int, of: int | None) -> StageStacks:
        return StageStacks(stage=1, rank=rank, pid=of)

    merged = _stacks([StacksDetail(stages=[stacks(0, None), stacks(1, 5)]), StacksDetail(stages=[stacks(0, 4)])])
    assert [(each.rank, each.pid) for each in merged.stages] == [(0, 4), (1, 5)]


def test_a_second_rank_is_another_fault_and_its_stacks_are_kept_beside_the_first() -> None:
    box = FaultRecorder(lambda question: "")
    box.look([verdict("self_stuck", 0)], [], [])
    box.look([verdict("self_stuck", 0), verdict("dead", 1)], [], [])
    assert box.kept is not None and (box.kept.number, box.kept.verdict.rank) == (1, 0)
    both = StacksDetail(stages=[StageStacks(stage=1, rank=rank, pid=5 + rank) for rank in (1, 0)])
    box.take_stacks(both)
    assert box.kept.stacks is not None and [each.rank for each in box.kept.stacks.stages] == [0, 1]
    box.look([], [], [])
    box.look([verdict("dead", 1)], [], [])
    assert (box.kept.number, box.kept.verdict.rank) == (2, 1)
