"""Queue time, time to the first token, time between tokens: of each request, as quantiles, and after the end."""

from __future__ import annotations

import math

import msgspec
import pytest
from core_world import CoreWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.common.durations import SLICE_S, SLICES, Histogram, bucket_of
from ppengine.core.scheduler.token_gaps import TokenGaps
from ppengine.protocol.control import Inspect
from ppengine.protocol.finished import FINISHED_MOST
from ppengine.protocol.inspection import FinishedDetail, RequestDetail
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.snapshot import Event
from ppengine.protocol.verbs import Abort, Preempt, Release

WIDTH = 2 ** (1 / 16)


@given(st.lists(st.tuples(st.floats(1e-6, 1e5), st.integers(1, 5)), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_quantiles_are_at_most_a_bucket_off(seen):
    histogram = Histogram()
    for value, count in seen:
        histogram.add(value, count, 0.0)
    values = sorted(value for value, count in seen for _ in range(count))
    found = histogram.quantiles(1.0)
    assert found.count == len(values)
    for share, quantile in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        exact = values[math.ceil(share * len(values)) - 1]
        assert exact / WIDTH <= quantile <= exact * WIDTH
        assert values[0] <= quantile <= values[-1], "never outside of the durations that were seen"


def test_a_quantile_is_not_above_the_largest_duration_of_the_last_five_minutes():
    """The middle of the bucket of 26 s is 26.6 s."""
    histogram = Histogram()
    histogram.add(40.0, 1, 0.0)
    for second in range(100):
        histogram.add(26.0, 1, 150.0 + second)
    assert 26.0 < histogram.quantiles(250.0).p99 <= 40.0
    assert histogram.quantiles(301.0).p99 == 26.0, "the slice of the larger one is over"
    assert histogram.quantiles(301.0, 1e3).p50 == 26_000.0


def test_a_histogram_forgets_after_five_minutes_and_is_bounded():
    histogram = Histogram()
    assert histogram.quantiles(0.0) == Quantiles()
    for second in range(2000):
        histogram.add(1e-9 if second % 2 else 1e9, 1, float(second))
        histogram.add(0.0, 1, float(second))
    assert len(histogram._slices) <= SLICES + 1 and len(histogram.counts(2000.0)) <= 2
    assert 2 * SLICE_S * (SLICES - 1) <= histogram.quantiles(2000.0).count <= 2 * SLICE_S * (SLICES + 1)
    histogram.add(3.0, 1, 2100.0)
    assert histogram.quantiles(2285.0).count > 1
    assert histogram.quantiles(2350.0).count == 1 and histogram.quantiles(2350.0).p50 == pytest.approx(3.0, rel=0.03)
    assert histogram.quantiles(2401.0) == Quantiles()


def near(value):
    return pytest.approx(value, rel=0.025)


def test_the_latencies_of_requests_and_their_quantiles():
    world = CoreWorld(stages=1)

    def info():
        return {each.id: each for each in world.engine.reporter.build().requests}

    world.submit([1, 2, 3], name="a", max_tokens=6)
    assert (info()["a"].queue_s, info()["a"].ttft_s, info()["a"].itl_ms) == (None, None, None)
    world.now += 0.5
    world.engine.advance()
    assert info()["a"].queue_s == near(0.5) and info()["a"].ttft_s is None
    world.now += 0.2
    world.retire()
    assert info()["a"].ttft_s == near(0.7) and info()["a"].itl_ms is None
    for gap in (0.02, 0.02, 0.1):
        world.now += gap
        world.retire()
    assert info()["a"].itl_ms == near(140 / 3)
    latency = world.engine.reporter.build().latency
    assert (latency.queue_s.count, latency.ttft_s.count, latency.itl_ms.count) == (1, 1, 3)
    assert (latency.queue_s.p50, latency.ttft_s.p99) == (near(0.5), near(0.7))
    assert (latency.itl_ms.p50, latency.itl_ms.p99) == (near(20), near(100))
    world.now += 400
    assert world.engine.reporter.build().latency.itl_ms == Quantiles()


def test_the_time_without_blocks_is_a_gap_between_tokens():
    world = CoreWorld(stages=1)
    world.submit([1, 2, 3], name="a", max_tokens=5)
    world.engine.advance()
    for number in range(20):
        if number == 2:
            world.say(Preempt(request="a", mode="recompute", hold=True))
        elif not world.steps and number < 10:
            world.now += 30
            world.say(Release(request="a"))
        world.engine.advance()
        if world.steps:
            world.now += 0.01
            world.retire()
    assert world.engine.requests.live() == []
    assert world.engine.reporter.build().latency.itl_ms.p99 == near(30_010)


def test_every_gap_of_every_request_counts():
    world = CoreWorld(stages=2, max_num_seqs=64, utilization=1.0)
    for number in range(40):
        world.submit([number + 1, 2, 3], name=f"r{number}", max_tokens=50)
    world.engine.advance()
    while world.steps:
        world.now += 0.01
        world.retire()
    quantiles = world.engine.reporter.build().latency.itl_ms
    assert (quantiles.p50, quantiles.p90) == (near(20), near(20)) and quantiles.count == 40 * 49


def test_two_tokens_at_one_time_have_no_gap_between_them():
    world = CoreWorld(stages=1)
    world.submit([1, 2, 3], name="a", max_tokens=3)
    world.engine.advance()
    while world.steps:
        world.retire()
    (row,) = finished(world)
    assert row.itl_p99_ms < 0.01


def test_the_quantiles_of_one_request_are_its_own():
    world = CoreWorld(stages=1)

    def info(name):
        return next(each for each in world.engine.reporter.build().requests if each.id == name)

    world.submit([1, 2, 3], name="a", max_tokens=102)
    world.engine.advance()
    world.retire()
    assert info("a").itl_p99_ms is None, "one token"
    for number in range(100):
        world.now += 0.5 if number in (30, 60) else 0.02
        world.retire()
        if number == 50:
            world.submit([4, 5], name="b", max_tokens=60)
            world.engine.advance()
            assert info("b").itl_p99_ms is None and info("a").itl_p99_ms == near(500), "of 51 gaps one is long"
    answer = world.engine.details.answer(Inspect(nonce=1, what="request", request="a"))
    detail = msgspec.msgpack.decode(answer.data, type=RequestDetail)
    assert (detail.itl_p50_ms, detail.itl_p99_ms) == (near(20), near(500))
    assert info("b").itl_p99_ms == near(500), "it met one of them"
    while world.steps:
        world.now += 0.03
        world.retire()
    rows = {row.id: row for row in finished(world)}
    assert (rows["a"].itl_p50_ms, rows["a"].itl_p99_ms) == (near(20), near(500))
    assert rows["b"].itl_p50_ms < rows["b"].itl_p99_ms


@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=400))
@settings(max_examples=100, deadline=None)
def test_the_gaps_of_a_request_are_bounded_and_a_bucket_off_at_most(seen):
    gaps = TokenGaps(0.0)
    for value in seen:
        gaps.counts[bucket_of(value)] = gaps.counts.get(bucket_of(value), 0) + 1
    found, values = gaps.final_ms(), sorted(seen)
    for share, quantile in zip((0.5, 0.99), found, strict=True):
        exact = values[math.ceil(share * len(values)) - 1] * 1e3
        assert exact / WIDTH <= quantile <= exact * WIDTH
    assert {bucket_of(10.0**power) for power in range(-30, 31)} <= set(range(-320, 321))


