"""The recent past of a stage, from the finished operations of its main thread: work, idle time, forwards, timeline.

The work of a stage on a device is the device's (`Kind.ON_DEVICE`): the thread's own steps only launch it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter

from ppengine.agent.pace import Pace
from ppengine.agent.ring_state import Track
from ppengine.common.ring import (
    BEGUN_NS,
    DETAIL,
    DONE_NS,
    KIND,
    RETURNED_NS,
    SIZE,
    STEP,
    WAITS,
    Kind,
    Record,
    Row,
    in_ms,
)
from ppengine.diagnosis.budgets import LEAST_LIMIT_MS, step_limit_ms
from ppengine.protocol.operation_kinds import RANK_WAITS

WINDOW_NS = 10_000_000_000
"""Window of percentiles and idle fraction, in nanoseconds."""
MOST_STEPS = 2048
"""Most steps in the percentiles, the newest: thousands more would be slow to sort."""
TIMELINE = 48
_LAUNCHED = 8
"""Number of launches kept: more than a stage has launched and not retired."""

# Plain integers: thousands of rows a second are looked at, and a member of an enum is slow to look up.
_FORWARD, _STEP, _ON_DEVICE = Kind.FORWARD.value, Kind.STEP.value, Kind.ON_DEVICE.value
_WAITS = frozenset(kind.value for kind in WAITS)
_RANK_WAITS = frozenset(kind.value for kind in RANK_WAITS)
_MEMORY, _SAMPLED, _WORKED = range(3)
"""Places in the sums of a step: memory work, sampling, layers and head."""
_PARTS: dict[int, int] = {
    **dict.fromkeys((kind.value for kind in (Kind.SWAP_OUT, Kind.SWAP_IN, Kind.COPY, Kind.MAP)), _MEMORY),
    Kind.SAMPLE.value: _SAMPLED,
    Kind.FORWARD.value: _WORKED,
    Kind.HEAD.value: _WORKED,
}
_done_ns = itemgetter(DONE_NS)


class History(Track):
    """The past of a stage's main thread, as far as it is shown or judged."""

    def __init__(self) -> None:
        super().__init__()
        self.newest_ns = 0
        """Newest time in any record."""
        self._first_ns = 0
        self._recent: deque[Row] = deque(maxlen=TIMELINE)
        self._waits: deque[tuple[int, int]] = deque()
        """Begin and end of each wait, oldest first."""
        self._waited_ns = 0
        """Sum of `_waits`."""
        self._own_ms: deque[float] = deque(maxlen=MOST_STEPS)
        self._ends_ns: deque[int] = deque(maxlen=MOST_STEPS)
        """Ends of the steps in `_own_ms`."""
        self._works: dict[int, float] = {}
        self._doubted: set[int] = set()
        """Classes of tokens, as in `_works`, whose newest step took longer than the limit of a hang."""
        self._step = 0
        self._sums = [0, 0, 0]
        """Nanoseconds of the finished parts of step `_step`."""
        self._joins: list[tuple[int, int]] = []
        """Begin and end of the waits for other ranks since the newest finished part: they lie within the next one."""
        self.by_device = False
        """Whether a device does the work; known from its first step."""
        self._launches: deque[tuple[int, float]] = deque(maxlen=_LAUNCHED)
        """Newest steps of a stage on a device, and the own time of their launches in ms."""
        self._worked: deque[tuple[int, int]] = deque()
        """Begin and end of the device's work, oldest first."""
        self._worked_ns = 0
        """Sum of `_worked`."""
        self.pace = Pace()

    def feed(self, rows: Sequence[Row], gone: Iterable[int] = ()) -> list[Row]:
        """Take rows as `Track.feed` does, and enter the finished ones into the history."""
        ended = super().feed(rows, gone)
        # An operation inside a step began later, and comes first if both ended in one tick of the clock.
        ended.reverse()
        ended.sort(key=_done_ns)
        waits, waited_ns, sums = self._waits, 0, self._sums
        for row in ended:
            kind, begun_ns, over_ns = row[KIND], row[BEGUN_NS], row[DONE_NS]
            if kind in _WAITS:
                # An asynchronous one occupies the thread only until its call returns.
                over_ns = row[RETURNED_NS] or over_ns
                waits.append((begun_ns, over_ns))
                waited_ns += over_ns - begun_ns
                if kind in _RANK_WAITS:
                    self._joins.append((begun_ns, over_ns))
                continue
            if kind == _ON_DEVICE:  # Its step is over, while others are launched.
                self._end_on_device(row)
                continue
            if row[STEP] != self._step:
                self._step = row[STEP]
                sums[:] = 0, 0, 0
            if kind == _STEP:
                self._end_step(row)
                sums[:] = 0, 0, 0
            elif (part := _PARTS.get(kind)) is not None:
                took_ns = over_ns - begun_ns - self._joined_since(begun_ns)
                sums[part] += took_ns
                if kind == _FORWARD and not row[STEP] and not self.by_device:
                    # Boot runs the largest ones outside of a step, so that every stage has a history.
                    self._expect(0, row[SIZE], took_ns / 1e6)
        self._waited_ns += waited_ns
        # A step is one row of several: twice as many hold enough of the others.
        self._recent.extend([row for row in ended[-2 * TIMELINE :] if row[KIND] != _STEP][-TIMELINE:])
        times = [record.returned_ns or record.enqueued_ns for record in self._pending.values()]
        times += [row[DONE_NS] for row in ended[-1:]]
        self.newest_ns = max(self.newest_ns, *times) if times else self.newest_ns
        if rows:
            self._first_ns = self._first_ns or rows[0][BEGUN_NS]
        return ended

    def _joined_since(self, begun_ns: int) -> int:
        """Return the nanoseconds of waits for other ranks since `begun_ns`, and forget them."""
        joins, self._joins = self._joins, []
        return sum(over_ns - from_ns for from_ns, over_ns in joins if from_ns >= begun_ns)

    def last_op(self) -> Record | None:
        """Return the newest operation inside a step that has ended."""
        row = next((row for row in reversed(self._recent) if row[KIND] != _ON_DEVICE), None)
        return None if row is None else Record._make(row)

    def step_ms(self, now_ns: int) -> tuple[float | None, float | None]:
        """Return p50 and p99 of the own work, in ms, of the steps that ended in the window."""
        while self._ends_ns and self._ends_ns[0] < now_ns - WINDOW_NS:
            self._ends_ns.popleft()
            self._own_ms.popleft()
        own = sorted(self._own_ms)
        if not own:
            return None, None
        return round(own[(len(own) - 1) // 2], 3), round(own[-(-99 * len(own) // 100) - 1], 3)

    def idle_fraction(self, now_ns: int) -> float | None:
        """Return the share of the window (or of the time since the first record) spent waiting.

        For a device it is the share without work, as far as steps are done.
        """
        begin = max(now_ns - WINDOW_NS, self._first_ns)
        if not self._first_ns or now_ns <= begin:
            return None
        while self._waits and self._waits[0][1] <= begin:
            begun_ns, over_ns = self._waits.popleft()
            self._waited_ns -= over_ns - begun_ns
        idle = self._waited_ns
        if self._waits:
            idle -= max(0, begin - self._waits[0][0])
        op = self.open_op()
        if op is not None and op.kind in WAITS:
            idle += now_ns - max(op.enqueued_ns, begin)
        if self.by_device:
            idle = max(0, now_ns - begin - self._worked_since(begin))
        return round(min(1.0, idle / (now_ns - begin)), 4)

    def timeline(self, now_ns: int) -> list[list[float]]:
        """Return recent operations, oldest first: kind, micro-batch, start in ms ago, length in ms."""
        op = self.open_op()
        shown: list[Row] = [row for row in self._recent if row[BEGUN_NS] >= now_ns - WINDOW_NS]
        shown += [op] if op is not None else []
        return [
            [kind, step, in_ms(now_ns - begun_ns), in_ms((done_ns or now_ns) - begun_ns)]
            for _, kind, _, step, begun_ns, _, done_ns, *_ in shown[-TIMELINE:]
        ]

    def work_ms(self) -> list[tuple[int, float]]:
        """Return the longest recent times of layers, head and sampling as (most tokens, ms), by rising tokens."""
        return [(1 << bucket, round(self._works[bucket], 3)) for bucket in sorted(self._works)]

    def _end_step(self, row: Row) -> None:
        begun_ns, done_ns, size = row[BEGUN_NS], row[DONE_NS], row[SIZE]
        memory_ns, sampled_ns, worked_ns = self._sums
        own_ns = done_ns - begun_ns
        # By time: a wait for tokens counts for the step that samples them.
        for from_ns, to_ns in reversed(self._waits):
            if to_ns <= begun_ns:
                break
            own_ns -= to_ns - (from_ns if from_ns > begun_ns else begun_ns)
        own_ms = own_ns / 1e6 if own_ns > 0 else 0.0
        if self.by_device:
            self._launches.append((row[STEP], own_ms - (memory_ns + sampled_ns) / 1e6))
            return
        self._own_ms.append(own_ms)
        self._ends_ns.append(done_ns)
        if size:
            # Sampling may change with every request: it is no slowness of the stage.
            self.pace.add(size, row[DETAIL], own_ms - (memory_ns + sampled_ns) / 1e6)
            self._expect(row[STEP], size, (worked_ns + sampled_ns) / 1e6)

    def _end_on_device(self, row: Row) -> None:
        if not self.by_device:
            # Earlier launches cannot be compared with device work.
            self.by_device, self.pace = True, Pace()
            self._works.clear()
            self._doubted.clear()
            self._own_ms.clear()
            self._ends_ns.clear()
        begun_ns, done_ns = row[BEGUN_NS], row[DONE_NS]
        took = (done_ns - begun_ns) / 1e6
        self._expect(row[STEP], row[SIZE], took)
        if row[STEP]:  # Otherwise it is of boot, which runs the largest ones.
            self._own_ms.append(took)
            self._ends_ns.append(done_ns)
            self._worked.append((begun_ns, done_ns))
            self._worked_ns += done_ns - begun_ns
            # Without the sampling behind it, as above. A step takes as long as the longer of launch and work.
            launch_ms = next((ms for step, ms in self._launches if step == row[STEP]), 0.0)
            self.pace.add(row[SIZE], row[DETAIL], max(launch_ms, (row[RETURNED_NS] - begun_ns) / 1e6))

    def _worked_since(self, begin_ns: int) -> int:
        """Return the nanoseconds of device work since `begin_ns`; forget earlier work."""
        while self._worked and self._worked[0][1] <= begin_ns:
            begun_ns, done_ns = self._worked.popleft()
            self._worked_ns -= done_ns - begun_ns
        before = max(0, begin_ns - self._worked[0][0]) if self._worked else 0
        return self._worked_ns - before

    def _expect(self, step: int, tokens: int, took: float) -> None:
        """Note the time of a step. The first one beyond the limit of a hang is left out: it raises no limit.

        It hung, or waited on the device for a rank that did. Two in a row of one class are work. Boot's steps have no
        number and are never left out.
        """
        bucket = (tokens - 1).bit_length()
        doubtful = took > LEAST_LIMIT_MS and step and bucket not in self._doubted
        if doubtful and took > step_limit_ms(self.work_ms(), tokens):
            self._doubted.add(bucket)
            return
        self._doubted.discard(bucket)
        known = self._works.get(bucket, 0.0)
        self._works[bucket] = took if took > known else known + (took - known) / 16
