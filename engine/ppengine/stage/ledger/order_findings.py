"""The findings of the ledger: each pair of call sites once, in words that need no ledger to understand."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from ppengine.protocol.reports import Finding
from ppengine.stage.ledger.actors import Access, Actor, Buffer
from ppengine.stage.ledger.call_sites import site_key, site_text

MOST = 64
"""Different troubles that are kept; the rest is counted."""
_SUMMARY_MOST = 100
Cause = Literal["stream_order", "stream_owner", "stream_stuck"]


class Kind(Enum):
    """The kind of trouble."""

    UNORDERED = "unordered"
    REWRITTEN = "rewritten"
    FREED = "freed"
    REISSUED = "reissued"
    USED_FREED = "used freed"
    OWNER = "owner"
    DEVICE = "device"
    DEAD = "dead"
    STUCK = "stuck"


_CAUSES: dict[Kind, Cause] = {
    Kind.OWNER: "stream_owner",
    Kind.DEVICE: "stream_owner",
    Kind.DEAD: "stream_owner",
    Kind.STUCK: "stream_stuck",
}
"""All others are `stream_order`."""


class Trouble(NamedTuple):
    """One thing that is wrong. `access` did it, `earlier` is the access that it should have waited for."""

    kind: Kind
    access: Access
    earlier: Access | None = None
    buffer: Buffer | None = None
    stream: Actor | None = None
    where: str = ""
    writes: bool = False
    """`earlier` is a write."""

    def key(self) -> tuple[object, ...]:
        """Return the identity of a trouble: kind, actors, buffer and both call sites."""
        earlier, stream = self.earlier, self.stream
        return (
            self.kind, self.access.actor.id, site_key(self.access.site), self.buffer and self.buffer.name,
            stream and stream.id, earlier and (earlier.actor.id, site_key(earlier.site)), self.where,
        )  # fmt: skip


@dataclass(slots=True)
class Kept:
    """A trouble with how often and since when; its words are made when it is first seen, with the state of then."""

    cause: Cause
    summary: str
    evidence: list[str]
    since_ns: int = field(default_factory=time.monotonic_ns)
    count: int = 1


class Troubles:
    """The troubles of one stage."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._kept: dict[tuple[object, ...], Kept] = {}
        self._sites: list[Trouble] = []
        self._lock = threading.Lock()
        self.changes = 0
        """Grows with every trouble that is seen."""

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept, self._sites = {}, []
            self.changes += 1

    def add(self, trouble: Trouble) -> None:
        """Note a trouble."""
        key = trouble.key()
        with self._lock:
            self.changes += 1
            known = self._kept.get(key)
            if known is not None:
                known.count += 1
            elif len(self._kept) < MOST:
                summary, evidence = _WORDS.get(trouble.kind, _in_flight)(trouble)
                text = f"stage {self._stage}: {summary}"
                short = text if len(text) <= _SUMMARY_MOST else text[: _SUMMARY_MOST - 3] + "..."
                self._kept[key] = Kept(_CAUSES.get(trouble.kind, "stream_order"), short, evidence)
                self._sites.append(trouble)  # Keeps the code objects alive whose ids are part of the key.

    def findings(self) -> list[Finding]:
        """Return them as reports, oldest first."""
        now = time.monotonic_ns()
        with self._lock:
            return [
                Finding(
                    stage=self._stage,
                    cause=kept.cause,
                    summary=kept.summary,
                    since_s=(now - kept.since_ns) / 1e9,
                    evidence=[*kept.evidence, f"seen {kept.count} time{'s' if kept.count > 1 else ''}"],
                )
                for kept in self._kept.values()
            ]


# --- words --------------------------------------------------------------------------------------------------

Words = tuple[str, list[str]]
"""Summary and evidence."""


def _did(verb: str, access: Access) -> str:
    return f"{verb}: {access.what} on {access.actor.text()}, at {site_text(access.site)}"


def _parts(trouble: Trouble) -> tuple[Access, Access, Buffer]:
    assert trouble.earlier is not None and trouble.buffer is not None
    return trouble.access, trouble.earlier, trouble.buffer


def _unordered(trouble: Trouble) -> Words:
    access, earlier, buffer = _parts(trouble)
    reader, writer = access.actor.name, earlier.actor.name
    return f"{reader} reads {buffer.name} without waiting for {writer}, which writes it", [
        _did("written by", earlier),
        _did("read by", access),
        f"{buffer.text()}: no event, wait or synchronise orders the two, so {reader} may read the bytes before that",
        f"to fix: record an event on {writer} behind the write, and let {reader} wait for it before the read",
    ]