@pytest.mark.parametrize("number", range(7))
def test_quantiles_of_a_live_request_are_half_a_second_to_a_second_old(number):
    gaps = [TokenGaps(0.0) for _ in range(number + 1)][-1]
    gaps.counts = {bucket_of(0.02): 1}
    assert gaps.quantiles_ms(5.0) == (near(20), near(20))
    gaps.counts = {bucket_of(0.05): 9}
    assert gaps.quantiles_ms(5.4) == (near(20), near(20)) and gaps.quantiles_ms(6.1) == (near(50), near(50))
    gaps.counts = {bucket_of(0.07): 9}
    assert gaps.final_ms() == (near(70), near(70)), "at its end it has all"


def finished(world):
    answer = world.engine.details.answer(Inspect(nonce=1, what="finished"))
    return msgspec.msgpack.decode(answer.data, type=FinishedDetail).requests


def test_requests_that_ended_are_kept_the_newest_first():
    world = CoreWorld(stages=1)
    assert finished(world) == []
    world.submit([1, 2, 3], name="a", max_tokens=3)
    world.now += 0.5
    while world.steps or world.engine.requests.live():
        world.engine.advance()
        world.now += 0.25
        world.retire()
    world.submit([1, 2], name="b", n=2, max_tokens=30)
    world.run(steps=3)
    world.say(Abort(request="b"))
    world.run()
    world.now += 10
    rows = finished(world)
    assert sorted(row.id for row in rows[:2]) == ["b", "b.1"] and [row.id for row in rows[2:]] == ["a"]
    last = rows[2]
    assert (last.prompt_tokens, last.output_tokens, last.reason) == (3, 3, "length")
    assert (last.queue_s, last.ttft_s, last.itl_ms) == (near(0.5), near(0.75), near(250))
    assert last.took_s == near(1.25) and last.ended_s == near(10) and last.wall > 1e9
    assert {(row.reason, row.by, row.ending) for row in rows[:2]} == {("abort", "eve", "abort by eve")}
    assert last.by == "" and last.ending == "length"
    answer = world.engine.details.answer(Inspect(nonce=1, what="request", request="b"))
    assert msgspec.msgpack.decode(answer.data, type=RequestDetail).why == "abort by eve"


