"""The messages that a stage sent and posted on its edges, from the records of its transport."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Literal

from ppengine.common.ring import DETAIL, DONE_NS, KIND, Kind, Record, Row, in_ms
from ppengine.protocol.stage_samples import EdgeSample, Message

SHOWN_DONE = 12
"""Number of finished messages shown, the newest: both sides show the same ones, within a few steps."""
_KEPT = 256
"""Number of messages kept: more than an edge carries between two looks."""
CONFLICT_KEPT_NS = 300_000_000_000
"""Nanoseconds for which a conflict is reported: it has spoiled results, also if later messages agree."""
KINDS: dict[int, Literal["send", "receive"]] = {Kind.SEND.value: "send", Kind.RECEIVE.value: "receive"}
_edge_of = itemgetter(*map(Record._fields.index, ("kind", "peer", "generation")))
_content = itemgetter(*map(Record._fields.index, ("step", "size", "code")))
"""The fields that both ends of an edge record alike."""


class _Edge:
    """One side of an edge: its newest messages by number, and which of them are not done."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.known: dict[int, Row] = {}
        """Rows by number, in the order in which they began, which is that of the numbers."""
        self.open: set[int] = set()

    def take(self, rows: Sequence[Row]) -> None:
        known, under_way = self.known, self.open
        for row in rows:
            number = row[DETAIL]
            known[number] = row
            if row[DONE_NS]:
                under_way.discard(number)
            else:
                under_way.add(number)
        if len(known) >= 2 * _KEPT:
            for old in list(islice(known, len(known) - _KEPT)):
                del known[old]
            under_way.intersection_update(known)

    def shown(self, now_ns: int) -> tuple[Message, ...]:
        done = islice((number for number in reversed(self.known) if number not in self.open), SHOWN_DONE)
        return tuple(_message(self.known[number], now_ns) for number in sorted([*done, *self.open]))


class MessageTrack:
    """Keeps the newest messages of every edge of one ring. A new generation of an edge starts empty."""

    def __init__(self) -> None:
        self._edges: dict[tuple[int, int], _Edge] = {}

    def feed(self, rows: Iterable[Row]) -> None:
        """Take rows, new ones and ones that have changed."""
        messages = [row for row in rows if row[DETAIL] and row[KIND] in KINDS]
        for (kind, peer, generation), mine in groupby(messages, _edge_of):
            edge = self._edges.get((kind, peer))
            if edge is None or generation > edge.generation:
                edge = self._edges[kind, peer] = _Edge(generation)
            if generation == edge.generation:
                edge.take(list(mine))

    def samples(self, now_ns: int) -> list[EdgeSample]:
        """Return every edge of this side."""
        return [
            EdgeSample(kind=KINDS[kind], peer=peer, generation=edge.generation, messages=edge.shown(now_ns))
            for (kind, peer), edge in self._edges.items()
        ]

    def edges(self) -> list[tuple[Kind, int]]:
        """Return kind and peer of every edge of this side."""
        return [(Kind(kind), peer) for kind, peer in self._edges]

    def forget(self, kind: Kind, peer: int) -> None:
        """Drop the messages of one edge: some in between are not known."""
        self._edges.pop((kind.value, peer), None)

    def edge(self, kind: Kind, peer: int) -> tuple[int, dict[int, Row]]:
        """Return generation and rows by number of one edge; without rows if there is none."""
        edge = self._edges.get((kind.value, peer))
        return (-1, {}) if edge is None else (edge.generation, edge.known)


class Comparer:
    """Compares the records of both ends of an edge, each message once."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}
        self._found: dict[tuple[int, int], tuple[int, Row | None, Row]] = {}

    def look(self, now_ns: int, sender: int, receiver: int, sent: MessageTrack, posted: MessageTrack) -> None:
        """Compare the new messages of the edge from `sender` to `receiver`."""
        edge = sender, receiver
        generation, out = sent.edge(Kind.SEND, receiver)
        other, into = posted.edge(Kind.RECEIVE, sender)
        if generation != other or not out or not into:
            return
        known, last = self._seen.get(edge, (generation, 0))
        if known != generation:
            last = 0
            self._found.pop(edge, None)
        # Up to the newest of both sides: a message that one side lacks yet is compared later.
        first, both = max(last + 1, next(iter(out))), min(next(reversed(out)), next(reversed(into)))
        for number in range(first, both + 1):
            one, two = out.get(number), into.get(number)
            if two is not None and (one is None or _content(one) != _content(two)):
                self._found[edge] = now_ns, one, two
                break
        self._seen[edge] = generation, both

    def conflict(self, sender: int, receiver: int, now_ns: int) -> tuple[Message | None, Message] | None:
        """Return the newest conflict of an edge that is not too old."""
        at_ns, one, two = self._found.get((sender, receiver), (0, None, None))
        if two is None or now_ns - at_ns > CONFLICT_KEPT_NS:
            return None
        return None if one is None else _message(one, now_ns), _message(two, now_ns)


def _message(row: Row, now_ns: int) -> Message:
    record = Record._make(row)
    state = 2 if record.done_ns else 1 if record.returned_ns else 0
    age_ms = in_ms(now_ns - record.enqueued_ns)
    return Message(record.detail, record.step, record.size, record.code, state, age_ms)
