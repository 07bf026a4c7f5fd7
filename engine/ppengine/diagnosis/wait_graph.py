"""The graph of waits: nodes are threads, links and the core; each waits for at most one other.

A receiver waits for its peer until the peer has sent that message, a sender until the peer has posted a receive for
it; after both, both wait for the link. Edges connect equal ranks. A rank in a collective waits for the rank of its
stage whose part it has not got. A thread that is dead, stopped or without the GIL waits for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ppengine.common.ring import shape_text
from ppengine.diagnosis.budgets import holds_gil, idles_in_vain, is_lost, is_stopped, is_unseen, really_waits
from ppengine.diagnosis.evidence import Evidence, Key, StageEvidence
from ppengine.protocol.operation_kinds import RANK_WAIT_WORDS
from ppengine.protocol.stage_info import StreamInfo
from ppengine.protocol.stage_samples import EdgeSample, Message


class Node(NamedTuple):
    """`main` and `send` are threads of a stage, `link` is the edge from stage to peer, `core` the scheduler.

    `rank`: the tensor rank, at both ends of a link; None where stages have one.
    """

    kind: str
    stage: int = -1
    peer: int = -1
    rank: int | None = None

    @property
    def key(self) -> Key:
        """Its place; of a link, the sender's."""
        return self.stage, self.rank or 0

    def __str__(self) -> str:
        """Return what an operator calls it."""
        rank = "" if self.rank is None else f" rank {self.rank}"
        if self.kind == "link":
            return f"the link from stage {self.stage}{rank} to stage {self.peer}{rank}"
        if self.kind == "send":
            return f"the send thread of stage {self.stage}{rank}"
        return "the engine core" if self.kind == "core" else f"stage {self.stage}{rank}"


CORE = Node("core")
Places = Mapping[Key, StageEvidence]


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
    rank: bool = False
    """Whether it is for another rank of the same stage."""


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


def main(stage: int, rank: int | None = None) -> Node:
    """Return the main thread of a stage."""
    return Node("main", stage, rank=rank)


def main_of(stage: StageEvidence) -> Node:
    """Return the main thread of a stage."""
    return main(stage.stage, stage.shown_rank)


def _send_of(stage: StageEvidence) -> Node:
    """Return the send thread of a stage."""
    return Node("send", stage.stage, rank=stage.shown_rank)


def build(evidence: Evidence) -> Graph:
    """Return the graph of this moment."""
    stages = {stage.key: stage for stage in evidence.stages}
    found = [_main_wait(stage, stages, evidence) for stage in evidence.stages]
    found += [_send_wait(stage, stages) for stage in evidence.stages]
    found.append(_core_wait(evidence))
    return Graph({wait.waiter: wait for wait in found if wait is not None})


def holding(evidence: Evidence) -> list[StageEvidence]:
    """Return the stages that have not retired a step that was sent, the one with the oldest first."""
    owing = [stage for stage in evidence.stages if stage.unretired_age_s is not None]
    return sorted(owing, key=lambda stage: (oldest_step(stage), *stage.key))


def oldest_step(stage: StageEvidence) -> int:
    """Return the number of the oldest step that a stage has not retired: without gaps, the one after the newest."""
    return (stage.retired_step or 0) + 1 if stage.unretired_step is None else stage.unretired_step


def masked_step(stage: StageEvidence) -> int:
    """Return the number of the step that lacks masks: a GPU launches the layers of the next one before it waits."""
    oldest, named = oldest_step(stage), stage.op_step
    return oldest if named is None or stage.unretired_age_s is not None else named


def stages_of(places: Iterable[Key]) -> int:
    """Return the number of stages that have these places."""
    return len({stage for stage, _ in places})


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