@pytest.mark.parametrize(("asked", "words"), [
    (3, "length"), (60, "length: the model's limit of 8 tokens"), (None, "length: the model's limit of 8 tokens"),
])  # fmt: skip
def test_the_end_of_a_request_names_the_limit_that_it_met(asked, words):
    world = CoreWorld(stages=1, max_model_len=8)
    world.submit([1, 2, 3], name="a", max_tokens=asked)
    world.run()
    (row,) = finished(world)
    assert row.reason == "length" and row.ending == words
    answer = world.engine.details.answer(Inspect(nonce=1, what="request", request="a"))
    detail = msgspec.msgpack.decode(answer.data, type=RequestDetail)
    assert detail.why == words
    ended = [event for event in world.events if event.kind == "request.finished"]
    assert [event.text for event in ended] == [f"a {words}, {row.output_tokens} tokens"]


def test_a_thousand_are_kept_each_once():
    world = CoreWorld(stages=1, max_num_seqs=64)
    for number in range(FINISHED_MOST + 50):
        world.submit([1], name=f"r{number}", max_tokens=1)
    world.run()
    ids = [row.id for row in finished(world)]
    assert len(ids) == len(set(ids)) == FINISHED_MOST and "r0" not in ids


def test_the_event_of_an_end_has_its_figures():
    world = CoreWorld(stages=1)
    world.submit([1, 2, 3], name="a", max_tokens=3)
    world.run()
    events = [event for event in world.events if event.kind == "request.finished"]
    assert [event.text for event in events] == ["a length, 3 tokens"] and events[0].request == "a"
    kept = msgspec.structs.replace(finished(world)[0], ended_s=0.0)
    assert events[0].finished == kept and events[0].wall == kept.wall
    assert all(event.finished is None for event in world.events if event is not events[0])
    old = msgspec.to_builtins(events[0])
    del old["finished"]
    assert msgspec.convert(old, Event).finished is None, "an event of an older engine"
