"""Figures of the last hour: one point a second from snapshots, and series of them for a time span."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

import msgspec
from ppengine.protocol.snapshot import Latency, Queues, Snapshot, Throughput
from ppengine.protocol.stage_info import KvBlocks, StageMemory

from ppconsole.model.units import ratio

POINTS_MOST = 3600
PERIOD_S = 1.0
SPANS_S = (60, 300, 900, 3600)
"""Time spans of the display in seconds."""
_REDRAWN = 4
"""A series of long cells is computed again after this part of a cell."""
_HELD_S = 11.0
"""A point counts until the next one, at most this long: a large engine keeps a snapshot every 10 s."""


class Point(NamedTuple):
    """Figures at one time (`wall`: Unix seconds). Totals count from the begin of the engine."""

    wall: float
    output_tok_s: float | None
    waiting: float
    running: float
    kv_use: float | None
    """Share of the mapped KV blocks that requests use, in percent."""
    stage_memory_use: float | None
    """Memory in use of the fullest stage, share of its limit in percent."""
    preemptions_total: float
    swaps_total: float
    preemptions_s: float | None = None
    swaps_s: float | None = None
    ttft_p99_s: float | None = None
    """99th percentile of the time to first token in seconds; None: no token in its window, or an old recording."""


class StageFigures(msgspec.Struct, kw_only=True):
    """The part of a stage that a point is made of."""

    kv_blocks: KvBlocks = msgspec.field(default_factory=KvBlocks)
    memory: StageMemory = msgspec.field(default_factory=StageMemory)


class Figures(msgspec.Struct, kw_only=True):
    """The part of a snapshot that a point is made of: an hour of them is decoded when a console attaches."""

    sampled_at: float = 0.0
    stages: list[StageFigures] = []
    queues: Queues = msgspec.field(default_factory=Queues)
    throughput: Throughput = msgspec.field(default_factory=Throughput)
    latency: Latency = msgspec.field(default_factory=Latency)
    preemptions_total: int = 0
    swaps_total: int = 0


def measure(snapshot: Snapshot | Figures) -> Point:
    """Return the figures of one snapshot; rates need the point before."""
    kv = [
        each for stage in snapshot.stages if (each := ratio(stage.kv_blocks.used, stage.kv_blocks.mapped)) is not None
    ]
    memory = [each for stage in snapshot.stages if (each := ratio(stage.memory.used, stage.memory.limit)) is not None]
    return Point(
        snapshot.sampled_at, snapshot.throughput.output_tok_s, snapshot.queues.waiting, snapshot.queues.running,
        100 * max(kv) if kv else None, 100 * max(memory) if memory else None,
        snapshot.preemptions_total, snapshot.swaps_total, ttft_p99_s=snapshot.latency.ttft_s.p99,
    )  # fmt: skip


class Trend(NamedTuple):
    """One figure over time. `top`: end of its scale where that is known; else the scale ends at the maximum shown."""

    title: str
    metric: str
    """Its name in `Point` and in thresholds."""
    top: float | None = None
    unit: Literal["", "%", "s"] = ""
    peaks: bool = True
    """A cell of several points shows their maximum; otherwise their mean."""

    def value(self, point: Point) -> float | None:
        """Return the figure at one time."""
        found: float | None = getattr(point, self.metric)
        return found


TRENDS = (
    Trend("tok/s out", "output_tok_s", peaks=False),
    Trend("waiting", "waiting"),
    Trend("KV use", "kv_use", 100.0, "%"),
    Trend("TTFT p99", "ttft_p99_s", unit="s"),
    Trend("running", "running"),
    Trend("preempt/s", "preemptions_s"),
    Trend("swaps/s", "swaps_s"),
    Trend("memory", "stage_memory_use", 100.0, "%"),
)
"""In the order in which a panel with few rows shows them."""


class Trends:
    """At most an hour of points in order of time, one a second."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS_MOST)
        self.whole = False
        """Whether the points before this console were added."""
        self._series: dict[str, tuple[object, list[float | None]]] = {}
        """The newest series of each trend, with the span, size and time that it is of."""

    def newest(self, trend: Trend) -> float | None:
        """Return the newest value."""
        return trend.value(self.points[-1]) if self.points else None

    def take(self, snapshot: Snapshot) -> None:
        """Add the figures of a snapshot if a second is over. Time that goes back forgets the points after it."""
        wall = snapshot.sampled_at
        while self.points and self.points[-1].wall > wall:
            self.points.pop()
        if not self.points or wall - self.points[-1].wall >= PERIOD_S - 0.05:
            self.points.append(_with_rates(measure(snapshot), self.points[-1] if self.points else None))

    def put_before(self, older: Iterable[Point]) -> None:
        """Add points from before the first one, as many as an hour has."""
        first = self.points[0].wall if self.points else float("inf")
        found = [point for point in older if point.wall < first]
        points, self.points = self.points, deque(maxlen=POINTS_MOST)
        for point in (*found, *points):
            known = point.swaps_s is not None or not self.points
            self.points.append(point if known else _with_rates(point, self.points[-1]))
        self._series.clear()
        self.whole = True

    def copy(self) -> Trends:
        """Return the points up to now, for a display that is frozen."""
        made = Trends()
        made.points.extend(self.points)
        return made

    def series(self, trend: Trend, span_s: int, cells: int) -> list[float | None]:
        """Return `cells` values of the newest `span_s` seconds, the newest last; None: no point is known.

        Cells begin at multiples of their length, so that old ones keep their value while time goes on.
        """
        if not self.points or cells < 1:
            return [None] * cells
        length, newest = span_s / cells, self.points[-1].wall
        key = span_s, cells, int(newest / max(PERIOD_S, length / _REDRAWN))
        if (known := self._series.get(trend.title)) is None or known[0] != key:
            known = self._series[trend.title] = key, self._computed(trend, length, cells)
        return known[1]

    def _computed(self, trend: Trend, length: float, cells: int) -> list[float | None]:
        base = int(self.points[-1].wall / length) - cells + 1  # number of the first cell shown
        inside: list[list[float]] = [[] for _ in range(cells)]
        held: list[float | None] = [None] * cells
        for point, until in _with_ends(self._since(base * length - _HELD_S)):
            value = trend.value(point)
            first, last = int(point.wall / length) - base, int(until / length) - base
            if value is None or last < 0:
                continue
            if 0 <= first < cells:
                inside[first].append(value)
            for cell in range(max(0, first + 1), min(cells, last + 1)):
                held[cell] = value
        pick: Callable[[Sequence[float]], float] = max if trend.peaks else _mean
        return [pick(each) if each else held[cell] for cell, each in enumerate(inside)]

    def _since(self, wall: float) -> list[Point]:
        recent = list(takewhile(lambda point: point.wall >= wall, reversed(self.points)))
        return recent[::-1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _with_ends(points: Iterable[Point]) -> Iterable[tuple[Point, float]]:
    """Yield each point with the time until which it counts."""
    before: Point | None = None
    for point in points:
        if before is not None:
            yield before, min(point.wall, before.wall + _HELD_S)
        before = point
    if before is not None:
        yield before, before.wall


def _with_rates(point: Point, before: Point | None) -> Point:
    """Return a point with its rates since the point before; an engine that was restarted counts from 0."""
    if before is None:
        return point
    seconds = point.wall - before.wall
    preempted, swapped = point.preemptions_total - before.preemptions_total, point.swaps_total - before.swaps_total
    if preempted < 0 or swapped < 0 or seconds <= 0:
        return point
    return point._replace(preemptions_s=preempted / seconds, swaps_s=swapped / seconds)
