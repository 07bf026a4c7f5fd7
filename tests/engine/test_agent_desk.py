"""Questions to the agents of several nodes, and the clocks of those nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from engines import wait_until
from ppengine.gateway import agent_desk
from ppengine.gateway.agent_desk import AgentDesk
from ppengine.gateway.node_clocks import NodeClocks
from ppengine.protocol import frames
from ppengine.protocol.agent_messages import ClockAnswer, ClockQuestion, ToAgent
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import OpRecord, RingsDetail, StacksDetail, StageRings, StageStacks, ThreadRing

AHEAD_NS = 5_000_000_000_000
MS = 1_000_000


class Desk:
    """A desk and the agents of two nodes, `a` its own; stage 1 is on `b`."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # A context that is left with messages would block the garbage collection.
        self.context.setsockopt(zmq.LINGER, 0)
        router = self.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(f"ipc://{folder}/agent")
        self.nodes = ["a", "b"]
        self.desk = AgentDesk(router, "a", lambda stage: self.nodes[stage], lambda: self.nodes, NodeClocks())
        self.agents = {}
        for name in self.nodes:
            self.agents[name] = agent = self.context.socket(zmq.DEALER)
            agent.setsockopt(zmq.IDENTITY, name.encode())
            agent.connect(f"ipc://{folder}/agent")
        self.codec = frames.Codec(ToAgent)
        wait_until(lambda: self.desk.ask(Inspect(nonce=0, what="stacks")) == "", "an agent is there")
        wait_until(lambda: all(self.agents[name].poll(50) for name in self.nodes) or self.again(), "both are")
        for name in self.nodes:
            while self.agents[name].poll(50):
                self.agents[name].recv()

    def again(self) -> bool:
        self.desk.ask(Inspect(nonce=0, what="stacks"))
        return False

    def question(self, name: str) -> Inspect | ClockQuestion:
        assert self.agents[name].poll(3000), f"no question for {name}"
        question = self.codec.decode(self.agents[name].recv())
        assert isinstance(question, Inspect | ClockQuestion)
        return question

    def answer(self, name: str, message: msgspec.Struct) -> None:
        self.agents[name].send(frames.encode(message))

    def inspected(self, name: str, detail: msgspec.Struct) -> None:
        question = self.question(name)
        assert isinstance(question, Inspect)
        data = msgspec.Raw(frames.encode(detail))
        self.answer(name, Inspected(nonce=question.nonce, what=question.what, data=data))

    def answers(self) -> list[Inspected | Failed]:
        found: list[Inspected | Failed] = []
        wait_until(lambda: found.extend(self.desk.answers()) or found, "an answer", 20)
        return found

    def set_clock(self) -> None:
        self.desk.turn()
        question = self.question("b")
        assert isinstance(question, ClockQuestion)
        self.answer("b", ClockAnswer(nonce=question.nonce, mono_ns=time.monotonic_ns() + AHEAD_NS))
        wait_until(lambda: self.desk.answers() or self.desk.clocks.offset("b"), "the clock of b")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.context.destroy(linger=0)


def rings(stage: int, begun_ns: int | None, error: str = "") -> StageRings:
    records = [] if begun_ns is None else [OpRecord("forward", 1, -1, begun_ns, begun_ns + MS, 0, 1, 0)]
    threads = [] if begun_ns is None else [ThreadRing(ring="main", name="main", recorded=1, records=records)]
    return StageRings(stage=stage, rank=0, pid=None if begun_ns is None else 7, threads=threads, error=error)


def detail(*stages: StageRings) -> RingsDetail:
    return RingsDetail(mono_ns=0, wall=0.0, steps=8, stages=list(stages))


def test_a_question_about_a_stage_goes_to_its_node(desk: Desk) -> None:
    assert desk.desk.ask(Inspect(nonce=5, what="stacks", stage=1)) == ""
    desk.inspected("b", StacksDetail(stages=[StageStacks(stage=1, pid=9)], ability="yes"))
    (answer,) = desk.answers()
    assert isinstance(answer, Inspected) and answer.nonce == 5
    assert [each.pid for each in frames.decode_as(StacksDetail, bytes(answer.data)).stages] == [9]
    assert not desk.agents["a"].poll(50), "the other node is not asked"


