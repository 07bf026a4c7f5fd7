"""The share of the time in which a rank waits for others of its stage: the rank that waits least is late."""

from __future__ import annotations

from collections import deque

from ppengine.common.ring import Record
from ppengine.protocol.operation_kinds import RANK_WAITS

WINDOW_NS = 1_000_000_000


class RankWaits:
    """Keeps the sums of a second."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()

    def share(self, now_ns: int, waited_ns: int, op: Record | None) -> float | None:
        """Return the share of the last second; None at the first look.

        `waited_ns`: sum of the waits that are over; `op`: the open operation, which may be a wait.
        """
        if op is not None and op.kind in RANK_WAITS:
            waited_ns += max(0, now_ns - op.enqueued_ns)
        marks = self._marks
        marks.append((now_ns, waited_ns))
        while len(marks) > 2 and now_ns - marks[1][0] >= WINDOW_NS:
            marks.popleft()
        then_ns, before_ns = marks[0]
        if now_ns <= then_ns:
            return None
        return round(min(1.0, max(0.0, (waited_ns - before_ns) / (now_ns - then_ns))), 3)
