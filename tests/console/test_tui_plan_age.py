"""A confirm dialog that stays open: its selection in words, the age of its plan, and plans that are renewed."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import snapshots
from ppconsole.model.choosing import MARKED, NAMED, Choice
from ppconsole.model.plan_age import SELDOM_S, PlanAge
from ppconsole.screens.confirm import Confirm
from ppconsole.view.cells import EMPTY, row, text_of
from ppconsole.view.commands import asked
from ppconsole.view.lowering import DETAIL, SPARE, VITAL, Weighed, lowered
from ppengine.protocol.control import Conflict, Outcome, Refused
from ppengine.protocol.verbs import Abort, Many
from test_tui_console import Rig, console
from textual.widgets import Button

NAMES = [f"r-{number:04x}" for number in range(8)]
NONE: frozenset[str] = frozenset()


def planned(count: int, *gone: str) -> Outcome:
    """A plan as the core answers, without the requests that have gone."""
    lines = [f"abort {count - len(gone)} of {count} requests", "90 computed tokens are lost, after 40 of output"]
    conflicts = [Conflict(request=name, code="NOT_FOUND", text=f"no request {name}") for name in gone]
    return Outcome(id="1", op="o1", state="planned", text=lines[0], plan=lines, conflicts=conflicts)


def asks(rig: Rig) -> int:
    return sum(bool(options.get("dry_run")) for _, options in rig.source.commands)


async def later(rig: Rig, seconds: float) -> str:
    """Let time pass and the clock of the console tick; return the dialog."""
    rig.clock.now += seconds
    rig.source.send(copy.deepcopy(rig.source.picture))  # a live link
    rig.app.tick()
    await rig.pilot.pause(0.02)
    return rig.board("dialog-body")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("abort --owner alice", "2 requests of alice, on opt@n0"),
        ("abort --state running", " running requests, on opt@n0"),
        ("abort --filter blk>0", " requests that match blk>0, on opt@n0"),
        ("abort --owner alice --older 1 --filter in>0", "2 requests of alice older than 1 that match in>0, on opt@n0"),
        (f"abort {NAMES[1]} {NAMES[2]}", "2 requests, on opt@n0"),
    ],
)
async def test_the_target_is_the_selection_in_words(line: str, words: str) -> None:
    async with console() as rig:
        await rig.pilot.press("colon", *line, "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm) and "effect" in rig.board("dialog-body"))
        target = next(each for each in rig.board("dialog-body").splitlines() if each.startswith("target"))
        assert target.endswith(words)


async def test_marks_are_named_by_key_and_by_line() -> None:
    async with console() as rig:
        await rig.pilot.press("space", "space", "space")
        await rig.confirm("a")
        assert "target  3 marked requests, on opt@n0" in rig.board("dialog-body")
        await rig.pilot.press("escape", "colon", *"abort", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm) and "effect" in rig.board("dialog-body"))
        assert "target  3 marked requests, on opt@n0" in rig.board("dialog-body")


def test_one_request_has_no_plural_and_a_choice_of_names_no_words() -> None:
    assert Choice("owner=bob", "waiting ", " of bob").words(1) == "1 waiting request of bob"
    assert (MARKED.words(3), NAMED.words(2)) == ("3 marked requests", "2 requests")
    picture = snapshots.snapshot(2, 8)
    assert asked("abort", NAMES[:2], None, picture).choice == MARKED
    assert asked("abort", NAMES[:1], None, picture).choice == NAMED, "the selected one"


async def test_an_old_plan_has_its_age_and_is_renewed_without_moving_a_button() -> None:
    async with console() as rig:
        await rig.pilot.press("space", "space", "space")
        rig.source.plans["many"] = planned(3)
        dialog = await rig.confirm("a")
        await rig.pilot.press("right")
        confirm = dialog.query_one("#confirm", Button)
        before = {each.id: each.region for each in dialog.query(Button)}
        assert rig.app.focused is confirm and "old" not in rig.board("dialog-body") and asks(rig) == 1
        assert "plan 4.0s old" in await later(rig, 4.0) and asks(rig) == 1
        rig.source.plans["many"] = planned(3, NAMES[0])
        body = await later(rig, 1.5)
        assert asks(rig) == 2 and "old" not in body and "abort 2 of 3 requests" in body
        await rig.pilot.pause()
        after = {each.id: each.region for each in dialog.query(Button)}
        assert rig.app.focused is confirm and not confirm.disabled
        assert after["cancel"].offset.x == before["cancel"].offset.x
        assert after["confirm"].offset.x == before["confirm"].offset.x
        await rig.pilot.press("enter")
        await rig.until(lambda: bool(rig.source.acted()))
        (sent,) = rig.source.acted()
        assert isinstance(sent, Many) and sent.requests == NAMES[1:3], "the plan on the screen is the one that is sent"


async def test_the_end_of_a_request_renews_the_plan_at_once_and_is_counted() -> None:
    async with console() as rig:
        await rig.pilot.press("space", "space", "space")
        dialog = await rig.confirm("a")
        place = dialog.query_one("#cancel").region
        rig.source.picture.requests[0].state = "finished"
        rig.source.plans["many"] = planned(3, NAMES[0])
        assert "1 ended since" in await later(rig, 1.2)
        assert asks(rig) == 2
        await later(rig, 1.2)
        assert asks(rig) == 2, "it is known now"
        await rig.pilot.press("escape")
        rig.source.plans["many"] = planned(2)
        await rig.confirm("a")
        assert dialog.query("#cancel") is not None and place.x == rig.app.screen.query_one("#cancel").region.x


async def test_requests_that_match_since_are_named_and_not_in_it() -> None:
    async with console() as rig:
        await rig.pilot.press("colon", *"abort --owner alice", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm) and "free 45" in rig.board("dialog-body"))
        rig.source.picture.requests += [snapshots.request(40, owner="alice"), snapshots.request(41, owner="alice")]
        rig.source.picture.requests[0].owner = "bob"
        body = await later(rig, 1.0)
        assert "1 matches no more, +2 since match; they are not in it" in body
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: bool(rig.source.acted()))
        (sent,) = rig.source.acted()
        assert isinstance(sent, Many) and sent.requests == [NAMES[0], NAMES[5]]


async def test_a_plan_that_is_renewed_into_a_conflict_says_so_before_it_is_confirmed() -> None:
    async with console() as rig:
        dialog = await rig.confirm("a")
        rig.source.plans["abort"] = Refused(id="1", code="CONFLICT", text="revision is 9, not 0")
        body = await later(rig, 6.0)
        assert "CONFLICT" in body and dialog.query_one("#confirm", Button).disabled
        assert asks(rig) == 2
        await later(rig, 60.0)
        assert asks(rig) == 2, "a conflict waits for Look again"


async def test_a_verb_that_is_under_way_keeps_the_plan_that_was_confirmed() -> None:
    async with console() as rig:
        dialog = await rig.confirm("a")
        dialog.busy = True
        await later(rig, 30.0)
        assert asks(rig) == 1
        dialog.busy = False
        await rig.pilot.press("escape")
        assert not rig.source.acted() and dialog.verb == Abort(request=NAMES[0])


def test_a_plan_is_renewed_less_and_less_while_no_key_is_pressed() -> None:
    age, now, times = PlanAge(), 0.0, []
    age.made(now, NONE)
    while now < 400.0:
        now += 1.0
        if age.is_old(now, NONE):
            times.append(now)
            age.made(now, NONE)
    gaps = [two - one for one, two in pairwise(times)]
    assert times[0] == 5.0 and gaps[:3] == [10.0, 20.0, 40.0] and set(gaps[3:]) == {SELDOM_S}
    age.touched()
    assert age.is_old(now + 5.0, NONE), "a key wants a fresh plan"
    age.made(now, NONE)
    assert not age.is_old(now + 0.5, {"r"}) and age.is_old(now + 1.0, {"r"})
    age.forget()
    assert age.seconds(now + 9.0) == 0.0


def test_of_a_dialog_that_is_too_high_the_lines_of_least_weight_go_first() -> None:
    lines = [
        Weighed(row((name, "")), weight)
        for name, weight in (
            ("title", VITAL),
            ("epoch", SPARE),
            ("plan", VITAL),
            ("fate", VITAL),
            ("more", DETAIL),
            ("keys", VITAL),
        )
    ]
    lines.insert(1, Weighed(EMPTY, SPARE))  # fmt: skip

    def shown(room: int) -> list[str]:
        return [text_of(each.row) for each in lowered(lines, room)]

    assert len(shown(7)) == 7 and "" not in shown(6) and len(shown(6)) == 6
    assert shown(5) == ["title", "… 2 more lines: the terminal is too low", "plan", "fate", "keys"]


async def test_the_fate_of_requests_is_on_the_smallest_screen() -> None:
    plan = Outcome(
        id="1", op="o1", state="planned", text="KV", revision=7,
        plan=["KV 812 -> 400 blocks (-50.7 %, -1.2 GiB)", "no mode: every request keeps its blocks",
              "free in the tail 300, cached dropped 20, move 4", "stage 1 has room", "stage 2 has room"],
    )  # fmt: skip
    async with console(size=(60, 16), plans={"set-memory": plan}) as rig:
        await rig.pilot.press("m", *["backspace"] * 4, *".3")
        await rig.until(lambda: "KV 812" in rig.screen() and "goes on" in rig.screen())
        assert "every request keeps its blocks" in rig.screen() and rig.screen().count("in all ") == 4
        await rig.pilot.press("enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm) and "KV 812" in rig.board("dialog-body"))
        assert "every request keeps its blocks" in rig.screen() and "Cancel" in rig.screen()
        assert "more lines: the terminal is too low" in rig.screen()


@pytest.mark.parametrize("theme", ["pp-dark", "ansi-dark"])
async def test_a_button_keeps_its_one_row_in_any_theme(theme: str) -> None:
    async with console() as rig:
        rig.app.theme = theme
        dialog = await rig.confirm("a")
        button = dialog.query_one("#confirm", Button)
        button.add_class("-active")  # It is pressed.
        await rig.pilot.pause(0.02)
        assert button.outer_size.height == 1
        button.remove_class("-active")
        dialog.busy = True  # The verb is under way, which turns the button off.
        await later(rig, 0.1)
        assert button.disabled
        await rig.pilot.pause(0.02)
        assert button.outer_size.height == 1
