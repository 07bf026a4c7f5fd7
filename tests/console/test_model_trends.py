"""Trends: an hour of points and no more, spans, scales, rates."""

from __future__ import annotations

import gc
import sys
from types import FunctionType, ModuleType

import msgspec
import pytest
import snapshots
from ppconsole.model import trends
from ppconsole.model.trends import POINTS_MOST, SPANS_S, TRENDS, Trends
from ppconsole.view import trend_rows
from ppconsole.view.cells import text_of, width_of
from ppengine.protocol.frames import decode_as, encode
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.snapshot import Latency, Queues, Snapshot, Throughput

BY_TITLE = {trend.title: trend for trend in TRENDS}
SMALL = snapshots.snapshot(1, 0)


def take(made: Trends, wall: float, waiting: int = 0, preempted: int = 0, swapped: int = 0, rate: float = 10.0) -> None:
    SMALL.sampled_at, SMALL.queues = wall, Queues(waiting=waiting)
    SMALL.preemptions_total, SMALL.swaps_total = preempted, swapped
    SMALL.throughput = Throughput(output_tok_s=rate)
    made.take(SMALL)


def footprint(root):
    """Return the bytes of all that `root` keeps alive, types and modules aside."""
    seen, open_ones, size = set(), [root], 0
    while open_ones:
        one = open_ones.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        open_ones += gc.get_referents(one)
    return size


