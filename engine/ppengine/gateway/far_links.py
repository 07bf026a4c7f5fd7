"""Edges between two nodes: each agent reports its side, and both are compared here, in the time of this host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ppengine.common.edge_comparison import EdgeComparison, Excuses
from ppengine.common.edge_messages import MessageTrack
from ppengine.common.ring import Kind, Row
from ppengine.diagnosis.evidence import Key
from ppengine.diagnosis.process_history import Sighting
from ppengine.gateway.node_clocks import NodeClocks, Offset
from ppengine.protocol.stage_samples import AgentReport, FarEdge, FarMessage

_KINDS = {"send": Kind.SEND, "receive": Kind.RECEIVE}
_OWN = Offset(0, 0, 0)


@dataclass
class _End:
    """One side of an edge, as the agent of its node reports it."""

    node: str
    track: MessageTrack = field(default_factory=MessageTrack)
    error_ns: int = 0
    """Largest error of the times of its newest messages."""
    waited_ns: int = 0
    throttled_us: int = 0


class FarLinks:
    """Compares both sides of each edge between nodes. Call `take` with each report, once its stages are in `sightings`.

    `here`: the engine's own node, whose clock is this host's.
    """

    def __init__(self, here: str, clocks: NodeClocks, sightings: Mapping[Key, Sighting]) -> None:
        self._here, self._clocks, self._sightings = here, clocks, sightings
        self._comparisons: defaultdict[int, EdgeComparison] = defaultdict(EdgeComparison)
        """By rank: edges connect equal ranks."""
        self._ends: dict[tuple[Kind, Key, int], _End] = {}
        """By kind, stage and peer."""
        self._held_ns: dict[str, int] = {}

    def take(self, report: AgentReport, now_ns: int) -> None:
        """Take the messages of a node, and enter conflict and pace into the samples of their senders."""
        if not report.far_edges:
            return
        self._held_ns[report.node] = report.held_ns
        for edge in report.far_edges:
            self._take_edge(report.node, edge, now_ns)
        for edge in report.far_edges:
            if edge.kind == "send":
                self._compare((edge.stage, edge.rank), edge.peer, now_ns)
            else:
                self._compare((edge.peer, edge.rank), edge.stage, now_ns)

    def _take_edge(self, node: str, edge: FarEdge, now_ns: int) -> None:
        offset = _OWN._replace(at_ns=now_ns) if node == self._here else self._clocks.offset(node)
        if offset is None:
            return
        kind, key = _KINDS[edge.kind], (edge.stage, edge.rank)
        end = self._ends.get((kind, key, edge.peer))
        if end is None or end.node != node:
            end = self._ends[kind, key, edge.peer] = _End(node)
            ends = (edge.stage, edge.peer) if kind is Kind.SEND else (edge.peer, edge.stage)
            self._comparisons[edge.rank].forget(ends)
        end.error_ns, end.waited_ns, end.throttled_us = int(offset.error_at(now_ns)), edge.waited_ns, edge.throttled_us
        generation, known = end.track.edge(kind, edge.peer)
        if generation == edge.generation and next(reversed(known), 0) != edge.after:
            # A report was lost. To the comparison, a hole is a message that was never sent.
            end.track.forget(kind, edge.peer)
            known = {}
        same = generation == edge.generation
        end.track.feed(
            _row(kind, edge, message, offset.ns)
            for message in edge.messages
            if message.number > edge.after or (same and message.number in known)
        )

    def _compare(self, sender: Key, peer: int, now_ns: int) -> None:
        receiver = peer, sender[1]
        sent = self._ends.get((Kind.SEND, sender, peer))
        posted = self._ends.get((Kind.RECEIVE, receiver, sender[0]))
        if sent is None or posted is None or not (self._is_there(sender, sent) and self._is_there(receiver, posted)):
            return
        excuses = Excuses(
            waited_ns=posted.waited_ns,
            throttled_us=sent.throttled_us + posted.throttled_us,
            paused_ns=self._held_ns[sent.node] + self._held_ns[posted.node],
            error_ns=sent.error_ns + posted.error_ns,
        )
        comparison = self._comparisons[sender[1]]
        found = comparison.look(now_ns, (sender[0], peer), sent.track, posted.track, excuses)
        edges = self._sightings[sender].sample.edges
        for index, edge in enumerate(edges):
            if edge.kind == "send" and edge.peer == peer:
                edges[index] = msgspec.structs.replace(edge, conflict=found.conflict, pace=found.pace)

    def _is_there(self, key: Key, end: _End) -> bool:
        """Return whether the stage is still on the node that reported this side."""
        seen = self._sightings.get(key)
        return seen is not None and seen.node == end.node


def _row(kind: Kind, edge: FarEdge, message: FarMessage, shift_ns: int) -> Row:
    """Return a message as a row of a ring in this host's time; 0 stays, which is no time."""
    times = [at_ns and at_ns + shift_ns for at_ns in (message.begun_ns, message.returned_ns, message.done_ns)]
    number = message.number
    return number, kind.value, edge.peer, message.step, *times, message.size, number, 0, message.code, edge.generation
