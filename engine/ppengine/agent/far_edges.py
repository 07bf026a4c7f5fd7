"""Messages of edges whose other end is on another node, for the gateway to compare with that end's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile

from ppengine.agent.stage_watch import StageWatch
from ppengine.common.edge_messages import KINDS, MessageTrack
from ppengine.common.ring import DETAIL, DONE_NS, Kind, Record, Row
from ppengine.protocol.stage_samples import FarEdge, FarMessage

MOST = 256
"""Number of new messages of an edge in one report; older ones are left out."""


@dataclass
class _Reported:
    """The part of one side of an edge that has been reported."""

    generation: int
    number: int = 0
    """Newest message reported."""
    open: dict[int, Row] = field(default_factory=dict)
    """Messages as reported that were not done."""


class FarEdges:
    """Finds the messages to report: new ones, and reported ones that have changed. Call `look` for each report."""

    def __init__(self) -> None:
        self._reported: dict[tuple[int, int, Kind, int], _Reported] = {}
        """By stage, rank, kind and peer."""

    def look(self, watches: Mapping[tuple[int, int], StageWatch]) -> list[FarEdge]:
        """Return the edges that lead to other nodes. `watches`: all stages of this node."""
        return [
            self._edge(watch, track, kind, peer)
            for watch in watches.values()
            for track in map(watch.messages, KINDS.values())
            if track is not None
            for kind, peer in track.edges()
            if (peer, watch.rank) not in watches
        ]

    def _edge(self, watch: StageWatch, track: MessageTrack, kind: Kind, peer: int) -> FarEdge:
        generation, known = track.edge(kind, peer)
        key = watch.stage, watch.rank, kind, peer
        reported = self._reported.get(key)
        if reported is None or reported.generation != generation:
            reported = self._reported[key] = _Reported(generation)
        after = reported.number
        changed = [known[number] for number, row in reported.open.items() if known.get(number, row) != row]
        new = list(islice(takewhile(lambda row: row[DETAIL] > after, reversed(known.values())), MOST + 1))
        if len(new) > MOST:
            after = new.pop()[DETAIL]
        rows = [*changed, *reversed(new)]
        for row in rows:
            reported.number = max(reported.number, row[DETAIL])
            reported.open[row[DETAIL]] = row
        reported.open = {number: row for number, row in reported.open.items() if not row[DONE_NS] and number in known}
        return FarEdge(
            stage=watch.stage, rank=watch.rank, kind=KINDS[kind], peer=peer, generation=generation, after=after,
            messages=[_message(row) for row in rows], waited_ns=watch.waited_ns, throttled_us=watch.throttled_us,
        )  # fmt: skip


def _message(row: Row) -> FarMessage:
    record = Record._make(row)
    return FarMessage(
        record.detail, record.step, record.size, record.code, record.enqueued_ns, record.returned_ns, record.done_ns
    )
