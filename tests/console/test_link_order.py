"""Events stay in order whatever is lost, doubled or late; and which engine is meant."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ppconsole.link.find import NoEngine, SeveralEngines, choose
from ppconsole.link.order import EventOrder
from ppconsole.link.pending import command_id
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.snapshot import Event


def event(seq: int) -> Event:
    return Event(seq=seq, wall=0.0, kind="k", text=str(seq))


@given(
    st.integers(1, 30),
    st.integers(0, 5),
    st.lists(st.integers(1, 30), max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=4),
)
def test_each_once_and_in_order_and_gaps_are_told(
    newest: int, first: int, arrivals: list[int], replays: list[tuple[int, int]]
) -> None:
    order = EventOrder(first)
    seen: list[Event] = []
    for index, seq in enumerate(arrivals):
        seen += order.take(event(seq))
        for when, oldest in replays:
            if when == index and order.missing is not None:
                after, until = order.missing
                kept = [event(number) for number in range(max(after + 1, oldest), until + 1)]
                seen += order.fill(kept, until)
    seen += order.fill([event(number) for number in range(order.last + 1, newest + 1)], newest)
    last = first
    for item in seen:
        if item.kind == "link.gap":
            assert item.text.startswith(f"events {last + 1} to {item.seq} ")
        else:
            assert item.seq == last + 1
        last = item.seq
    assert last == order.last >= min(newest, last)
    assert order.missing is None or order.missing[0] == order.last


def test_a_replay_that_brings_nothing_leaves_one_gap() -> None:
    order = EventOrder()
    assert order.take(event(5)) == []
    assert order.missing == (0, 4)
    told = order.fill([], 5)
    assert [(item.kind, item.seq) for item in told] == [("link.gap", 4), ("k", 5)]
    assert order.take(event(3)) == []
    assert [item.seq for item in order.take(event(6))] == [6]


def record(identity: str, name: str) -> EngineRecord:
    rest: dict[str, Any] = dict.fromkeys(
        ("epoch", "state_endpoint", "control_endpoint", "bulk_endpoint", "model", "run_dir"), ""
    )
    return EngineRecord(
        id=identity, name=name, pid=1, pid_start=1, proto=1, pipeline_parallel_size=2, started_wall=0.0, **rest
    )


RECORDS = [record("aa11", "tiny"), record("aa22", "big"), record("tiny", "other"), record("bb33", "big")]


@pytest.mark.parametrize(("wanted", "expected"), [("aa11", "aa11"), ("aa1", "aa11"), ("tiny", "tiny"), ("b", "bb33")])
def test_an_engine_is_named_by_id_then_name_then_prefix(wanted: str, expected: str) -> None:
    assert choose(RECORDS, wanted).id == expected


def test_what_names_none_or_several() -> None:
    with pytest.raises(NoEngine, match="no engine has the id, id prefix or name 'zz'; here: aa11"):
        choose(RECORDS, "zz")
    with pytest.raises(NoEngine, match="start one"):
        choose([], None)
    for wanted in ("aa", "big", None):
        with pytest.raises(SeveralEngines):
            choose(RECORDS, wanted)
    assert choose(RECORDS[:1], None).id == "aa11"


def test_command_ids_are_unique_and_sorted_by_time() -> None:
    ids = [command_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert [identity[14] for identity in ids] == ["7"] * 1000
    prefixes = [identity[:13] for identity in ids]
    assert prefixes == sorted(prefixes)
