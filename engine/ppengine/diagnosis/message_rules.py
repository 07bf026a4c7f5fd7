"""Messages on which the two ends of an edge do not agree: number by number, step, bytes, shape."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.common.ring import row_bytes
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.wait_graph import edge_of, message_text
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.stage_samples import EdgeSample, Message

FRESH_S = 10.0
"""A fault this soon after a mismatch is its consequence."""


class Conflict(NamedTuple):
    """The first message of an edge on which its sides differ; `sent` None: the sender left this number out."""

    sent: Message | None
    posted: Message


def mismatched(case: Case) -> list[Verdict]:
    """Return the edges whose sides differ, each at the end that is at fault."""
    return [verdict for verdict in _all(case) if verdict.since_s <= FRESH_S]


def remembered(case: Case) -> list[Verdict]:
    """Return the mismatches of a while ago: what a stage is in now comes before them."""
    return [verdict for verdict in _all(case) if verdict.since_s > FRESH_S]


def _all(case: Case) -> list[Verdict]:
    found = []
    for receiver in case.evidence.stages:
        for posted in receiver.edges:
            sender = next((stage for stage in case.evidence.stages if stage.key == (posted.peer, receiver.rank)), None)
            if posted.kind != "receive" or sender is None or sender.dead_for_s is not None:
                continue
            sent = edge_of(sender, "send", receiver.stage)
            if sent is None or sent.generation != posted.generation:
                continue
            # The agent or the gateway compares every message; until it has both ends, these are the newest ones.
            conflict = Conflict(*sent.conflict) if sent.conflict else first_conflict(sent, posted)
            if conflict is not None:
                found.append(_verdict(sender, receiver, conflict, sent.conflict_tokens if sent.conflict else None))
    return found


def first_conflict(sent: EdgeSample, posted: EdgeSample) -> Conflict | None:
    """Return the lowest message number that both sides know and on which they differ."""
    theirs = {message.number: message for message in sent.messages}
    low, high = min(theirs, default=0), max(theirs, default=-1)
    for message in posted.messages:
        other = theirs.get(message.number)
        if other is None:
            if low < message.number < high:
                return Conflict(None, message)
        elif (other.step, other.size, other.code) != (message.step, message.size, message.code):
            return Conflict(other, message)
    return None


def posts_wrongly(sender: StageEvidence, receiver: StageEvidence, conflict: Conflict, tokens: int | None) -> bool:
    """Return whether the receiver is at fault: both stages recorded a step of `tokens`, which the sender sent.

    Without that the sender is, as a receiver posts what its step says.
    """
    sent, posted = conflict
    if sent is None or tokens is None or receiver.stage != sender.stage + 1:
        return False  # A message of sampled tokens has a row for each request.
    row = row_bytes(posted.code)
    return (
        row is not None
        and (sent.step, sent.code, sent.size) == (posted.step, posted.code, tokens * row)
        and posted.size != tokens * row
    )


def _verdict(sender: StageEvidence, receiver: StageEvidence, conflict: Conflict, tokens: int | None) -> Verdict:
    sent, posted = conflict
    wrong = sender
    edge = f"{sender.name} -> {receiver.name}"
    if sent is None:
        summary = f"mismatch on {edge}: message {posted.number} was left out"
        lines = [f"{receiver.name} expects {message_text(posted)}", "the sender went on with the next number"]
    else:
        what = "step" if sent.step != posted.step else "size" if sent.size != posted.size else "element type or shape"
        summary = f"mismatch on {edge} at message {posted.number}: {what} differs"
        lines = [
            f"{sender.name} sent {message_text(sent)}",
            f"{receiver.name} expects {message_text(posted)}",
        ]
    if posts_wrongly(sender, receiver, conflict, tokens):
        wrong = receiver
        lines.append(f"both recorded m{posted.step} with {tokens} tokens, so {receiver.name} expects a wrong size")
    return Verdict(
        stage=wrong.stage,
        rank=wrong.shown_rank,
        cause="mismatch",
        summary=summary,
        since_s=posted.age_ms / 1e3 + (receiver.sample_age_s or 0.0),
        evidence=lines,
        suggest=f"ppconsole logs --stage {wrong.stage}; what these stages compute from here on is wrong",
    )
