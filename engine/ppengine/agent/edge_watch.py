"""Both ends of every edge of this host: messages on which they disagree, and links that are slower than they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ppengine.agent.edge_messages import Comparer
from ppengine.agent.link_pace import LinkWatch
from ppengine.agent.stage_watch import StageWatch
from ppengine.common.ring import Kind
from ppengine.protocol.stage_samples import StageSample

_HELD_BACK_US = 50_000
"""Microseconds in a second by which a quota must hold a stage back to explain a late message."""


class EdgeWatch:
    """Compares what the rings of both ends have. Call `look` with every sample of the stages."""

    def __init__(self) -> None:
        self._comparer = Comparer()
        self._links: dict[tuple[int, int], LinkWatch] = {}
        self._held: dict[tuple[int, int], tuple[int, int]] = {}
        """For each link, nanoseconds of pauses and microseconds of quotas at its newest whole second."""

    def look(
        self, now_ns: int, stages: Sequence[StageSample], watches: Mapping[tuple[int, int], StageWatch], paused_ns: int
    ) -> None:
        """Enter conflict and pace of each edge into the sample of its sender.

        `paused_ns`: time so far in which a stage was paused for its stacks.
        """
        for sample in stages:
            for index, edge in enumerate(sample.edges):
                ends = watches.get((sample.index, sample.rank)), watches.get((edge.peer, sample.rank))
                if edge.kind != "send" or ends[0] is None or ends[1] is None:
                    continue
                sent, posted = ends[0].messages("send"), ends[1].messages("receive")
                if sent is None or posted is None:
                    continue
                self._comparer.look(now_ns, sample.index, edge.peer, sent, posted)
                conflict = self._comparer.conflict(sample.index, edge.peer, now_ns)
                link = self._links.setdefault((sample.index, edge.peer), LinkWatch())
                generation, out = sent.edge(Kind.SEND, edge.peer)
                other, into = posted.edge(Kind.RECEIVE, sample.index)
                if generation == other:
                    link.take(generation, out, into)
                if link.due(now_ns):
                    held = paused_ns, ends[0].throttled_us + ends[1].throttled_us
                    before = self._held.get((sample.index, edge.peer), held)
                    self._held[sample.index, edge.peer] = held
                    disturbed = held[0] != before[0] or held[1] - before[1] > _HELD_BACK_US
                    link.close(now_ns, ends[1].waited_ns, disturbed=disturbed)
                sample.edges[index] = msgspec.structs.replace(edge, conflict=conflict, pace=link.sample(now_ns))
