"""Both ends of every edge of this node, compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from ppengine.agent.stage_watch import StageWatch
from ppengine.common.edge_comparison import EdgeComparison, Excuses
from ppengine.protocol.stage_samples import StageSample


class EdgeWatch:
    """Compares what the rings of both ends have. Call `look` with every sample of the stages."""

    def __init__(self) -> None:
        self._comparisons: defaultdict[int, EdgeComparison] = defaultdict(EdgeComparison)
        """By rank: edges connect equal ranks."""

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
                excuses = Excuses(ends[1].waited_ns, ends[0].throttled_us + ends[1].throttled_us, paused_ns)
                comparison = self._comparisons[sample.rank]
                found = comparison.look(now_ns, (sample.index, edge.peer), sent, posted, excuses)
                sample.edges[index] = msgspec.structs.replace(edge, conflict=found.conflict, pace=found.pace)
