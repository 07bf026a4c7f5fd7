"""The present operation of a thread, from its ring records, and its text. `step_history` has the stage's past.

A record comes twice, begun and ended; open ones are read again at each look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppengine.common.groups import Groups
from ppengine.common.ring import DONE_NS, KIND, SEQ, WAITS, Kind, Record, Row, in_ms
from ppengine.protocol.operation_kinds import RANK_WAITS
from ppengine.protocol.place import Place
from ppengine.protocol.stage_info import StreamInfo, Waiting

MAX_PENDING = 64
_ARROWS = {
    Kind.RECEIVE: "<", Kind.TOKEN_RETURN: "<", Kind.ALL_REDUCE: "<", Kind.ALL_GATHER: "<",
    Kind.SEND: ">", Kind.ROOM: ">",
}  # fmt: skip
_NAMES = {kind.value: kind.word for kind in Kind}
_WHAT = {
    Kind.IDLE: "step", Kind.MASK: "mask", Kind.RECEIVE: "receive", Kind.TOKEN_RETURN: "receive",
    Kind.SEND: "send", Kind.ROOM: "send",
}  # fmt: skip
_FIRST = Place(0, 0)
_OUTERMOST = frozenset({Kind.STEP.value, Kind.IDLE.value})
"""Operations that begin only when their thread is in no other."""


def kind_name(kind: int) -> str:
    """Return `forward` for 3, and so on; `kind99` for one that this version does not know."""
    return _NAMES.get(kind, f"kind{kind}")


def op_text(record: Record) -> str:
    """Return `receive<1 m7`: kind, peer and micro-batch."""
    arrow = _ARROWS.get(Kind(record.kind)) if record.kind in _NAMES else None
    peer = f"{arrow}{record.peer}" if arrow and record.peer >= 0 else ""
    return f"{kind_name(record.kind)}{peer}" + (f" m{record.step}" if record.step else "")


def waiting_on(op: Record | None, now_ns: int, stage: int | None = None) -> Waiting | None:
    """Return the peer that an open operation of `stage` waits for; None if it is work, or there is none.

    A send waits for its peer once its call has returned.
    """
    if op is None or not (op.kind in WAITS or (op.kind == Kind.SEND and op.returned_ns)):
        return None
    what = _WHAT.get(Kind(op.kind), "collective")
    if op.kind in RANK_WAITS:
        return Waiting(stage=stage, what=what, since_ms=in_ms(now_ns - op.enqueued_ns), rank=op.peer)
    return Waiting(stage=op.peer if op.peer >= 0 else None, what=what, since_ms=in_ms(now_ns - op.enqueued_ns))


def stream_info(
    name: str, owner: str, track: Track, now_ns: int, place: Place = _FIRST, groups: Groups | None = None
) -> StreamInfo:
    """Return one ring of `place` as a stream: its open operation, and how many asynchronous ones are not done."""
    op = track.open_op() or next(iter(track.unfinished()), None)
    wait = waiting_on(op, now_ns, place.stage)
    return StreamInfo(
        name=name,
        owner=owner,
        op=None if op is None else op_text(op),
        age_ms=None if op is None else in_ms(now_ns - op.enqueued_ns),
        pending=len(track.unfinished()),
        waits_for=None if wait is None else _name(wait, place.rank, groups),
    )


def _name(wait: Waiting, rank: int, groups: Groups | None) -> str:
    """Return the name of the place that is waited for: edges connect equal ranks."""
    if wait.stage is None:
        return "core"
    place = Place(wait.stage, rank if wait.rank is None else wait.rank)
    return f"stage {place.stage}" if groups is None else groups.text(place)


class Track:
    """The open operations of one ring."""

    def __init__(self) -> None:
        self.seen = 0
        """Newest sequence number fed."""
        self._pending: dict[int, Record] = {}

    def pending(self) -> list[int]:
        """Return the sequence numbers to read again."""
        return list(self._pending)

    def feed(self, rows: Sequence[Row], gone: Iterable[int] = ()) -> list[Row]:
        """Take pending and new rows by rising number; return those that have ended.

        `gone`: pending ones that the ring has overwritten.
        """
        pending = self._pending
        for seq in gone:
            pending.pop(seq, None)
        for row in rows:
            if row[SEQ] > self.seen:
                break
            pending.pop(row[SEQ], None)
        pending.update((row[SEQ], Record._make(row)) for row in rows if not row[DONE_NS])
        # An exception leaves operations open: a new step, or a wait for one, means that the thread has left them.
        newest = next((row[SEQ] for row in reversed(rows) if row[KIND] in _OUTERMOST), 0)
        left = [seq for seq, record in pending.items() if seq < newest and not record.returned_ns]
        for seq in left:
            del pending[seq]
        for seq in sorted(pending)[:-MAX_PENDING]:
            del pending[seq]
        if rows:
            self.seen = max(self.seen, rows[-1][SEQ])
        return [row for row in rows if row[DONE_NS]]

    def open_op(self) -> Record | None:
        """Return the thread's present operation: the newest open one, `step` only if nothing is inside it.

        An asynchronous operation whose call has returned does not occupy the thread.
        """
        occupying = [record for record in self._pending.values() if not record.returned_ns]
        return max(occupying, key=lambda record: record.seq, default=None)

    def unfinished(self) -> list[Record]:
        """Return the asynchronous operations whose call has returned and that are not done."""
        return [record for record in self._pending.values() if record.returned_ns]
