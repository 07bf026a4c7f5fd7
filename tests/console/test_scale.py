"""A console of a large engine: its memory does not grow, and it does no work twice for one snapshot."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import msgspec
import pytest
from large_engine import LargeEngine, copied
from long_watch import watch
from ppconsole.model import rows
from ppconsole.model.state import ConsoleState
from ppconsole.model.trends import Figures, measure
from ppconsole.view import display
from ppconsole.view.display import DisplayModel
from ppengine.protocol.frames import encode

WARM_S, ROUND_S, ROUNDS = 40, 40, 4
BYTES_S_MOST, OBJECTS_S_MOST = 1000, 0.5
"""Most growth a second. Caches of limited size still fill; an object a snapshot, or 1 kB, would be a leak."""


async def test_memory_is_flat_while_requests_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full length: `python tests/console/long_watch.py`. Here all that is kept for a time is full soon."""
    monkeypatch.setattr("ppconsole.model.trends.POINTS_MOST", WARM_S)
    monkeypatch.setattr("ppconsole.model.reduce.MAX_EVENTS", WARM_S)
    monkeypatch.setattr("ppconsole.view.display.HISTORY", WARM_S)
    engine = LargeEngine(1e9, stages=2, requests=100)
    sizes: list[tuple[int, int]] = []

    def look(second: int) -> None:
        if second == WARM_S:
            tracemalloc.start()
        if second >= WARM_S and (second - WARM_S) % ROUND_S == 0:
            gc.collect()
            sizes.append((tracemalloc.get_traced_memory()[0], len(gc.get_objects())))

    try:
        seen = await watch(engine, WARM_S + ROUNDS * ROUND_S, (80, 24), look)
    finally:
        tracemalloc.stop()
    assert seen >= WARM_S + ROUNDS * ROUND_S, "each second was painted"
    ended = engine.snapshot.event_seq / 2 / (WARM_S + ROUNDS * ROUND_S)
    assert ended > 1, "requests a second that come and go"
    # The first round replaces what was there before the trace began.
    (bytes_before, objects_before), (bytes_after, objects_after) = sizes[1], sizes[-1]
    took = (ROUNDS - 1) * ROUND_S
    assert (bytes_after - bytes_before) / took < BYTES_S_MOST, sizes
    assert (objects_after - objects_before) / took < OBJECTS_S_MOST, sizes


def test_the_order_of_requests_is_found_once_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[ConsoleState] = []
    monkeypatch.setattr(display, "visible_requests", lambda state: calls.append(state) or rows.visible_requests(state))
    engine = LargeEngine(1e9, stages=2, requests=30)
    model = DisplayModel(ConsoleState(), clock=lambda: 0.0)
    assert model.arranged() == []
    model.take(copied(engine.snapshot))
    first = model.arranged()
    assert model.arranged() is first and len(first) == 30 and len(calls) == 1
    model.set_filter("alice")
    assert {request.owner for request in model.arranged()} == {"alice"} and len(calls) == 2
    model.sort_by("out")
    assert model.arranged()[0].output_tokens == max(request.output_tokens for request in model.arranged())
    model.reverse_sort()
    assert model.arranged()[0].output_tokens == min(request.output_tokens for request in model.arranged())
    model.set_filter("")
    model.toggle_freeze()
    frozen = [request.id for request in model.arranged()]
    engine.advance(20.0)
    model.take(copied(engine.snapshot))
    assert [request.id for request in model.arranged()] == frozen
    model.toggle_freeze()
    assert [request.id for request in model.arranged()] != frozen
    model.state = replace(model.state, snapshot=None)
    assert model.arranged() == []


def test_points_of_the_past_are_those_of_whole_snapshots() -> None:
    engine = LargeEngine(1e9, stages=3, requests=30)
    engine.advance(1.0)
    point = measure(copied(engine.snapshot))
    assert measure(msgspec.msgpack.decode(encode(engine.snapshot), type=Figures)) == point
    assert point.running and point.waiting and point.kv_use and point.stage_memory_use and point.ttft_p99_s
    assert point.output_tok_s and point.preemptions_total and point.swaps_total
