"""The reducer and what is concluded from the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from fake_gateway import sample_snapshot
from ppconsole.model.facts import freshness, why_no_verbs
from ppconsole.model.reduce import add_output, reduce, set_filter
from ppconsole.model.rows import visible_requests
from ppconsole.model.sorting import ARRIVAL, Order
from ppconsole.model.state import MAX_EVENTS, MAX_OUTPUT_CHARACTERS, ConsoleState
from ppengine.protocol.control import Fetched
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.recording import LinkState
from ppengine.protocol.snapshot import Event


def live(**changes: object) -> ConsoleState:
    state = reduce(ConsoleState(**changes), LinkState(state="live"), 10.0)  # type: ignore[arg-type]
    return reduce(state, sample_snapshot(), 10.0)


def ids(state: ConsoleState) -> list[str]:
    return [request.id for request in visible_requests(state)]


def ended(name: str, wall: float, took_s: float = 1.0, **fields: Any) -> Event:
    info = FinishedInfo(
        id=name, owner="alice", wall=wall, ended_s=0.0, took_s=took_s, prompt_tokens=9, output_tokens=4,
        **{"reason": "stop", **fields},
    )  # fmt: skip
    return Event(seq=0, wall=wall, kind="request.finished", text=f"{name} ended", request=name, finished=info)


def test_a_request_that_has_ended_keeps_its_row_for_five_seconds() -> None:
    state = live()
    assert state.snapshot is not None
    now = state.snapshot.sampled_at
    state.snapshot.requests[0].age_s, state.snapshot.requests[1].age_s, state.snapshot.requests[2].age_s = 9.0, 5.0, 1.0
    for event in (
        ended("r-old", now - 5.1), ended("r-b", now - 2.0, 4.0, reason="abort", by="eve"), ended("r-77d0", now - 1.0),
        ended("r-a", now - 1.0, 60.0, reason="length", model_limit=256),
    ):  # fmt: skip
        state = reduce(state, event, 10.0)
    rest = ids(state)[3:]
    assert ids(state)[:3] == ["r-8f2c", "r-19aa", "r-77d0"], "one is live again, one is too old"
    assert sorted(rest) == ["r-a", "r-b"], "those that have ended come last"
    for order in (Order("out", True), Order("out"), Order(ARRIVAL, True)):
        assert sorted(ids(replace(state, order=order))[3:]) == ["r-a", "r-b"], order
    rows = {row.id: row for row in visible_requests(state)}
    assert rows["r-b"].finish_reason == "abort by eve" and rows["r-b"].state == "finished"
    assert rows["r-a"].finish_reason == "length: the model's limit of 256 tokens" and rows["r-77d0"].state != "finished"
    assert ids(set_filter(state, "reason:abort")) == ["r-b"] and sorted(ids(set_filter(state, "state:fin"))) == [
        "r-a",
        "r-b",
    ]
    for number in range(6):
        state = reduce(state, ended(f"r-{number}", now - 0.1), 10.0)
    done = [row.id for row in visible_requests(state) if row.state == "finished"]
    assert sorted(done) == ["r-2", "r-3", "r-4", "r-5"], "the newest: the others must not push live ones away"


def test_a_filter_chooses_by_word_and_by_field() -> None:
    for text, expected in (
        ("8F2C", ["r-8f2c"]),
        ("bob", ["r-19aa"]),
        ("stat:held", ["r-77d0"]),
        ("state:held", ["r-77d0"]),
        ('why:"need 44"', ["r-19aa"]),
        ("alice stat:run", ["r-8f2c"]),
        ("nobody", []),
        ("!alice", ["r-19aa"]),
        ("alice !stat:HELD", ["r-8f2c"]),
        ("", ["r-8f2c", "r-19aa", "r-77d0"]),
    ):
        assert ids(set_filter(live(), text)) == expected


def test_sort_keys_and_turning_round() -> None:
    swap = replace(live(), order=Order("swp", True))
    assert ids(swap)[0] == "r-77d0"
    assert ids(replace(swap, order=Order("swp")))[-1] == "r-77d0"
    assert ids(replace(live(), order=Order("state"))) == ["r-8f2c", "r-77d0", "r-19aa"]
    assert ids(replace(live(), order=Order(descending=True))) == ["r-77d0", "r-19aa", "r-8f2c"]


def test_freshness_greys_what_is_old_and_disables_verbs() -> None:
    state = live()
    assert freshness(state, 10.1).text == "live 0.1s"
    assert why_no_verbs(state, 11.9) == ""
    assert freshness(state, 12.5).text == "stale 2.5s"
    assert why_no_verbs(state, 12.5) == "the link is stale 2.5s"
    lost = reduce(state, LinkState(state="lost", retry_in_s=1.5, text="no engine fake"), 13.0)
    assert freshness(lost, 13.0).grey
    assert lost.snapshot is state.snapshot, "the last good picture stays"


def test_read_only_and_recordings_have_no_verbs() -> None:
    assert why_no_verbs(live(read_only=True), 10.0) == "this console is read-only"
    assert why_no_verbs(live(live_source=False), 10.0) == "this is a recording"


def test_a_new_epoch_is_marked_and_voids_outputs() -> None:
    state = add_output(live(), fetched(0, [1], "a"))
    other = sample_snapshot(epoch="other")
    state = reduce(state, other, 20.0)
    assert state.epoch == "other"
    assert state.outputs == {}
    assert state.events[-1].kind == "link.new-epoch"


def test_ends_of_requests_make_room_for_the_other_events() -> None:
    state = reduce(live(), Event(seq=1, wall=0.0, kind="stage.dead", text="stage 1 is dead"), 10.0)
    for seq in range(2, 3 * MAX_EVENTS):
        state = reduce(state, Event(seq=seq, wall=0.0, kind="request.finished", text="r stop, 3 tokens"), 10.0)
    assert [len(state.events), state.events[0].kind, state.events[1].seq] == [
        MAX_EVENTS,
        "stage.dead",
        2 * MAX_EVENTS + 1,
    ]
    for seq in range(3 * MAX_EVENTS, 5 * MAX_EVENTS):
        state = reduce(state, Event(seq=seq, wall=0.0, kind="stage.lost", text="t"), 10.0)
    assert [len(state.events), state.events[0].seq, state.events[-1].seq] == [
        MAX_EVENTS, 4 * MAX_EVENTS, 5 * MAX_EVENTS - 1,
    ]  # fmt: skip


def test_events_and_outputs_are_bounded() -> None:
    state = live()
    for seq in range(MAX_EVENTS + 10):
        state = reduce(state, Event(seq=seq, wall=0.0, kind="k", text="t"), 10.0)
    assert len(state.events) == MAX_EVENTS
    assert state.events[-1].seq == MAX_EVENTS + 9
    state = add_output(state, fetched(0, [1, 2], "x" * (MAX_OUTPUT_CHARACTERS + 5)))
    output = state.outputs["r-8f2c"]
    assert len(output.text) == MAX_OUTPUT_CHARACTERS
    assert output.characters == MAX_OUTPUT_CHARACTERS + 5


def test_a_piece_of_output_that_came_twice_is_dropped() -> None:
    state = add_output(live(), fetched(0, [1], "a"))
    assert add_output(state, fetched(0, [1], "a")) is state
    state = add_output(state, msgspec.structs.replace(fetched(1, [2], "b"), text_offset=1))
    assert state.outputs["r-8f2c"].text == "ab"


def fetched(offset: int, tokens: list[int], text: str) -> Fetched:
    return Fetched(
        nonce=1, request="r-8f2c", sample=0, offset=offset, token_ids=tokens, text_offset=0, text=text, finished=False
    )
