"""What a stage sent and posted on its edges, message by message, from the records of its transport."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ppengine.protocol.reports import EdgeSample, Message
from ppengine.ring import Kind, Record

SHOWN_DONE = 12
"""Of the messages that are done, so many of the newest: both sides look at the same ones, within a few steps."""
_KEPT = 64
_KINDS: dict[int, Literal["send", "receive"]] = {Kind.SEND.value: "send", Kind.RECEIVE.value: "receive"}


class MessageTrack:
    """Remembers the newest messages of every edge of one ring. A new generation of an edge begins anew."""

    def __init__(self) -> None:
        self._edges: dict[tuple[int, int], dict[int, Record]] = {}
        self._generations: dict[tuple[int, int], int] = {}

    def feed(self, records: Iterable[Record]) -> None:
        """Take records, new ones and ones that have changed."""
        for record in records:
            if not record.detail or record.kind not in _KINDS:
                continue
            key = record.kind, record.peer
            if record.generation != self._generations.setdefault(key, record.generation):
                if record.generation < self._generations[key]:
                    continue
                self._generations[key] = record.generation
                self._edges.pop(key, None)
            known = self._edges.setdefault(key, {})
            known[record.detail] = record
            if len(known) > _KEPT:
                del known[min(known)]

    def samples(self, now_ns: int) -> list[EdgeSample]:
        """Return every edge as this side sees it."""
        return [
            EdgeSample(
                kind=_KINDS[kind], peer=peer, generation=self._generations[kind, peer], messages=_shown(known, now_ns)
            )
            for (kind, peer), known in self._edges.items()
        ]


def _shown(known: dict[int, Record], now_ns: int) -> tuple[Message, ...]:
    numbers = sorted(known)
    done = [number for number in numbers if known[number].done_ns]
    hidden = set(done[:-SHOWN_DONE])
    return tuple(_message(known[number], now_ns) for number in numbers if number not in hidden)


def _message(record: Record, now_ns: int) -> Message:
    state = 2 if record.done_ns else 1 if record.returned_ns else 0
    age_ms = round((now_ns - record.enqueued_ns) / 1e6, 2)
    return Message(record.detail, record.step, record.size, record.code, state, age_ms)
