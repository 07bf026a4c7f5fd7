"""The graph of waits: nodes are threads, links and the core; each waits for at most one other.

A receiver waits for its peer until the peer has sent that message, a sender until the peer has posted a receive for
it; after both, both wait for the link. A thread that is dead, stopped or without the GIL waits for none.
"""

from __future__ import annotations

from typing import NamedTuple

from ppengine.common.ring import shape_text
from ppengine.diagnosis.budgets import holds_gil, idles_in_vain, is_lost, is_stopped, is_unseen, really_waits
from ppengine.diagnosis.evidence import Evidence, StageEvidence
from ppengine.protocol.snapshot import StreamInfo
from ppengine.protocol.stage_samples import EdgeSample, Message


class Node(NamedTuple):
    """`main` and `send` are threads of a stage, `link` is the edge from stage to peer, `driver` the scheduler."""

    kind: str
    stage: int = -1
    peer: int = -1

    def __str__(self) -> str:
        """Return what an operator calls it."""
        if self.kind == "link":
            return f"the link from stage {self.stage} to stage {self.peer}"
        if self.kind == "send":
            return f"the send thread of stage {self.stage}"
        return "the engine core" if self.kind == "core" else f"stage {self.stage}"


CORE = Node("core")


class Wait(NamedTuple):
    """One edge of the graph. `known` False: what the peer has sent or posted is not known."""

    waiter: Node
    on: Node
    text: str
    since_s: float
    step: int | None = None
    number: int | None = None
    known: bool = True
    soft: bool = False
    """Nothing is owed: a stage without work waits for the core, which waits for somebody."""


class Graph(NamedTuple):
    """The waits, by who waits."""

    waits: dict[Node, Wait]

    def follow(self, node: Node, soft: bool = False) -> list[Wait]:
        """Return the waits from `node` on, up to a node that waits for none; a wait that closes a cycle is the last."""
        chain: list[Wait] = []
        seen = {node}
        while (wait := self.waits.get(node)) is not None and (soft or not wait.soft):
            chain.append(wait)
            node = wait.on
            if node in seen:
                break
            seen.add(node)
        return chain

    def cycle(self, node: Node) -> list[Wait]:
        """Return the waits of the cycle that `node` leads into; empty if it leads to an end."""
        chain = self.follow(node)
        if not chain or chain[-1].on not in {wait.waiter for wait in chain}:
            return []
        first = next(index for index, wait in enumerate(chain) if wait.waiter == chain[-1].on)
        return chain[first:]


def main(stage: int) -> Node:
    """Return the main thread of a stage."""
    return Node("main", stage)


def build(evidence: Evidence) -> Graph:
    """Return the graph of this moment."""
    stages = {stage.stage: stage for stage in evidence.stages}
    found = [_main_wait(stage, stages, evidence) for stage in evidence.stages]
    found += [_send_wait(stage, stages) for stage in evidence.stages]
    found.append(_core_wait(evidence))
    return Graph({wait.waiter: wait for wait in found if wait is not None})


def holding(evidence: Evidence) -> list[StageEvidence]:
    """Return the stages that have not retired a step that was sent, the one with the oldest first."""
    owing = [stage for stage in evidence.stages if stage.unretired_age_s is not None]
    return sorted(owing, key=lambda stage: (oldest_step(stage), stage.stage))


def oldest_step(stage: StageEvidence) -> int:
    """Return the number of the oldest step that a stage has not retired: without gaps, the one after the newest."""
    return (stage.retired_step or 0) + 1 if stage.unretired_step is None else stage.unretired_step


def receiving_from(stage: StageEvidence, count: int) -> int | None:
    """Return the stage that an open receive waits for."""
    return stage.op_peer if stage.op_peer is not None or stage.op != "token_return" else count - 1


def edge_of(stage: StageEvidence, kind: str, peer: int) -> EdgeSample | None:
    """Return one side of an edge as `stage` recorded it."""
    return next((edge for edge in stage.edges if edge.kind == kind and edge.peer == peer), None)


def message_text(message: Message) -> str:
    """Return `message 7 (m8, float32[1, 64] 256 B)`."""
    return f"message {message.number} (m{message.step}, {shape_text(message.size, message.code)})"


def _inert(stage: StageEvidence) -> bool:
    return is_lost(stage) or is_stopped(stage) or holds_gil(stage)


def _main_wait(stage: StageEvidence, stages: dict[int, StageEvidence], evidence: Evidence) -> Wait | None:
    if _inert(stage) or idles_in_vain(stage):
        return None
    if is_unseen(stage):
        return _unretired_wait(stage, stages)
    node, since = main(stage.stage), stage.op_age_s or 0.0
    if stage.op == "idle":
        owes = stage.unretired_age_s is not None
        if owes or not evidence.steps_in_flight:
            return None
        return Wait(node, CORE, "its next step", since, soft=True)
    on_the_wire = stage.op == "room" and "poll" in (stage.wchan or "")
    if (
        stage.op == "room"
        and not on_the_wire
        and really_waits(stage)
        and edge_of(stage, "send", -1 if stage.op_peer is None else stage.op_peer) is not None
    ):
        return Wait(node, Node("send", stage.stage), f"room to hand over m{stage.op_step}", since, stage.op_step)
    if stage.op == "device":
        return _device_wait(stage, stages, since)
    if not really_waits(stage):
        return None
    peer = stages.get(number) if (number := receiving_from(stage, len(stages))) is not None else None
    if peer is None or peer is stage:
        return None
    if stage.op == "collective":
        return Wait(node, main(peer.stage), "its end of the edge", since)
    if stage.op == "room":
        return Wait(node, main(peer.stage), f"room for m{stage.op_step}", since, stage.op_step, known=on_the_wire)
    return _receive_wait(stage, peer, since) if stage.op in ("receive", "token_return") else None