def test_a_day_takes_no_more_memory_than_an_hour():
    """Bytes are those of the model, blocks those of the whole process. tracemalloc takes four times as long."""
    made, sizes = Trends(), []
    gc.collect()
    blocks = sys.getallocatedblocks()
    for second in range(24 * 3600):
        take(made, 1e9 + second, second % 977, second, second // 2)
        if second % 7200 == 0:
            for trend in TRENDS:
                made.series(trend, 3600, 80)
        if (second + 1) % 7200 == 0:
            gc.collect()
            sizes.append((footprint(made), sys.getallocatedblocks() - blocks))
    assert len(made.points) == POINTS_MOST
    assert made.points[-1].wall - made.points[0].wall == POINTS_MOST - 1
    for bytes_or_blocks in zip(*sizes, strict=True):
        assert max(bytes_or_blocks) < bytes_or_blocks[0] * 1.05, sizes


def test_ten_snapshots_a_second_are_one_point_a_second():
    made = Trends()
    for tenth in range(600):
        take(made, 1e9 + tenth / 10)
    assert 55 <= len(made.points) <= 61


@pytest.mark.parametrize("span", SPANS_S)
@pytest.mark.parametrize("cells", [10, 60, 97, 300])
def test_a_peak_is_seen_in_every_span_and_size(span, cells):
    made = Trends()
    for second in range(3600):
        take(made, 1e9 + second, 500 if second == 3580 else 3)
    series = made.series(BY_TITLE["waiting"], span, cells)
    assert len(series) == cells and max(value or 0 for value in series) == 500
    assert None not in series[1:], "a second without a point of its own has the value before"


def test_old_cells_keep_their_value_while_time_goes_on():
    made = Trends()
    for second in range(900):
        take(made, 1e9 + second, second * 7919 % 1000)
    before = made.series(BY_TITLE["waiting"], 300, 60)
    for second in range(900, 905):
        take(made, 1e9 + second, 0)
    assert made.series(BY_TITLE["waiting"], 300, 60)[:-2] == before[1:-1]


def test_a_gap_is_blank_and_a_value_of_0_is_not():
    made = Trends()
    take(made, 1e9, 5)
    for second in range(200, 301):
        take(made, 1e9 + second, 0)
    series = made.series(BY_TITLE["waiting"], 300, 60)
    assert None in series[5:39] and series[-1] == 0
    assert trend_rows.columns([None, 0.0, 50.0, 100.0], 100.0, 1) == [" ▁▄█"]
    assert trend_rows.columns([0.0, 100.0], 100.0, 2) == [" █", "▁█"]


def test_rates_are_those_between_points_and_a_restart_is_no_rate():
    made = Trends()
    take(made, 1e9, preempted=4, swapped=1)
    take(made, 1e9 + 2, preempted=10, swapped=2)
    assert made.newest(BY_TITLE["preempt/s"]) == 3.0 and made.newest(BY_TITLE["swaps/s"]) == 0.5
    take(made, 1e9 + 3, preempted=0, swapped=0)
    assert made.newest(BY_TITLE["preempt/s"]) is None


def test_points_before_the_first_are_joined():
    old, made = Trends(), Trends()
    for second in range(100):
        take(old, 1e9 + second, 1, preempted=second)
    for second in range(98, 110):
        take(made, 1e9 + second, 2, preempted=second)
    made.put_before(old.points)
    walls = [point.wall - 1e9 for point in made.points]
    assert walls == list(range(110)) and [point.waiting for point in made.points] == [1] * 98 + [2] * 12
    assert all(point.preemptions_s == 1.0 for point in list(made.points)[1:])


def test_time_that_goes_back_forgets_what_came_after_it():
    made = Trends()
    for second in range(100):
        take(made, 1e9 + second)
    take(made, 1e9 + 50)
    assert made.points[-1].wall == 1e9 + 50 and len(made.points) == 51


def test_scales_are_fixed_or_shown():
    made = Trends()
    for second in range(60):
        take(made, 1e9 + second, 137 if second == 10 else 2)
    rows = {text_of(row)[:10].strip(): text_of(row) for row in trend_rows.rows(made, 60, 100, 8)}
    assert rows["KV use"].rstrip().endswith("100%") and "█" not in rows["KV use"]
    assert rows["waiting"].rstrip().endswith("137") and rows["waiting"].count("█") == 1
    assert "SCALE" in rows["TRENDS  l"]


@pytest.mark.parametrize("height", [0, 1, 2, 3, 8, 15, 48])
@pytest.mark.parametrize("width", [60, 81, 200])
def test_rows_fill_the_height_and_the_width(width, height):
    made = Trends()
    for second in range(60):
        take(made, 1e9 + second, second)
    for known in (made, Trends()):
        rows = trend_rows.rows(known, 300, width, height)
        assert len(rows) == height and all(width_of(text_of(row)) <= width for row in rows)


def test_the_hour_is_cheap_to_show():
    """Work, not time: long spans are computed again after a part of a cell, and short ones read few points."""
    made = Trends()
    for second in range(3600):
        take(made, 1e9 + second)
    made.series(TRENDS[0], 3600, 60)
    counted = []
    made._computed = lambda *each: counted.append(each) or []  # type: ignore[method-assign]
    for second in range(3600, 3660):
        take(made, 1e9 + second)
        made.series(TRENDS[0], 3600, 60)
    assert len(counted) <= trends._REDRAWN + 1


def test_the_time_to_first_token_is_a_trend_in_seconds():
    made = Trends()
    for second in range(60):
        picture = snapshots.snapshot(1, 0, sampled_at=1e9 + second)
        picture.latency = Latency(ttft_s=Quantiles(p50=0.1, p90=0.4, p99=2.5 if second == 30 else 0.25, count=9))
        made.take(picture)
    row = next(text_of(line) for line in trend_rows.rows(made, 60, 80, 9) if "TTFT p99" in text_of(line))
    assert row.split()[:3] == ["TTFT", "p99", "250ms"] and row.split()[-1] == "2.5s" and row.count("█") == 1


def test_a_recording_without_latencies_is_read_and_leaves_that_trend_blank():
    old = msgspec.msgpack.decode(encode(snapshots.snapshot(1, 0)))
    del old["latency"]
    made = Trends()
    made.take(decode_as(Snapshot, encode(old)))
    assert made.newest(BY_TITLE["TTFT p99"]) is None and made.newest(BY_TITLE["running"]) == 0
    row = next(text_of(line) for line in trend_rows.rows(made, 60, 80, 9) if "TTFT p99" in text_of(line))
    assert row.split() == ["TTFT", "p99", "?"]


@pytest.mark.parametrize("height", [5, 9, 22])
def test_the_screen_of_trends_has_a_time_axis_and_no_second_title(height: int) -> None:
    shown = [text_of(line) for line in trend_rows.screen(Trends(), 300, 80, height)]
    assert len(shown) == height and not any("TRENDS" in line for line in shown)
    assert shown[-1].split() == ["-5", "min", "now", "SCALE"]
    assert shown[-1].index("-5 min") == 17 and shown[-1].index("now") + 3 == 80 - 8
