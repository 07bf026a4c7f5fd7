"""Edges between two nodes: sides reported by two agents with clocks of their own, compared by the gateway."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from monitor_helpers import make_config, record, remove, sample
from ppengine.agent.agent import Sampler
from ppengine.agent.far_edges import MOST, FarEdges
from ppengine.common.cluster import Cluster
from ppengine.common.edge_messages import MessageTrack
from ppengine.common.ring import Kind, RingWriter
from ppengine.diagnosis.process_history import Sighting
from ppengine.gateway.far_links import FarLinks
from ppengine.gateway.node_clocks import NodeClocks
from ppengine.protocol.stage_samples import AgentReport, EdgeSample

SECOND = 1_000_000_000
SHIFT_S = {"here": 0, "east": 1000, "west": -300}
"""So far the clock of each node is ahead of the gateway's host."""


class Stage:
    """A stage on a node, as the agent there reads it: the part of a `StageWatch` that edges need."""

    def __init__(self, stage, node, kind, peer):
        self.stage, self.rank, self.node, self.kind, self.peer = stage, 0, node, kind, peer
        self.waited_ns, self.throttled_us, self.held_ns, self.generation = 0, 0, 0, 1
        self.track, self.far = MessageTrack(), FarEdges()

    def messages(self, ring):
        return self.track if ring == self.kind.name.lower() else None

    def write(self, number, begin_ms, end_ms=0.0, **more):
        """Write a message at these times of the gateway's host."""
        ahead_ms = SHIFT_S[self.node] * 1e3
        fields = {"step": number, "size": 2048, "code": 5, "detail": number} | more
        row = record(
            number, self.kind, begin_ms + ahead_ms, end_ms + ahead_ms if end_ms else 0.0, peer=self.peer, **fields
        )
        self.track.feed([row._replace(generation=self.generation)])

    def report(self):
        edge = EdgeSample(kind=self.kind.name.lower(), peer=self.peer, generation=self.generation)
        report = AgentReport(
            mono_ns=0, node=self.node, stages=[sample(self.stage, edges=[edge])], held_ns=self.held_ns,
            far_edges=self.far.look({(self.stage, 0): self}),
        )  # fmt: skip
        return msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=AgentReport)


