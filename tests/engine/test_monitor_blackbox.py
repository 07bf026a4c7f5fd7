"""The last steps of a stage, and what is kept of a fault."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import pytest
from ppengine.agent.last_steps import read_rings
from ppengine.common.ring import Gauge, Kind, RingWriter
from ppengine.gateway.fault_record import NONCE, STEPS, FaultRecorder
from ppengine.protocol import frames
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import RingsDetail, StacksDetail, StageStacks
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Verdict


@pytest.fixture
def files(tmp_path: Path) -> dict[str, tuple[Path, int]]:
    """Rings of a stage that has done 100 steps and hangs in the forward of step 101."""
    found = {}
    for name in ("send", "main"):
        path = tmp_path / f"s0.0.{name}.ring"
        with contextlib.closing(RingWriter(path, name, 0, 0, capacity=1024)) as ring:
            for step in range(1, 101):
                for kind in (Kind.STEP, Kind.FORWARD) if name == "main" else (Kind.SEND,):
                    ring.end(ring.begin(kind, step, size=4))
                if name == "main":
                    ring.end(ring.begin(Kind.IDLE))
            if name == "main":
                ring.begin(Kind.STEP, 101)
                ring.begin(Kind.FORWARD, 101, size=7)
                ring.gauge(Gauge.STEP_BEGUN, 101)
                ring.gauge(Gauge.STEP_FINISHED, 100)
        found[name] = path, path.stat().st_ino
    return found


def test_the_last_steps_of_every_thread(files):
    detail = read_rings({(0, 0): files}, [Place(0, 0), Place(1, 0)], 8)
    stage, other = detail.stages
    assert (stage.begun_step, stage.finished_step, stage.error) == (101, 100, "")
    main, send = stage.threads
    assert (main.ring, main.recorded, send.ring, send.recorded) == ("main", 302, "send", 100)
    assert sorted({record.step for record in main.records}) == [0, *range(94, 102)]
    assert {record.step for record in send.records} == set(range(94, 101))
    last = main.records[-1]
    assert (last.kind, last.step, last.size, last.done_ns) == ("forward", 101, 7, 0)
    assert all(record.begun_ns >= main.records[0].begun_ns for record in main.records)
    assert other.threads == [] and "no rings" in other.error


def test_more_steps_than_the_ring_holds(files):
    (stage,) = read_rings({(0, 0): files}, [Place(0, 0)], 10_000).stages
    assert {record.step for record in stage.threads[0].records} == set(range(102))


def test_records_that_a_full_ring_has_overwritten_are_not_torn(tmp_path):
    path = tmp_path / "s0.0.main.ring"
    with contextlib.closing(RingWriter(path, "main", 0, 0, capacity=64)) as ring:
        for step in range(1, 101):
            ring.end(ring.begin(Kind.STEP, step))
        (stage,) = read_rings({(0, 0): {"main": (path, 0)}}, [Place(0, 0)], 8).stages
    assert (stage.threads[0].recorded, stage.threads[0].torn) == (100, 0)


def test_a_ring_that_is_gone_is_told(files, tmp_path):
    (stage,) = read_rings({(0, 0): {**files, "swap": (tmp_path / "nothing", 1)}}, [Place(0, 0)], 4).stages
    assert "swap" in stage.error and len(stage.threads) == 2


def verdict(stage: int, cause: str = "self_stuck", *, root: bool = True) -> Verdict:
    return Verdict(stage=stage, cause=cause, summary=f"stage {stage} {cause}", since_s=2.0, root=root)


class Agent:
    """Takes questions; `why` is why it does not."""

    def __init__(self) -> None:
        self.asked: list[Inspect] = []
        self.why = ""

    def __call__(self, question: Inspect) -> str:
        self.asked.append(question)
        return self.why


def rings(mono_ns: int) -> Inspected:
    detail = RingsDetail(mono_ns=mono_ns, wall=1.0, steps=STEPS, stages=[])
    return Inspected(nonce=NONCE, what="rings", data=msgspec.Raw(frames.encode(detail)))


def stacks(*stages: int, text: str = "x") -> StacksDetail:
    return StacksDetail(stages=[StageStacks(stage=stage, pid=stage, text=text) for stage in stages])


def test_a_fault_is_kept_once_and_stays_until_the_next():
    agent = Agent()
    box = FaultRecorder(agent)
    box.look([verdict(0, "starved", root=False)], [], [3, 3])
    assert box.kept is None and not agent.asked
    box.look([verdict(1, "undetermined"), verdict(0, "starved", root=False)], [], [3, 2])
    assert [(question.what, question.lines, question.nonce) for question in agent.asked] == [("rings", STEPS, NONCE)]
    box.take(rings(7))
    box.take_stacks(stacks(1))
    box.take_stacks(stacks(0, 1, text="later"))
    box.look([verdict(1)], [], [9, 9])
    assert len(agent.asked) == 1, "the same stage: the same fault, of which more is known"
    kept = box.kept
    assert (kept.number, kept.verdict.cause, kept.retired, kept.rings.mono_ns) == (1, "self_stuck", [3, 2], 7)
    assert [(each.stage, each.text) for each in kept.stacks.stages] == [(0, "later"), (1, "x")]
    box.look([], [], [9, 9])
    assert box.kept.over_wall is not None
    box.take_stacks(stacks(2))
    assert len(box.kept.stacks.stages) == 2, "what comes after the end is not of this fault"
    box.look([verdict(0)], [], [9, 9])
    assert (box.kept.number, box.kept.rings, box.kept.stacks, len(agent.asked)) == (2, None, None, 2)


def test_what_comes_while_a_fault_stands_does_not_take_its_record():
    agent = Agent()
    box = FaultRecorder(agent)
    box.look([verdict(1)], [], [3, 3])
    box.take(rings(7))
    box.look([verdict(0, "dead"), verdict(1)], [], [4, 4])
    box.look([verdict(1)], [], [4, 4])
    assert (box.kept.number, box.kept.verdict.stage, box.kept.rings.mono_ns, len(agent.asked)) == (1, 1, 7, 1)
    box.look([verdict(0, "dead"), verdict(1)], [], [5, 5])
    box.look([verdict(0, "dead")], [], [6, 6])
    assert (box.kept.number, box.kept.verdict.stage, len(agent.asked)) == (2, 0, 2), "it still stands: its turn"
    box.look([], [], [7, 7])
    assert box.kept.over_wall is not None and box.kept.number == 2


@pytest.mark.parametrize(
    ("causes", "kept"),
    [
        (("stopped", "straggler"), ["stopped", "straggler"]), (("self_stuck", "dead"), ["self_stuck", "dead"]),
        (("dead", "killed_oom"), ["killed_oom"]), (("undetermined", "self_stuck", "gil_held"), ["gil_held"]),
        (("straggler", "stopped", "straggler"), ["straggler", "stopped", "straggler"]),
    ],
)  # fmt: skip
def test_a_later_fault_of_a_place_has_a_record_of_its_own(causes, kept):
    agent, faults = Agent(), []
    box = FaultRecorder(agent)
    for cause in causes:
        box.look([verdict(1, cause)], [], [3, 3])
        if not any(fault is box.kept for fault in faults):
            faults.append(box.kept)
        box.look([verdict(1, cause)], [], [3, 3])
    assert [fault.verdict.cause for fault in faults] == kept
    assert [fault.over_wall is None for fault in faults] == [False] * (len(kept) - 1) + [True]
    assert [fault.number for fault in faults] == [*range(1, len(kept) + 1)] and len(agent.asked) == len(kept)


def test_what_could_not_be_kept_is_told():
    agent = Agent()
    agent.why = "the agent has not reported yet"
    box = FaultRecorder(agent)
    box.look([verdict(0)], [], [])
    box.take(Failed(nonce=NONCE, code="FAILED", text="no answer"))
    assert box.kept.missing == ["rings: the agent has not reported yet", "rings: no answer"]


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_fault_is_as_long_as_it_was_if_the_clock_is_set(monkeypatch, jump):
    box = FaultRecorder(Agent())
    box.look([verdict(1)], [], [3, 3])
    begun, now = time.monotonic(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    box.look([], [], [9, 9])
    assert 0.0 <= box.kept.over_wall - box.kept.wall <= time.monotonic() - begun + 0.1