def test_rings_of_two_nodes_become_one_answer_in_this_hosts_time(desk: Desk) -> None:
    desk.set_clock()
    now = time.monotonic_ns()
    assert desk.desk.ask(Inspect(nonce=6, what="rings")) == ""
    desk.inspected("a", detail(rings(0, now), rings(1, None, "it has no rings on this host")))
    desk.inspected("b", detail(rings(0, None, "it has no rings on this host"), rings(1, now + AHEAD_NS)))
    (answer,) = desk.answers()
    assert isinstance(answer, Inspected)
    found = frames.decode_as(RingsDetail, bytes(answer.data)).stages
    assert [(each.stage, each.node, each.error) for each in found] == [(0, "", ""), (1, "b", "")]
    record = found[1].threads[0].records[0]
    assert abs(record.begun_ns - now) < 1000 * MS
    assert (record.returned_ns - record.begun_ns, record.done_ns) == (MS, 0), "0 is no time and stays"
    assert found[1].clock_error_ms is not None and found[0].clock_error_ms is None


def test_rings_of_a_node_without_a_known_clock_are_left_out(desk: Desk) -> None:
    assert desk.desk.ask(Inspect(nonce=6, what="rings", stage=1)) == ""
    desk.inspected("b", detail(rings(1, 1)))
    (answer,) = desk.answers()
    assert isinstance(answer, Inspected)
    (found,) = frames.decode_as(RingsDetail, bytes(answer.data)).stages
    assert (found.threads, found.error) == ([], "the clock of b is not known yet")


def test_a_node_without_an_answer_does_not_hold_up_the_others(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_desk, "WAIT_S", 0.6)
    monkeypatch.setattr(agent_desk, "LATE_S", 0.2)
    desk.desk.ask(Inspect(nonce=7, what="stacks"))
    desk.inspected(
        "a", StacksDetail(stages=[StageStacks(stage=0, pid=3), StageStacks(stage=1, pid=None)], ability="yes")
    )
    (answer,) = desk.answers()
    assert isinstance(answer, Inspected)
    assert [each.pid for each in frames.decode_as(StacksDetail, bytes(answer.data)).stages] == [3, None]
    desk.desk.ask(Inspect(nonce=8, what="stacks", stage=1))
    (answer,) = desk.answers()
    assert isinstance(answer, Failed) and (answer.nonce, answer.text) == (8, "no answer from b")


def test_an_answer_that_comes_twice_counts_once(desk: Desk) -> None:
    assert desk.desk.ask(Inspect(nonce=5, what="stacks", stage=1)) == ""
    question = desk.question("b")
    for _ in range(3):
        desk.answer("b", Failed(nonce=question.nonce, code="FAILED", text="no"))
    time.sleep(0.2)
    assert [answer.nonce for answer in desk.desk.answers()] == [5]
    assert desk.desk.answers() == []


def test_an_absent_agent_is_an_obstacle_at_once(desk: Desk) -> None:
    desk.nodes = ["a", "gone"]
    assert desk.desk.ask(Inspect(nonce=9, what="stacks", stage=1)) == "the agent on gone cannot be asked now"


def test_answers_to_another_gateway_are_dropped(desk: Desk) -> None:
    desk.answer("a", Inspected(nonce=1, what="stacks", data=msgspec.Raw(b"\xc0")))
    time.sleep(0.1)
    assert desk.desk.answers() == []


def test_the_shortest_round_trip_counts_until_it_is_old() -> None:
    clocks = NodeClocks()

    def measure(nonce: int, sent_ns: int, trip_ns: int, ahead_ns: int) -> None:
        clocks.ask("b", nonce, sent_ns)
        clocks.take(nonce, sent_ns + trip_ns // 2 + ahead_ns, sent_ns + trip_ns)

    measure(1, 0, 2 * MS, 100 * MS)
    measure(2, 1000 * MS, 40 * MS, 90 * MS)
    known = clocks.offset("b")
    assert known is not None and (known.ns, known.error_ns) == (-100 * MS, MS)
    # Two clocks part by a tenth of a millisecond a second: after 200 s a trip of 40 ms is better than one of 2.
    measure(3, 200_000 * MS, 40 * MS, 95 * MS)
    known = clocks.offset("b")
    assert known is not None and known.ns == -95 * MS
    measure(4, 201_000 * MS, 80 * MS, -7_000_000 * MS)
    known = clocks.offset("b")
    assert known is not None and known.ns == 7_000_000 * MS, "the node was started again: its old clock is gone"
    clocks.take(99, 5, 6)
    assert clocks.offset("c") is None