def _in_flight(trouble: Trouble) -> Words:
    access, earlier, buffer = _parts(trouble)
    actor, other, use = access.actor.name, earlier.actor.name, "write" if trouble.writes else "read"
    verb, then = {
        Kind.REWRITTEN: ("rewrites", f"{other} may get bytes of the next generation"),
        Kind.FREED: ("frees", f"the pool may hand the memory out while {other} still uses it"),
        Kind.REISSUED: ("is given", f"its writes may reach {other}, which still uses the memory"),
    }[trouble.kind]
    done = {"rewrites": "rewritten by", "frees": "freed by", "is given": "handed out to"}[verb]
    fix = f"to fix: record an event on {other} behind its {use}, and let {actor} wait for it first"
    if trouble.kind is Kind.FREED:
        fix += f", or have the pool know that {other} uses the buffer (record_stream)"
    return f"{actor} {verb} {buffer.name} while {other} may still {use} it", [
        _did(f"{'written' if trouble.writes else 'read'} by", earlier),
        _did(done, access),
        f"{buffer.text()}: no event, wait or synchronise orders the two: {then}",
        fix,
    ]


def _used_freed(trouble: Trouble) -> Words:
    access, earlier, buffer = _parts(trouble)
    return f"{access.actor.name} uses {buffer.name} after it was freed", [
        _did("freed by", earlier),
        _did("used by", access),
        f"{buffer.text()}: its memory may belong to another owner by now",
        "to fix: keep the buffer until its last user is done",
    ]


def _stream_of(trouble: Trouble) -> Actor:
    assert trouble.stream is not None
    return trouble.stream


def _owner(trouble: Trouble) -> Words:
    access, stream = trouble.access, _stream_of(trouble)
    owner = stream.owner.name if stream.owner else "?"
    thread = access.actor
    evidence = [
        f"launched: {access.what} by thread {thread.name}, at {site_text(access.site)}",
        f"{stream.text()} was made at {site_text(stream.created)}",
    ]
    if stream.current_at is not None:
        who, site = stream.current_at
        evidence.append(f"thread {who.name} made it the current stream at {site_text(site)}")
    if thread.current is not None and thread.current is not stream:
        evidence.append(f"thread {thread.name} itself had made {thread.current.name} current")
    evidence.append(
        f"nothing orders {stream.name} with the work of thread {thread.name}: results may be read before they are there"
    )
    evidence.append("to fix: pass the stream explicitly; no current stream that threads share, none by default")
    return f"thread {thread.name} launches on stream {stream.name}, which thread {owner} owns", evidence


def _device(trouble: Trouble) -> Words:
    access, stream = trouble.access, _stream_of(trouble)
    other = f"thread {access.actor.name}" if trouble.buffer is None else f"buffer {trouble.buffer.name}"
    device = access.actor.device if trouble.buffer is None else trouble.buffer.device
    return f"stream {stream.name} of {stream.device} is used with {other} of {device}", [
        f"launched: {access.what} at {site_text(access.site)}; {other} is on {device}",
        f"{stream.text()} was made at {site_text(stream.created)}",
        "a handle of another device is invalid there (CUDA error 400, invalid resource handle); the current device "
        "belongs to each thread and begins as device 0",
        "to fix: set the device in the thread that makes the stream, before it does; that alone mends no order",
    ]


def _dead(trouble: Trouble) -> Words:
    access, stream = trouble.access, _stream_of(trouble)
    closed = f"destroyed at {site_text(stream.current_at[1])}" if stream.current_at else "destroyed"
    return f"thread {access.actor.name} launches on stream {stream.name}, which is destroyed", [
        f"launched: {access.what} at {site_text(access.site)}",
        f"{stream.text()} was made at {site_text(stream.created)} and {closed}",
        "its handle is invalid (CUDA error 400), or by now another stream's",
        "to fix: keep the stream until its last user is done",
    ]


def _stuck(trouble: Trouble) -> Words:
    access, stream = trouble.access, _stream_of(trouble)
    return f"stream {stream.name} is stuck in {access.what}", [
        f"{stream.text()} was made at {site_text(stream.created)}",
        f"{access.what} was launched at {site_text(access.site)} and is not done after {trouble.where} s",
        "everything behind it on the stream waits, and so do all streams and threads that wait for that",
    ]


_WORDS = {
    Kind.UNORDERED: _unordered,
    Kind.USED_FREED: _used_freed,
    Kind.OWNER: _owner,
    Kind.DEVICE: _device,
    Kind.DEAD: _dead,
    Kind.STUCK: _stuck,
}
"""All others are about a buffer in flight."""
