"""The reducer and what is concluded from the state."""

from __future__ import annotations

import msgspec
from fake_gateway import sample_request, sample_snapshot, stuck_snapshot
from ppconsole.link.source import LinkState
from ppconsole.model.facts import banner, freshness, verbs_enabled, why_no_verbs
from ppconsole.model.reduce import add_output, move_selection, reduce, select, set_filter, set_sort
from ppconsole.model.rows import selected_request, visible_requests
from ppconsole.model.state import MAX_EVENTS, MAX_OUTPUT_CHARACTERS, ConsoleState
from ppengine.protocol.control import Fetched
from ppengine.protocol.snapshot import Event


def live(**changes: object) -> ConsoleState:
    state = reduce(ConsoleState(**changes), LinkState(state="live"), 10.0)  # type: ignore[arg-type]
    return reduce(state, sample_snapshot(), 10.0)


def ids(state: ConsoleState) -> list[str]:
    return [request.id for request in visible_requests(state)]


def test_selection_follows_the_request_and_not_the_row() -> None:
    state = move_selection(move_selection(live(), 1), 1)
    assert state.selected == "r-19aa"
    again = sample_snapshot(requests=[sample_request("r-new"), sample_request("r-19aa")])
    state = reduce(state, again, 11.0)
    assert state.selected == "r-19aa"
    assert ids(state).index("r-19aa") == 1
    state = reduce(state, sample_snapshot(requests=[sample_request("r-new")]), 12.0)
    assert state.selected == "r-19aa"
    assert selected_request(state) is None, "a request that left is not replaced by its neighbour"


def test_selection_stops_at_the_ends_and_survives_sort_and_filter() -> None:
    state = move_selection(live(), -1)
    assert state.selected == "r-77d0"
    assert move_selection(state, 5).selected == "r-77d0"
    state = set_filter(set_sort(state, "blocks"), "bob")
    assert ids(state) == ["r-19aa"]
    assert selected_request(state) is not None


def test_filter_matches_id_owner_state_and_why() -> None:
    for text, expected in (
        ("8F2C", ["r-8f2c"]),
        ("bob", ["r-19aa"]),
        ("held", ["r-77d0"]),
        ("need 121", ["r-19aa"]),
        ("alice running", ["r-8f2c"]),
        ("nobody", []),
        ("", ["r-8f2c", "r-19aa", "r-77d0"]),
    ):
        assert ids(set_filter(live(), text)) == expected


def test_sort_keys_and_turning_round() -> None:
    state = set_sort(live(), "swap")
    assert ids(state)[0] == "r-77d0"
    assert ids(set_sort(state, "swap"))[-1] == "r-77d0"
    assert ids(set_sort(live(), "state")) == ["r-8f2c", "r-77d0", "r-19aa"]
    assert ids(set_sort(live(), "arrival")) == ["r-77d0", "r-19aa", "r-8f2c"]


def test_freshness_greys_what_is_old_and_disables_verbs() -> None:
    state = live()
    assert freshness(state, 10.1).text == "live 0.1s"
    assert verbs_enabled(state, 11.9)
    assert freshness(state, 12.5).text == "stale 2.5s"
    assert not verbs_enabled(state, 12.5)
    assert why_no_verbs(state, 12.5) == "the link is stale 2.5s"
    lost = reduce(state, LinkState(state="lost", retry_in_s=1.5, text="no engine fake"), 13.0)
    assert freshness(lost, 13.0).grey
    assert lost.snapshot is state.snapshot, "the last good picture stays"
    line = banner(lost, 13.0)
    assert line is not None
    assert line.text == "LOST 3.0s no engine fake; trying again in 1.5 s"


def test_read_only_and_recordings_have_no_verbs() -> None:
    assert why_no_verbs(live(read_only=True), 10.0) == "this console is read-only"
    assert why_no_verbs(live(live_source=False), 10.0) == "this is a recording"
    assert not verbs_enabled(live(read_only=True), 10.0)


def test_a_new_epoch_is_marked_and_voids_selection_and_outputs() -> None:
    state = select(live(), "r-8f2c")
    state = add_output(state, fetched(0, [1], "a"))
    other = sample_snapshot(epoch="other")
    state = reduce(state, other, 20.0)
    assert (state.epochs, state.epoch, state.selected, state.previous) == (2, "other", None, None)
    assert state.outputs == {}
    assert state.events[-1].kind == "link.new-epoch"


def test_previous_is_the_snapshot_before() -> None:
    state = live()
    later = reduce(state, sample_snapshot(), 10.1)
    assert later.previous is state.snapshot


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


def test_banner_names_the_root_and_not_the_starved() -> None:
    state = reduce(ConsoleState(), stuck_snapshot(), 1.0)
    line = banner(state, 1.0)
    assert line is not None
    assert line.level == "fault"
    assert line.text == "!STAGE 2 stopped 6.2s: stage 2 was stopped by a signal; 0, 1 blocked; 3 starved"
    assert banner(live(), 10.0) is None


def test_banner_shows_loading_with_its_message_and_no_escapes() -> None:
    state = reduce(ConsoleState(), sample_snapshot(state="loading", message="stage 0:\x1b[2J 40%"), 1.0)
    line = banner(state, 1.0)
    assert line is not None
    assert line.text == "loading: stage 0: 40%"


def fetched(offset: int, tokens: list[int], text: str) -> Fetched:
    return Fetched(
        nonce=1, request="r-8f2c", sample=0, offset=offset, token_ids=tokens, text_offset=0, text=text, finished=False
    )