def _main_wait(stage: StageEvidence, stages: Places, evidence: Evidence) -> Wait | None:
    if _inert(stage) or idles_in_vain(stage):
        return None
    if is_unseen(stage):
        return _unretired_wait(stage, stages)
    if (late := _late_rank_wait(stage, stages)) is not None:
        return late
    node, since = main_of(stage), stage.op_age_s or 0.0
    if stage.op == "idle":
        owes = stage.unretired_age_s is not None
        if owes or not evidence.steps_in_flight:
            return None
        return Wait(node, CORE, "its next step", since, soft=True)
    if stage.op == "mask":
        return Wait(node, CORE, f"the masks of m{masked_step(stage)}", since, soft=True)
    on_the_wire = stage.op == "room" and "poll" in (stage.wchan or "")
    if (
        stage.op == "room"
        and not on_the_wire
        and really_waits(stage)
        and edge_of(stage, "send", -1 if stage.op_peer is None else stage.op_peer) is not None
    ):
        return Wait(node, _send_of(stage), f"room to hand over m{stage.op_step}", since, stage.op_step)
    if stage.op == "device":
        return _device_wait(stage, stages, since)
    if not really_waits(stage):
        return None
    if stage.op in RANK_WAIT_WORDS:
        return _rank_wait(stage, stages, since)
    number = receiving_from(stage, stages_of(stages))
    peer = None if number is None else stages.get((number, stage.rank))
    if peer is None or peer is stage:
        return None
    if stage.op == "collective":
        return Wait(node, main_of(peer), "its end of the edge", since)
    if stage.op == "room":
        return Wait(node, main_of(peer), f"room for m{stage.op_step}", since, stage.op_step, known=on_the_wire)
    return _receive_wait(stage, peer, since) if stage.op in ("receive", "token_return") else None


def _rank_wait(stage: StageEvidence, stages: Places, since: float) -> Wait | None:
    """Return the wait for another rank's part of a collective: the main thread sends its own before it waits."""
    peer = stages.get((stage.stage, -1 if stage.op_peer is None else stage.op_peer))
    if peer is None or peer is stage:
        return None
    return Wait(main_of(stage), main_of(peer), f"its part of {collective_text(stage)}", since, stage.op_step, rank=True)


def _late_rank_wait(stage: StageEvidence, stages: Places) -> Wait | None:
    """Return the wait of a device in a collective, in any operation of its host: its own part is sent."""
    compute = layers_of(stage)
    if compute is None or compute.op is None:
        return None
    late = [stages[stage.stage, rank] for rank in compute.late_ranks if (stage.stage, rank) in stages]
    if not late or stage in late:
        return None
    # Of several, some may be late because they wait in turn.
    peer = min(late, key=lambda each: len(theirs.late_ranks) if (theirs := layers_of(each)) else 0)
    text = f"its part of a collective on the device (m{compute.begun_step})"
    since = (compute.age_ms or 0.0) / 1e3
    return Wait(main_of(stage), main_of(peer), text, since, compute.begun_step, rank=True)


def collective_text(stage: StageEvidence) -> str:
    """Return the collective that a rank is in: `all-reduce (MLP of layer 3, m8)`."""
    where = ", ".join(filter(None, (stage.op_site, f"m{stage.op_step}" if stage.op_step else "")))
    return f"{(stage.op or '').replace('_', '-')} ({where})"


def _unretired_wait(stage: StageEvidence, stages: Places) -> Wait | None:
    """Return the wait of a stage without a fresh sample: for a step that the stage before has not retired either."""
    before, since = stages.get((stage.stage - 1, stage.rank)), stage.unretired_age_s
    step = oldest_step(stage)
    if since is None:
        return None
    if before is None or before.unretired_age_s is None or oldest_step(before) > step:
        return _unseen_rank_wait(stage, stages, since, step)
    text = f"m{step}, which {before.name} has not retired"
    return Wait(main_of(stage), main_of(before), text, since, step, known=False)


def _unseen_rank_wait(stage: StageEvidence, stages: Places, since: float, step: int) -> Wait | None:
    """Return the wait of a rank that is in a poll, for one of its stage that is not: neither has a fresh sample."""
    if "poll" not in (stage.wchan or ""):
        return None
    for other in stages.values():
        same = other.stage == stage.stage and other is not stage and other.unretired_age_s is not None
        if same and oldest_step(other) <= step and (_inert(other) or "poll" not in (other.wchan or "")):
            return Wait(main_of(stage), main_of(other), f"its part of m{step}", since, step, known=False)
    return None


