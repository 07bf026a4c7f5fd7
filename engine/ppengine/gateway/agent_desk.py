"""Questions to the agents, one a node: each goes to the nodes that have an answer, and their answers become one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from ppengine.gateway.gateway_sockets import Socket, drain, send
from ppengine.gateway.node_clocks import NodeClocks, Offset
from ppengine.protocol import frames
from ppengine.protocol.agent_messages import ClockAnswer, ClockQuestion, FromAgent
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import OpRecord, RingsDetail, StacksDetail, StageRings, StageStacks

WAIT_S, LATE_S = 20.0, 4.0
"""Seconds for an agent to answer, and for the others behind the first one; then its answer goes on without them."""


@dataclass
class _Question:
    """A question that went to one or several nodes."""

    question: Inspect
    deadline: float
    missing: set[str]
    answers: dict[str, Inspected | Failed] = field(default_factory=dict)


class AgentDesk:
    """Owns the socket `agent`. `node_of` returns the node of a stage, `nodes` those whose agents report.

    It asks for their clocks and keeps `clocks`.
    """

    def __init__(
        self,
        socket: Socket,
        here: str,
        node_of: Callable[[int], str],
        nodes: Callable[[], Iterable[str]],
        clocks: NodeClocks,
    ) -> None:
        self._socket, self._here, self._node_of, self._nodes = socket, here, node_of, nodes
        self.clocks = clocks
        self._codec = frames.Codec(FromAgent)
        # A late answer to the gateway before this one must not meet a question of this one.
        self._next = secrets.randbits(48)
        self._open: dict[int, _Question] = {}

    def ask(self, question: Inspect) -> str:
        """Send a question; return the obstacle, empty without one."""
        if question.core:
            nodes = [self._here]
        elif question.stage is not None:
            nodes = [self._node_of(question.stage)]
        else:
            nodes = sorted({self._here, *self._nodes()})
        number = self._number()
        message = frames.encode(msgspec.structs.replace(question, nonce=number))
        asked = {node for node in nodes if send(self._socket, [node.encode(), message])}
        if not asked:
            return f"the agent{'s' * (len(nodes) > 1)} on {', '.join(nodes)} cannot be asked now"
        self._open[number] = _Question(question, time.monotonic() + WAIT_S, asked)
        return ""

    def turn(self) -> None:
        """Ask the other nodes for their clocks. Call it about once a second."""
        now_ns = time.monotonic_ns()
        for node in self._nodes():
            if node != self._here and self.clocks.due(node, now_ns):
                number = self._number()
                if send(self._socket, [node.encode(), frames.encode(ClockQuestion(nonce=number))]):
                    self.clocks.ask(node, number, now_ns)

    def answers(self) -> list[Inspected | Failed]:
        """Take messages of agents; return the answers that are complete, or whose time is over."""
        done: list[int] = []
        for identity, *parts in drain(self._socket):
            try:
                message = self._codec.decode(frames.split(parts, 1)[0])
            except frames.ProtocolError:
                continue
            if isinstance(message, ClockAnswer):
                self.clocks.take(message.nonce, message.mono_ns, time.monotonic_ns())
            elif isinstance(message, Inspected | Failed) and (one := self._open.get(message.nonce)) is not None:
                node = identity.decode("utf-8", "replace")
                if node in one.missing:
                    one.missing.discard(node)
                    one.answers[node] = message
                    one.deadline = min(one.deadline, time.monotonic() + LATE_S)
                    if not one.missing:
                        done.append(message.nonce)
        now = time.monotonic()
        done += [number for number, one in self._open.items() if one.missing and one.deadline < now]
        return [self._merged(self._open.pop(number)) for number in done]

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _merged(self, one: _Question) -> Inspected | Failed:
        """Return one answer in place of those of all nodes."""
        nonce, what = one.question.nonce, one.question.what
        good = {node: answer for node, answer in one.answers.items() if isinstance(answer, Inspected)}
        if not good:
            bad = next((answer for answer in one.answers.values() if isinstance(answer, Failed)), None)
            text = f"no answer from {', '.join(sorted(one.missing))}"
            return Failed(nonce=nonce, code="FAILED", text=text) if bad is None else _numbered(bad, nonce)
        if len(good) == 1 and self._here in good and not one.missing:
            return _numbered(good[self._here], nonce)
        try:
            detail: msgspec.Struct
            if what == "rings":
                detail = self._rings(
                    {node: frames.decode_as(RingsDetail, bytes(each.data)) for node, each in good.items()}
                )
            else:
                detail = _stacks([frames.decode_as(StacksDetail, bytes(each.data)) for each in good.values()])
        except frames.ProtocolError as error:
            return Failed(nonce=nonce, code="FAILED", text=f"an agent sent no {what}: {error}")
        return Inspected(nonce=nonce, what=what, data=msgspec.Raw(frames.encode(detail)))

    def _rings(self, details: dict[str, RingsDetail]) -> RingsDetail:
        """Return the rings of all nodes in the time of this host."""
        found: dict[tuple[int, int], StageRings] = {}
        for node, detail in details.items():
            offset = None if node == self._here else self.clocks.offset(node)
            for rings in detail.stages:
                key = rings.stage, rings.rank
                if key not in found or found[key].pid is None:
                    found[key] = rings if node == self._here else _shifted(rings, node, offset)
        steps = max(detail.steps for detail in details.values())
        stages = [found[key] for key in sorted(found)]
        return RingsDetail(mono_ns=time.monotonic_ns(), wall=time.time(), steps=steps, stages=stages)


def _stacks(details: list[StacksDetail]) -> StacksDetail:
    best: dict[tuple[int | None, int], StageStacks] = {}
    for each in (each for detail in details for each in detail.stages):
        key = each.stage, each.rank
        if key not in best or best[key].pid is None:
            best[key] = each
    core = next((detail.core for detail in details if detail.core is not None and detail.core.pid is not None), None)
    known = sorted(best.values(), key=lambda each: (each.stage or 0, each.rank))
    return StacksDetail(stages=known, core=core, ability=details[0].ability)


def _numbered(answer: Inspected | Failed, nonce: int) -> Inspected | Failed:
    answer.nonce = nonce
    return answer


def _shifted(rings: StageRings, node: str, offset: Offset | None) -> StageRings:
    """Return the rings of a stage of another node in this host's time; without it, the records are left out."""
    if offset is None:
        return msgspec.structs.replace(rings, threads=[], error=f"the clock of {node} is not known yet")
    threads = [
        msgspec.structs.replace(thread, records=[_moved(record, offset.ns) for record in thread.records])
        for thread in rings.threads
    ]
    return msgspec.structs.replace(rings, threads=threads, node=node, clock_error_ms=offset.error_ns / 1e6)


def _moved(record: OpRecord, by_ns: int) -> OpRecord:
    """Return a record with times that are `by_ns` later; 0 stays, which is no time."""
    times = {name: at + by_ns for name in ("begun_ns", "returned_ns", "done_ns") if (at := getattr(record, name))}
    return msgspec.structs.replace(record, **times)
