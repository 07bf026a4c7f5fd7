"""From ring records to what a stage is doing: the open operation, own work, idle time, the timeline.

`Track` remembers one ring. Records come in twice, begun and ended; what is still open is read again at each look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ppengine.monitor.pace import Pace
from ppengine.protocol.snapshot import StreamInfo, Waiting
from ppengine.ring import Kind, Record

WINDOW_NS = 10_000_000_000
"""Percentiles and the idle fraction look back this far."""
TIMELINE = 48
MAX_PENDING = 64
WAITS = frozenset({Kind.IDLE, Kind.RECEIVE, Kind.ROOM, Kind.COLLECTIVE, Kind.TOKEN_RETURN})
"""Operations in which a stage does no work of its own. A send is work: the kernel takes the message at once."""
_ARROWS = {Kind.RECEIVE: "<", Kind.TOKEN_RETURN: "<", Kind.SEND: ">", Kind.ROOM: ">"}
_NAMES = {kind.value: kind.name.lower() for kind in Kind}
_WHAT = {Kind.IDLE: "step", Kind.RECEIVE: "receive", Kind.TOKEN_RETURN: "receive", Kind.SEND: "send", Kind.ROOM: "send"}


# Plain integers: thousands of records a second are looked at, and a member of an enum is slow to look up.
_IDLE, _FORWARD, _STEP = Kind.IDLE.value, Kind.FORWARD.value, Kind.STEP.value
_WAIT_KINDS = frozenset(kind.value for kind in WAITS)
_MEMORY_KINDS = frozenset(kind.value for kind in (Kind.SWAP_OUT, Kind.SWAP_IN, Kind.COPY, Kind.MAP))


class Span(NamedTuple):
    """An interval in monotonic nanoseconds."""

    start: int
    end: int


def kind_name(kind: int) -> str:
    """Return `forward` for 3, and so on; `kind99` for one that this version does not know."""
    return _NAMES.get(kind, f"kind{kind}")


def op_text(record: Record) -> str:
    """Return `receive<1 m7`: kind, peer and micro-batch."""
    arrow = _ARROWS.get(Kind(record.kind)) if record.kind in _NAMES else None
    peer = f"{arrow}{record.peer}" if arrow and record.peer >= 0 else ""
    return f"{kind_name(record.kind)}{peer}" + (f" m{record.step}" if record.step else "")


def waiting_on(op: Record | None, now_ns: int) -> Waiting | None:
    """Return whom an open operation waits for; None if it is work, or there is none.

    A message waits for its peer once the call that began to send it has come back.
    """
    if op is None or not (op.kind in WAITS or (op.kind == Kind.SEND and op.returned_ns)):
        return None
    what = _WHAT.get(Kind(op.kind), "collective")
    return Waiting(stage=op.peer if op.peer >= 0 else None, what=what, since_ms=_ms(now_ns - op.enqueued_ns))


def stream_info(name: str, owner: str, track: Track, now_ns: int) -> StreamInfo:
    """Return one ring as a stream: its open operation, and how many asynchronous ones are not done."""
    op = track.open_op() or next(iter(track.unfinished()), None)
    wait = waiting_on(op, now_ns)
    return StreamInfo(
        name=name,
        owner=owner,
        op=None if op is None else op_text(op),
        age_ms=None if op is None else _ms(now_ns - op.enqueued_ns),
        pending=len(track.unfinished()),
        waits_for=None if wait is None else ("driver" if wait.stage is None else f"stage {wait.stage}"),
    )


class Track:
    """The recent past of one ring."""

    def __init__(self) -> None:
        self.seen = 0
        """Newest sequence number that was fed."""
        self.newest_ns = 0
        """Time of the newest thing that any record tells."""
        self._first_ns = 0
        self._pending: dict[int, Record] = {}
        self._recent: deque[Record] = deque(maxlen=TIMELINE)
        self._waits: deque[Span] = deque()
        self._waited_ns = 0
        """Sum of `_waits`."""
        self._steps: deque[tuple[int, float]] = deque()
        self._forwards: dict[int, float] = {}
        self._memory_ms = 0.0
        """Memory work since the last step ended: its length is not in the tokens."""
        self.pace = Pace()

    def pending(self) -> list[int]:
        """Return the sequence numbers to look at again."""
        return list(self._pending)

    def feed(self, records: Iterable[Record], gone: Iterable[int] = ()) -> None:
        """Take new records, and ones that were pending; `gone`: pending ones that the ring has lapped."""
        for seq in gone:
            self._pending.pop(seq, None)
        ended: list[tuple[int, int, Record]] = []
        pending, newest_ns = self._pending, self.newest_ns
        for record in records:
            seq, done_ns, kind = record.seq, record.done_ns, record.kind
            if seq > self.seen:
                self.seen = seq
                self._first_ns = self._first_ns or record.enqueued_ns
            if pending and kind in (_STEP, _IDLE):
                self._abandon(seq)
            if done_ns:
                pending.pop(seq, None)
                ended.append((done_ns, -seq, record))
            else:
                pending[seq] = record
            last_ns = done_ns or record.returned_ns or record.enqueued_ns
            if last_ns > newest_ns:
                newest_ns = last_ns
        self.newest_ns = newest_ns
        if len(pending) > MAX_PENDING:
            for seq in sorted(pending)[:-MAX_PENDING]:
                del pending[seq]
        # What is inside a step began later, and goes first where both ended in one tick of the clock.
        ended.sort()
        for _, _, record in ended:
            self._finish(record)

    def open_op(self) -> Record | None:
        """Return the operation that the thread is in now: the newest open one, `step` only if nothing is inside it.

        An asynchronous operation whose call came back does not hold the thread.
        """
        held = [record for record in self._pending.values() if not record.returned_ns]
        return max(held, key=lambda record: record.seq, default=None)

    def last_op(self) -> Record | None:
        """Return the newest operation inside a step that has ended."""
        return self._recent[-1] if self._recent else None

    def unfinished(self) -> list[Record]:
        """Return the asynchronous operations whose call came back and which are not done."""
        return [record for record in self._pending.values() if record.returned_ns]

    def step_ms(self, now_ns: int) -> tuple[float | None, float | None]:
        """Return p50 and p99 of the own work of the steps that ended in the window."""
        while self._steps and self._steps[0][0] < now_ns - WINDOW_NS:
            self._steps.popleft()
        own = sorted(ms for _, ms in self._steps)
        if not own:
            return None, None
        return round(own[(len(own) - 1) // 2], 3), round(own[-(-99 * len(own) // 100) - 1], 3)

    def idle_fraction(self, now_ns: int) -> float | None:
        """Return the share of the window (or of the time since the first record) spent waiting."""
        begin = max(now_ns - WINDOW_NS, self._first_ns)
        if not self._first_ns or now_ns <= begin:
            return None
        while self._waits and self._waits[0].end <= begin:
            gone = self._waits.popleft()
            self._waited_ns -= gone.end - gone.start
        idle = self._waited_ns
        if self._waits:
            idle -= max(0, begin - self._waits[0].start)
        op = self.open_op()
        if op is not None and op.kind in WAITS:
            idle += now_ns - max(op.enqueued_ns, begin)
        return round(min(1.0, idle / (now_ns - begin)), 4)

    def timeline(self, now_ns: int) -> list[list[float]]:
        """Return recent operations, oldest first: kind, micro-batch, start in ms ago, length in ms."""
        op = self.open_op()
        shown = [record for record in self._recent if record.enqueued_ns >= now_ns - WINDOW_NS]
        shown += [op] if op is not None else []
        return [
            [record.kind, record.step, _ms(now_ns - record.enqueued_ns),
             _ms((record.done_ns or now_ns) - record.enqueued_ns)]
            for record in shown[-TIMELINE:]
        ]  # fmt: skip

    def forward_ms(self) -> list[tuple[int, float]]:
        """Return how long forwards take here: (up to so many tokens, longest of the recent ones in ms), rising."""
        return [(1 << bucket, round(self._forwards[bucket], 3)) for bucket in sorted(self._forwards)]

    def _finish(self, record: Record) -> None:
        if record.kind == _STEP:
            own = self._own_ms(record)
            self._steps.append((record.done_ns, own))
            if record.size:
                self.pace.add(record.size, record.detail, own - self._memory_ms)
            self._memory_ms = 0.0
            return
        self._recent.append(record)
        if record.kind in _WAIT_KINDS:
            # An asynchronous one holds the thread only until its call comes back.
            span = Span(record.enqueued_ns, record.returned_ns or record.done_ns)
            self._waits.append(span)
            self._waited_ns += span.end - span.start
        elif record.kind == _FORWARD and record.size:
            bucket, took = (record.size - 1).bit_length(), (record.done_ns - record.enqueued_ns) / 1e6
            known = self._forwards.get(bucket, 0.0)
            self._forwards[bucket] = max(took, known + (took - known) / 16)
        elif record.kind in _MEMORY_KINDS:
            self._memory_ms += (record.done_ns - record.enqueued_ns) / 1e6

    def _abandon(self, seq: int) -> None:
        """Forget what an exception left open: a new step, or waiting for one, means that the thread is out of it."""
        for old in [old for old, record in self._pending.items() if old < seq and not record.returned_ns]:
            del self._pending[old]

    def _own_ms(self, step: Record) -> float:
        """Return the length of a step without the waits inside it, in ms."""
        waited = 0
        for span in reversed(self._waits):
            if span.end <= step.enqueued_ns:
                break
            waited += span.end - max(span.start, step.enqueued_ns)
        return max(0, step.done_ns - step.enqueued_ns - waited) / 1e6


def expected_ms(history: list[tuple[int, float]], tokens: int) -> float | None:
    """Return how long a forward of `tokens` should take by a stage's own history; None without one."""
    for size, took in history:
        if size >= tokens:
            return took
    return None if not history else history[-1][1] * tokens / history[-1][0]


def _ms(ns: int) -> float:
    return round(ns / 1e6, 2)