def _device_wait(stage: StageEvidence, stages: Places, since: float) -> Wait | None:
    """Return the node that the device of a stage waits for: it has work, and has not begun it.

    The wait before it in the stream is for the same step of the stage before (on the first stage: for tokens that the
    last one samples), or else for room at the next stage.
    """
    compute = layers_of(stage)
    if compute is None or not compute.pending or any(each.op is not None for each in stage.streams):
        return None  # Another stream of its own that is at work may be what it waits for.
    k, count, done = stage.stage, stages_of(stages), compute.done_step or 0
    before, after = stages.get(((k - 1) % count, stage.rank)), stages.get((k + 1, stage.rank))
    theirs = None if before is None else layers_of(before)
    if before is not None and before is not stage and theirs is not None and (theirs.done_step or 0) < done + (k > 0):
        what = f"m{done + 1} on its device" if k else "tokens that its device samples"
        return Wait(main_of(stage), main_of(before), what, since, stage.op_step)
    return None if after is None else Wait(main_of(stage), main_of(after), "room on its device", since, stage.op_step)


def layers_of(stage: StageEvidence) -> StreamInfo | None:
    """Return the device's stream that the layers are on; None for a stage without a device."""
    return next((each for each in stage.streams if each.name == "compute"), None)


def _receive_wait(stage: StageEvidence, peer: StageEvidence, since: float) -> Wait | None:
    node, step = main_of(stage), stage.op_step
    mine = edge_of(stage, "receive", peer.stage)
    posted = [message for message in mine.messages if message.state < 2] if mine else []
    message = next((message for message in posted if message.step == step), None)
    if mine is not None and message is None:
        return None  # It has not posted what it waits for, or has it already: no peer can help.
    if mine is None or message is None:
        return Wait(node, main_of(peer), f"m{step}", since, step, known=False)
    text, number = message_text(message), message.number
    theirs = edge_of(peer, "send", stage.stage)
    if theirs is not None and theirs.generation != mine.generation:
        theirs = None
    if theirs is None and number > 1:
        return Wait(node, main_of(peer), text, since, step, number, known=False)
    sent = theirs.messages if theirs else ()
    if any(other.number == number for other in sent):
        return _on_link(node, peer, stage, text, since, step, number)
    queued = bool(peer.outbox) and all(other.state == 2 for other in sent)
    on = _send_of(peer) if queued and not _inert(peer) else main_of(peer)
    return Wait(node, on, f"{text}, which is not sent", since, step, number)


def _send_wait(stage: StageEvidence, stages: Places) -> Wait | None:
    """Return the node that the oldest message under way waits for."""
    if _inert(stage) or is_unseen(stage):
        return None
    under_way = [
        (message, edge)
        for edge in stage.edges
        for message in edge.messages
        if edge.kind == "send" and message.state < 2 and (edge.peer, stage.rank) in stages
    ]
    if not under_way:
        return None
    message, edge = max(under_way, key=lambda pair: pair[0].age_ms)
    node, peer, text = _send_of(stage), stages[edge.peer, stage.rank], message_text(message)
    since = message.age_ms / 1e3 + (stage.sample_age_s or 0.0)
    theirs = edge_of(peer, "receive", stage.stage)
    if theirs is not None and theirs.generation != edge.generation:
        theirs = None
    if theirs is None and message.number > 1:
        return Wait(node, main_of(peer), text, since, message.step, message.number, known=False)
    if theirs is not None and any(other.number == message.number for other in theirs.messages):
        return _on_link(node, stage, peer, text, since, message.step, message.number)
    return Wait(
        node, main_of(peer), f"{text}, which is not received", since, message.step, message.number
    )  # fmt: skip


def _on_link(
    node: Node, sender: StageEvidence, receiver: StageEvidence, text: str, since: float, step: int | None, number: int
) -> Wait:
    """Return the wait for a message that both sides have posted: for the link, unless one end cannot go on."""
    gone = next((end for end in (sender, receiver) if is_lost(end) or is_stopped(end)), None)
    if gone is not None:
        return Wait(node, main_of(gone), text, since, step, number)
    on = Node("link", sender.stage, receiver.stage, sender.shown_rank)
    return Wait(node, on, f"{text}, sent and posted", since, step, number)


def _core_wait(evidence: Evidence) -> Wait | None:
    held = holding(evidence)
    if not evidence.steps_in_flight or not held:
        return None
    first = held[0]
    step = oldest_step(first)
    return Wait(CORE, main_of(first), f"m{step} to be retired", first.unretired_age_s or 0.0, step)