class World:
    """Stage 0 sends to stage 1, from node to node; `error_ms` is that of each measured clock."""

    def __init__(self, nodes=("here", "east"), error_ms=1.0, wrong_ms=0.0):
        self.clocks, self.sightings, self.now_ns, self.number = NodeClocks(), {}, SECOND // 2, 0
        self.links = FarLinks("here", self.clocks, self.sightings)
        self.sender, self.receiver = Stage(0, nodes[0], Kind.SEND, 1), Stage(1, nodes[1], Kind.RECEIVE, 0)
        self.measure(error_ms, wrong_ms)

    def measure(self, error_ms, wrong_ms=0.0):
        """Ask both clocks: the round trip is twice the error, and the answer is as wrong as it can be."""
        for nonce, node in enumerate(SHIFT_S):
            error_ns = int(error_ms * 1e6)
            self.clocks.ask(node, nonce, self.now_ns - 2 * error_ns)
            theirs_ns = self.now_ns - error_ns + SHIFT_S[node] * SECOND + int(wrong_ms * 1e6)
            self.clocks.take(nonce, theirs_ns, self.now_ns)

    def take(self, *stages):
        for stage in stages:
            report = stage.report()
            self.sightings[stage.stage, 0] = Sighting(report.stages[0], self.now_ns, node=stage.node)
            self.links.take(report, self.now_ns)

    def edge(self):
        """The sender's edge as the diagnosis gets it."""
        return self.sightings[0, 0].sample.edges[0]

    def run(self, ms, messages=20, size=2048, late_ms=-10.0, sender_reports=True):
        """Let a second pass, with a report of each node every quarter of it; return the pace at its end.

        The receiver posts a message `late_ms` after it was sent, usually before.
        """
        for _quarter in range(4):
            for index in range(messages // 4):
                self.number += 1
                at = self.now_ns / 1e6 + index * 250 / (messages / 4)
                self.sender.write(self.number, at, at + 0.01, size=size)
                self.receiver.write(self.number, at + late_ms, at + max(late_ms, 0.0) + ms, size=size)
            self.now_ns += SECOND // 4
            self.take(self.receiver, *[self.sender] * sender_reports)
        return self.edge().pace


def learned(ms=2.0, seconds=5, messages=20, **more):
    world = World(**more)
    assert [world.run(ms, messages) for _ in range(seconds)] == [None] * seconds
    return world


@pytest.mark.parametrize("nodes", [("here", "east"), ("east", "here"), ("east", "west")])
def test_slow_link_between_clocks_far_apart(nodes):
    world = learned(nodes=nodes)
    seen = [world.run(40.0) for _ in range(4)]
    assert seen[-1].slow_ms == pytest.approx(4000.0, abs=1001.0), "each second counts, from when it is over"
    ends = sum(node != "here" for node in nodes)
    assert seen[-1].rate == pytest.approx(2048 / (0.040 - ends * 0.001), rel=0.05), "at most"
    least, most = 2048 / (0.002 + ends * 0.002), 2048 / (0.002 + ends * 0.001)
    assert least < seen[-1].usual_rate < most, "at least, with a drift of the clocks"
    assert world.run(2.0) is None or world.run(2.0) is None, "it heals"


def test_unknown_clock_says_nothing():
    world = World()
    world.links = FarLinks("here", NodeClocks(), world.sightings)
    assert [world.run(ms) for ms in (2.0, 2.0, 2.0, 40.0, 40.0, 40.0)] == [None] * 6


def test_error_of_the_clocks_as_large_as_the_messages_says_nothing():
    world = learned(error_ms=20.0)
    assert [world.run(40.0) for _ in range(5)] == [None] * 5, "20 ms of 40 ms may be the clock's"


def test_offset_that_becomes_wrong_within_its_error_says_nothing():
    world = learned(nodes=("east", "here"), messages=80)
    # After a minute the old answer has an error of 7 ms by drift, so one with that error is as good; it is all wrong.
    world.now_ns += 60 * SECOND
    world.measure(6.9, wrong_ms=6.9)
    assert [world.run(2.0, messages=80) for _ in range(6)] == [None] * 6, "messages seem to take 9 ms"


def test_late_receiver_host_and_pauses_excuse_a_slow_second():
    world = learned()
    assert [world.run(2.0, late_ms=40.0) for _ in range(4)] == [None] * 4, "the receiver posts late"
    for excuse in ("waited_ns", "throttled_us", "held_ns"):
        world = learned()
        grows = {"waited_ns": int(0.9 * SECOND), "throttled_us": 60_000, "held_ns": 1_000_000}[excuse]
        for _ in range(4):
            setattr(world.receiver, excuse, getattr(world.receiver, excuse) + grows)
            assert world.run(40.0) is None, excuse


def test_excuses_of_a_second_last_until_a_late_report_of_its_messages():
    """The sender's node reports late, as over a slow network, and the receiver waits for a core all the time."""
    world = learned()
    for second in range(9):
        world.receiver.waited_ns += int(0.9 * SECOND)
        assert world.run(40.0, sender_reports=second % 3 == 2) is None
    assert [world.run(40.0, sender_reports=second % 3 == 2) for second in range(6)][-1].lost < 0.9, "no excuse is left"


def test_conflict_is_found_once_both_sides_are_known():
    world = World()
    world.sender.write(1, 1.0, 2.0)
    world.receiver.write(1, 1.0, size=64)
    world.take(world.sender)
    assert world.edge().conflict is None
    world.now_ns += 5_000_000
    world.take(world.receiver)
    sent, posted = world.edge().conflict
    assert (sent.size, sent.state, posted.size, posted.state) == (2048, 2, 64, 0)
    age_ms = world.now_ns / 1e6 - 1.0
    assert (sent.age_ms, posted.age_ms) == (pytest.approx(age_ms, abs=1.1), pytest.approx(age_ms, abs=1.1))
    world.take(world.sender)
    assert world.edge().conflict is not None, "it lasts in newer samples"


def test_message_left_out_is_a_conflict_and_a_lost_report_is_none():
    world = World()
    for number in range(1, 31):
        world.receiver.write(number, number, number + 1.0)
        if number != 25:
            world.sender.write(number, number, number + 1.0)
        if number == 10:
            world.sender.report()  # It never arrives.
        elif number % 5 == 0 and number <= 20:
            world.take(world.sender, world.receiver)
            assert world.edge().conflict is None
    world.take(world.sender, world.receiver)
    sent, posted = world.edge().conflict
    assert sent is None and posted.number == 25


def test_message_is_reported_once_and_again_when_it_is_done():
    stage = Stage(0, "here", Kind.SEND, 1)
    stage.write(1, 1.0, 2.0)
    stage.write(2, 3.0)
    assert [[m.number for m in stage.report().far_edges[0].messages] for _ in range(2)] == [[1, 2], []]
    stage.write(2, 3.0, 4.0)
    stage.write(3, 4.0)
    (edge,) = stage.report().far_edges
    assert [(m.number, bool(m.done_ns)) for m in edge.messages] == [(2, True), (3, False)] and edge.after == 2
    assert stage.far.look({(0, 0): stage, (1, 0): stage}) == [], "both ends are here"


def test_only_agents_of_engines_with_several_nodes_report_sides():
    config = make_config(2)
    try:
        ring = RingWriter(Path(config.ring_dir) / "s0.0.main.ring", "main", 0, 0)
        sends = RingWriter(Path(config.ring_dir) / "s0.0.send.ring", "send", 0, 0)
        sends.begin(Kind.SEND, 1, peer=1, size=64, detail=1, done_ns=1)
        assert Sampler(config).look().far_edges == []
        several = msgspec.structs.replace(config, cluster=Cluster("127.0.0.1", {}))
        (edge,) = Sampler(several).look().far_edges
        assert (edge.stage, edge.kind, edge.peer, len(edge.messages)) == (0, "send", 1, 1)
        ring.close()
        sends.close()
    finally:
        remove(config)


def test_report_is_bounded_and_says_what_it_leaves_out():
    stage = Stage(0, "here", Kind.SEND, 1)
    for number in range(1, MOST + 51):
        stage.write(number, number, number + 0.5)
    (edge,) = stage.report().far_edges
    assert edge.after == 50 and [m.number for m in edge.messages] == [*range(51, MOST + 51)]
    world = World()
    world.sender = stage
    for number in range(1, MOST + 51):
        world.receiver.write(number, number, number + 0.5)
    stage.far = FarEdges()
    world.take(stage, world.receiver)
    assert world.edge().conflict is None


def test_stage_that_moved_is_not_compared_with_its_past():
    world = learned()
    world.receiver.node = "west"
    world.receiver.far, world.receiver.track = FarEdges(), MessageTrack()
    world.sender.track, world.sender.generation, world.receiver.generation, world.number = MessageTrack(), 2, 2, 0
    assert [world.run(40.0) for _ in range(5)] == [None] * 5, "another link, with times of its own"
