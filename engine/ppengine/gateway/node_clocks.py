"""How far the monotonic clock of another node is from this host's, from the round trips of questions.

The answer with the shortest round trip is the best: half of that trip bounds its error. An older one is worse by the
drift of two clocks.
"""

from __future__ import annotations

from typing import NamedTuple

ASK_S = 1.0
"""Seconds between two questions to a node."""
DRIFT = 100e-6
"""Nanoseconds by which two clocks part in a nanosecond, at most."""


class Offset(NamedTuple):
    """Nanoseconds to add to a node's clock to get this host's, their largest error, and when they were measured."""

    ns: int
    error_ns: int
    at_ns: int

    def error_at(self, now_ns: int) -> float:
        """Return the largest error now, in nanoseconds."""
        return self.error_ns + (now_ns - self.at_ns) * DRIFT

    def contradicts(self, older: Offset) -> bool:
        """Return whether no clock fits both: the node was started again, or is another one of that name."""
        return abs(self.ns - older.ns) > self.error_ns + older.error_at(self.at_ns)


class NodeClocks:
    """The best known offset of each node."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[str, int]] = {}
        self._due_ns: dict[str, int] = {}
        self._known: dict[str, Offset] = {}

    def due(self, node: str, now_ns: int) -> bool:
        """Return whether to ask a node now."""
        return now_ns >= self._due_ns.get(node, 0)

    def ask(self, node: str, nonce: int, now_ns: int) -> None:
        """Note that a question went out."""
        self._due_ns[node] = now_ns + int(ASK_S * 1e9)
        self._asked = {known: one for known, one in self._asked.items() if one[0] != node}
        self._asked[nonce] = node, now_ns

    def take(self, nonce: int, theirs_ns: int, now_ns: int) -> None:
        """Note the answer of a node; one that was not asked for is dropped."""
        node, sent_ns = self._asked.pop(nonce, ("", 0))
        if not node:
            return
        offset = Offset((sent_ns + now_ns) // 2 - theirs_ns, (now_ns - sent_ns) // 2, now_ns)
        known = self._known.get(node)
        if known is None or offset.error_ns <= known.error_at(now_ns) or offset.contradicts(known):
            self._known[node] = offset

    def offset(self, node: str) -> Offset | None:
        """Return the offset of a node; None: it has not answered yet."""
        return self._known.get(node)