def _unretired_wait(stage: StageEvidence, stages: dict[int, StageEvidence]) -> Wait | None:
    """Return the wait of a stage without a fresh sample: for a step that the stage before has not retired either."""
    before, since = stages.get(stage.stage - 1), stage.unretired_age_s
    if before is None or since is None or before.unretired_age_s is None:
        return None
    step = oldest_step(stage)
    if oldest_step(before) > step:
        return None
    text = f"m{step}, which stage {before.stage} has not retired"
    return Wait(main(stage.stage), main(before.stage), text, since, step, known=False)


def _device_wait(stage: StageEvidence, stages: dict[int, StageEvidence], since: float) -> Wait | None:
    """Return the node that the device of a stage waits for: it has work, and has not begun it.

    The wait before it in the stream is for the same step of the stage before (on the first stage: for tokens that the
    last one samples), or else for room at the next stage.
    """
    compute = layers_of(stage)
    if compute is None or not compute.pending or any(each.op is not None for each in stage.streams):
        return None  # Another stream of its own that is at work may be what it waits for.
    k, count, done = stage.stage, len(stages), compute.done_step or 0
    before, after = stages.get((k - 1) % count), stages.get(k + 1)
    theirs = None if before is None else layers_of(before)
    if before is not None and before is not stage and theirs is not None and (theirs.done_step or 0) < done + (k > 0):
        what = f"m{done + 1} on its device" if k else "tokens that its device samples"
        return Wait(main(k), main(before.stage), what, since, stage.op_step)
    return None if after is None else Wait(main(k), main(after.stage), "room on its device", since, stage.op_step)


def layers_of(stage: StageEvidence) -> StreamInfo | None:
    """Return the device's stream that the layers are on; None for a stage without a device."""
    return next((each for each in stage.streams if each.name == "compute"), None)


def _receive_wait(stage: StageEvidence, peer: StageEvidence, since: float) -> Wait | None:
    node, step = main(stage.stage), stage.op_step
    mine = edge_of(stage, "receive", peer.stage)
    posted = [message for message in mine.messages if message.state < 2] if mine else []
    message = next((message for message in posted if message.step == step), None)
    if mine is not None and message is None:
        return None  # It has not posted what it waits for, or has it already: no peer can help.
    if mine is None or message is None:
        return Wait(node, main(peer.stage), f"m{step}", since, step, known=False)
    text, number = message_text(message), message.number
    theirs = edge_of(peer, "send", stage.stage)
    if theirs is not None and theirs.generation != mine.generation:
        theirs = None
    if theirs is None and number > 1:
        return Wait(node, main(peer.stage), text, since, step, number, known=False)
    sent = theirs.messages if theirs else ()
    if any(other.number == number for other in sent):
        return _on_link(node, peer, stage, text, since, step, number)
    queued = bool(peer.outbox) and all(other.state == 2 for other in sent)
    on = Node("send", peer.stage) if queued and not _inert(peer) else main(peer.stage)
    return Wait(node, on, f"{text}, which is not sent", since, step, number)


def _send_wait(stage: StageEvidence, stages: dict[int, StageEvidence]) -> Wait | None:
    """Return the node that the oldest message under way waits for."""
    if _inert(stage) or is_unseen(stage):
        return None
    under_way = [
        (message, edge)
        for edge in stage.edges
        for message in edge.messages
        if edge.kind == "send" and message.state < 2 and edge.peer in stages
    ]
    if not under_way:
        return None
    message, edge = max(under_way, key=lambda pair: pair[0].age_ms)
    node, peer, text = Node("send", stage.stage), stages[edge.peer], message_text(message)
    since = message.age_ms / 1e3 + (stage.sample_age_s or 0.0)
    theirs = edge_of(peer, "receive", stage.stage)
    if theirs is not None and theirs.generation != edge.generation:
        theirs = None
    if theirs is None and message.number > 1:
        return Wait(node, main(peer.stage), text, since, message.step, message.number, known=False)
    if theirs is not None and any(other.number == message.number for other in theirs.messages):
        return _on_link(node, stage, peer, text, since, message.step, message.number)
    return Wait(
        node, main(peer.stage), f"{text}, which is not received", since, message.step, message.number
    )  # fmt: skip


def _on_link(
    node: Node, sender: StageEvidence, receiver: StageEvidence, text: str, since: float, step: int | None, number: int
) -> Wait:
    """Return the wait for a message that both sides have posted: for the link, unless one end cannot go on."""
    gone = next((end for end in (sender, receiver) if is_lost(end) or is_stopped(end)), None)
    if gone is not None:
        return Wait(node, main(gone.stage), text, since, step, number)
    on = Node("link", sender.stage, receiver.stage)
    return Wait(node, on, f"{text}, sent and posted", since, step, number)


def _core_wait(evidence: Evidence) -> Wait | None:
    held = holding(evidence)
    if not evidence.steps_in_flight or not held:
        return None
    first = held[0]
    step = oldest_step(first)
    return Wait(CORE, main(first.stage), f"m{step} to be retired", first.unretired_age_s or 0.0, step)
