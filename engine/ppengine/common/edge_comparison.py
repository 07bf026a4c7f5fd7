"""Both ends of edges compared: messages on which they disagree, and links that are slower than they were.

The agent compares edges within its node, the gateway those between two nodes.
"""

from __future__ import annotations

from typing import NamedTuple

from ppengine.common.edge_messages import Comparer, MessageTrack
from ppengine.common.link_pace import LinkWatch
from ppengine.common.ring import Kind
from ppengine.protocol.stage_samples import LinkPace, Message

_HELD_BACK_US = 50_000
"""Microseconds in a second by which a quota must hold a stage back to explain a late message."""


class Excuses(NamedTuple):
    """Sums so far that explain a late message without its link, and the error of its measured time."""

    waited_ns: int
    """Time in which the receiver's main thread could run and had no core."""
    throttled_us: int
    """Time in which a quota held back one of both stages."""
    paused_ns: int
    """Time in which stages of both nodes were paused for their stacks."""
    error_ns: int = 0
    """Largest error of the difference of both ends' clocks; 0 on one node."""


class EdgeFindings(NamedTuple):
    """Fields of the sender's `EdgeSample`."""

    conflict: tuple[Message | None, Message] | None
    pace: LinkPace | None


class EdgeComparison:
    """Compares edges by their sender and receiver. Call `look` with each sample of an edge."""

    def __init__(self) -> None:
        self._comparer = Comparer()
        self._links: dict[tuple[int, int], LinkWatch] = {}
        self._held: dict[tuple[int, int], tuple[int, int]] = {}
        """For each link, nanoseconds of pauses and microseconds of quotas at its newest whole second."""

    def look(
        self, now_ns: int, edge: tuple[int, int], sent: MessageTrack, posted: MessageTrack, excuses: Excuses
    ) -> EdgeFindings:
        """Compare the new messages of an edge, and return the findings of this moment."""
        sender, receiver = edge
        self._comparer.look(now_ns, sender, receiver, sent, posted)
        link = self._links.setdefault(edge, LinkWatch())
        generation, out = sent.edge(Kind.SEND, receiver)
        other, into = posted.edge(Kind.RECEIVE, sender)
        if generation == other:
            link.take(generation, out, into, excuses.error_ns)
        if link.due(now_ns):
            held = excuses.paused_ns, excuses.throttled_us
            before = self._held.get(edge, held)
            self._held[edge] = held
            disturbed = held[0] != before[0] or held[1] - before[1] > _HELD_BACK_US
            link.close(now_ns, excuses.waited_ns, disturbed=disturbed)
        return EdgeFindings(self._comparer.conflict(sender, receiver, now_ns), link.sample(now_ns))

    def forget(self, edge: tuple[int, int]) -> None:
        """Drop the usual times of an edge: its ends are on other nodes now."""
        self._links.pop(edge, None)
        self._held.pop(edge, None)
