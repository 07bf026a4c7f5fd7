"""Both ends of every edge of this node, compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from ppengine.agent.stage_watch import StageWatch
from ppengine.common.edge_comparison import EdgeComparison, Excuses
from ppengine.protocol.stage_samples import EdgeSample, Message, StageSample


class EdgeWatch:
    """Compares what the rings of both ends have. Call `look` with every sample of the stages."""

    def __init__(self) -> None:
        self._comparisons: defaultdict[int, EdgeComparison] = defaultdict(EdgeComparison)
        """By rank: edges connect equal ranks."""
        self._tokens: dict[tuple[int, int, int], tuple[tuple[int, int], int | None]] = {}
        """By rank, sender and receiver: generation and number of a conflict's message, and the tokens of its step."""

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
                tokens = None
                if found.conflict is not None:
                    tokens = self._tokens_of(found.conflict[1], edge, ends[0], ends[1])
                sample.edges[index] = msgspec.structs.replace(
                    edge, conflict=found.conflict, conflict_tokens=tokens, pace=found.pace
                )

    def _tokens_of(self, posted: Message, edge: EdgeSample, sender: StageWatch, receiver: StageWatch) -> int | None:
        """Return the tokens of a conflict's step if both stages recorded as many; kept longer than by a ring."""
        key, message = (sender.rank, sender.stage, receiver.stage), (edge.generation, posted.number)
        known = self._tokens.get(key)
        if known is None or known[0] != message:
            ours, theirs = sender.tokens_of(posted.step), receiver.tokens_of(posted.step)
            known = self._tokens[key] = message, ours if ours == theirs else None
        return known[1]
