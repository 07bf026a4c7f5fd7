"""Marks: requests by Space, `*` and `:mark`, and one verb on all of them with one plan."""

from __future__ import annotations

import asyncio
import copy

import pytest
import snapshots
from ppconsole.screens import confirm
from ppconsole.screens.confirm import Confirm
from ppengine.protocol.control import Conflict, Outcome
from ppengine.protocol.verbs import Abort, Many, Preempt, Priority
from test_tui_console import Rig, console
from textual.widgets import Button

NAMES = [f"r-{number:04x}" for number in range(8)]


def planned(count: int, *conflicts: Conflict) -> Outcome:
    """A plan as the core answers: counts, sums, ids."""
    lines = [f"abort {count - len(conflicts)} of {count} requests", "2 running", "at least 9 device blocks come back"]
    return Outcome(id="1", op="o1", state="planned", text=lines[0], plan=lines, conflicts=list(conflicts))


def marked(rig: Rig) -> list[str]:
    """Ids of the rows with the sign of a mark."""
    return [line.split()[1] for line in rig.board("left").splitlines() if line[:2] in ("* ", "» ")]


def title(rig: Rig) -> str:
    return next(line for line in rig.board("left").splitlines() if line.strip().startswith("REQ "))


def line(rig: Rig) -> str:
    return str(rig.app.main.line.input.value)


def drop(rig: Rig, *names: str) -> None:
    """Let requests end."""
    picture = copy.deepcopy(rig.source.picture)
    picture.requests = [each for each in picture.requests if each.id not in names]
    picture.requests_total = len(picture.requests)
    rig.source.send(picture)
    rig.app.tick()


def dry_and_real(rig: Rig) -> tuple[list[Many], list[Many]]:
    dry = [verb for verb, options in rig.source.commands if options.get("dry_run")]
    return dry, rig.source.acted()


async def test_space_marks_a_request_and_goes_to_the_next() -> None:
    async with console() as rig:
        await rig.pilot.press("space")
        assert marked(rig) == NAMES[:1] and "1 marked" in title(rig)
        assert rig.app.main.selection.request() == NAMES[1], "the next one is selected"
        await rig.pilot.press("down", "space", "up")
        assert marked(rig) == [NAMES[0], NAMES[2]] and "2 marked" in title(rig)
        assert any(text.startswith(f"» {NAMES[2]}") for text in rig.board("left").splitlines()), "selected and marked"
        await rig.pilot.press("space")
        assert marked(rig) == NAMES[:1], "and again: unmarked"
        await rig.pilot.press("escape")
        assert marked(rig) == [] and "marked" not in title(rig)
        await rig.pilot.press("tab", "space")
        assert marked(rig) == [], "the stages have the focus"


async def test_space_skips_a_request_that_has_ended() -> None:
    async with console() as rig:
        await rig.pilot.press("end")
        picture = copy.deepcopy(rig.source.picture)
        picture.requests[0].state = "finished"
        rig.source.send(picture)
        rig.app.tick()
        await rig.pilot.press("space", "space")
        assert marked(rig) == [], "the last live one was marked, and unmarked: the ended row is not selected"
        assert rig.app.main.selection.request() == NAMES[7]
        await rig.pilot.press("down", "space")
        assert any(f"{NAMES[0]} has ended" in note.text for note in rig.app.notes) and marked(rig) == []


async def test_a_mark_belongs_to_its_request_and_goes_with_it() -> None:
    async with console() as rig:
        await rig.pilot.press("down", "space", "space", "S", "i", "R")
        assert sorted(marked(rig)) == NAMES[1:3]
        drop(rig, NAMES[1])
        assert marked(rig) == [NAMES[2]] and "1 marked" in title(rig)
        picture = copy.deepcopy(rig.source.picture)
        picture.requests.append(snapshots.request(1))
        rig.source.send(picture)
        rig.app.tick()
        assert marked(rig) == [NAMES[2]], "one that ended is not marked again"
        picture = copy.deepcopy(picture)
        picture.engine.epoch = "another"
        rig.source.send(picture)
        rig.app.tick()
        assert marked(rig) == [], "a new epoch has other requests"


async def test_a_verb_hits_no_other_request_when_all_marked_ones_have_ended() -> None:
    async with console() as rig:
        await rig.pilot.press("space", "space")
        drop(rig, *NAMES[:2])
        assert rig.app.main.selection.request() == NAMES[2]
        await rig.pilot.press("a")
        assert not isinstance(rig.app.screen, Confirm) and rig.source.commands == []
        assert any("the marked requests have ended" in note.text for note in rig.app.notes)
        await rig.pilot.press("colon", *"abort", "enter")
        assert rig.source.commands == []
        await rig.pilot.press("escape", "down")
        assert (await rig.confirm("a")).verb == Abort(request=NAMES[3])


async def test_asterisk_marks_all_that_the_filter_shows_and_esc_clears_the_newest_first() -> None:
    async with console() as rig:
        await rig.pilot.press("slash", *"alice", "enter", "asterisk")
        assert marked(rig) == [NAMES[0], NAMES[5]] and "2 marked  /alice" in title(rig)
        await rig.pilot.press("asterisk")
        assert marked(rig) == [], "all were marked"
        await rig.pilot.press("space", "asterisk")
        assert marked(rig) == [NAMES[0], NAMES[5]], "one was not"
        await rig.pilot.press("escape")
        assert marked(rig) == [] and "/alice" in title(rig), "the marks are newer"
        await rig.pilot.press("escape")
        assert "/alice" not in title(rig)
        await rig.pilot.press("space", "slash", *"bob", "enter", "escape")
        assert marked(rig) == NAMES[:1] and "/bob" not in title(rig), "the filter is newer"
        await rig.pilot.press("escape")
        assert marked(rig) == []


async def test_a_frozen_display_marks_live_requests_alone() -> None:
    async with console() as rig:
        await rig.pilot.press("F")
        drop(rig, NAMES[0])
        await rig.pilot.press("space")
        assert marked(rig) == [] and NAMES[0] in rig.board("left")
        await rig.pilot.press("asterisk")
        assert marked(rig) == NAMES[1:]
        await rig.pilot.press("asterisk")
        assert marked(rig) == []


async def test_a_key_acts_on_all_marks_with_one_plan() -> None:
    async with console(plans={"many": planned(3)}) as rig:
        await rig.pilot.press("space", "down", "space", "space")
        names = [NAMES[0], *NAMES[2:4]]
        dialog = await rig.confirm("a")
        verb = Many(verbs=[Abort(request=name) for name in names], revisions=[0, 2, 3])
        assert dialog.verb == verb and dry_and_real(rig) == ([verb], [])
        body = rig.board("dialog-body")
        assert (
            " abort?" in body and "end a request and free its blocks" in body and "3 marked requests, on opt@n0" in body
        )
        assert "abort 3 of 3 requests" in body and "at least 9 device blocks" in body
        assert f"ppconsole -e opt@n0 abort {' '.join(names)}" in body
        assert str(dialog.query_one("#confirm", Button).label) == "Do it: abort"
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: rig.app.screen is rig.app.main)
        assert dry_and_real(rig) == ([verb], [verb])
        assert marked(rig) == [], "the next verb does not hit them unseen"
        assert (await rig.confirm("p")).verb == Preempt(request=rig.app.main.selection.request())


async def test_a_verb_unmarks_no_others_and_a_cancelled_one_unmarks_nothing() -> None:
    async with console(plans={"many": planned(2)}) as rig:
        await rig.pilot.press("space", "space", "space")
        await rig.confirm("a")
        await rig.pilot.press("enter")
        assert marked(rig) == NAMES[:3] and rig.source.acted() == []
        assert [note.text for note in rig.app.notes][-1] == "abort: cancelled; nothing was done"
        await rig.pilot.press("colon", *f"abort {NAMES[1]} {NAMES[5]}", "enter")
        await rig.until(lambda: "abort 2 of 2" in rig.board("dialog-body"))
        await rig.pilot.press("tab", "enter")
        await rig.until(lambda: rig.app.screen is rig.app.main)
        assert marked(rig) == [NAMES[0], NAMES[2]]


async def test_what_ended_meanwhile_is_not_hidden_by_the_filter() -> None:
    async with console(plans={"many": planned(4)}) as rig:
        await rig.pilot.press("space", "space", "space", "space", "slash", *"r-0003", "enter")
        await rig.confirm("a")
        assert "3 of them are hidden by the filter" in rig.board("dialog-body")
        drop(rig, NAMES[0], NAMES[3])
        rig.app.screen.paint()
        assert "2 of them are hidden by the filter" in rig.board("dialog-body")
        drop(rig, NAMES[1])
        rig.app.screen.paint()
        assert "1 of them is hidden by the filter" in rig.board("dialog-body")
        drop(rig, NAMES[2])
        rig.app.screen.paint()
        assert "hidden by the filter" not in rig.board("dialog-body")


async def test_marks_that_were_acted_on_go_although_the_dialog_was_closed() -> None:
    async with console(plans={"many": planned(2)}, release=asyncio.Event()) as rig:
        await rig.pilot.press("space", "space")
        await rig.confirm("a")
        await rig.pilot.press("right", "enter", "escape")
        assert rig.app.screen is rig.app.main and marked(rig) == []
        rig.source.release.set()


async def test_the_rest_goes_on_without_the_conflicts() -> None:
    gone = Conflict(request=NAMES[1], code="NOT_FOUND", text="r-0001 has ended")
    async with console(plans={"many": planned(3, gone)}) as rig:
        await rig.pilot.press("space", "space", "space")
        dialog = await rig.confirm("o")
        assert "not r-0001: r-0001 has ended" in rig.board("dialog-body")
        assert str(dialog.query_one("#confirm", Button).label) == "Do the other 2: swap-out"
        assert f"swap-out {NAMES[0]} {NAMES[2]}" in rig.board("dialog-body"), "the shell line does the same"
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: rig.app.screen is rig.app.main)
        (sent,) = rig.source.acted()
        assert (sent.requests, sent.revisions) == ([NAMES[0], NAMES[2]], [0, 2])
        assert any("swap-out 2 requests: applied" in note.text for note in rig.app.notes)


async def test_the_button_is_as_wide_as_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console(plans={"many": planned(2)}) as rig:
        await rig.pilot.press("space", "space")
        dialog = await rig.confirm("p")
        monkeypatch.setattr(confirm, "label_of", lambda verb: "preempt many requests")
        dialog._buttons()
        await rig.until(lambda: "Do it: preempt many requests" in rig.screen())


async def test_look_again_takes_the_present_revisions() -> None:
    moved = Conflict(request=NAMES[1], code="CONFLICT", text="revision 4, you saw 1")
    async with console(plans={"many": planned(2, moved)}) as rig:
        await rig.pilot.press("space", "space")
        dialog = await rig.confirm("p")
        picture = copy.deepcopy(rig.source.picture)
        picture.requests[1].revision = 4
        rig.source.send(picture)
        rig.source.plans["many"] = planned(2)
        await rig.pilot.click("#again")
        await rig.until(lambda: "you saw" not in rig.board("dialog-body"))
        await rig.until(lambda: not dialog.query_one("#confirm", Button).disabled)
        assert dry_and_real(rig)[0][-1].revisions == [0, 4]
        assert dialog.query_one("#again").has_class("hidden")


async def test_where_all_are_conflicts_nothing_can_be_confirmed() -> None:
    conflicts = [Conflict(request=name, code="INVALID", text="holds no blocks") for name in NAMES]
    async with console(plans={"many": planned(8, *conflicts)}) as rig:
        await rig.pilot.press("asterisk")
        dialog = await rig.confirm("n")
        assert dialog.query_one("#confirm", Button).disabled
        body = rig.board("dialog-body")
        assert body.count("not r-") == 5 and "... and 3 more that cannot be done" in body
        await rig.pilot.press("right", "enter", "escape")
        assert rig.source.acted() == []


async def test_the_dialog_names_what_the_filter_hides_and_cuts_a_long_shell_line() -> None:
    async with console(snapshots.snapshot(4, 400), plans={"many": planned(400)}) as rig:
        await rig.pilot.press("asterisk", "slash", *"alice", "enter")
        assert "400 marked  /alice" in title(rig)
        await rig.confirm("a")
        body = rig.board("dialog-body")
        assert "320 of them are hidden by the filter" in body and "400 marked requests, on opt@n0" in body
        assert "more lines" in body and "y copies the shell line" in body and "terminal is too low" not in body


async def test_one_mark_is_one_request_and_its_detail_acts_on_itself() -> None:
    async with console() as rig:
        await rig.pilot.press("space", "down", "down")
        assert (await rig.confirm("a")).verb == Abort(request=NAMES[0])
        await rig.pilot.press("escape", "enter")
        assert (await rig.confirm("a")).verb == Abort(request=NAMES[3]), "a detail is about its request"


async def test_the_key_of_a_priority_writes_the_marks_into_the_line() -> None:
    async with console() as rig:
        await rig.pilot.press("space", "space", "plus")
        assert line(rig) == f"priority {NAMES[0]} {NAMES[1]} "
        await rig.pilot.press("minus", "2", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        expected = [Priority(request=name, priority=-2) for name in NAMES[:2]]
        assert isinstance(rig.app.screen, Confirm) and rig.app.screen.verb.verbs == expected


@pytest.mark.parametrize(
    ("text", "verb", "names"),
    [
        ("abort r-0001 r-0004 r-0006", Abort, ["r-0001", "r-0004", "r-0006"]),
        ("abort --owner alice --older 1m", Abort, ["r-0000", "r-0005"]),
        ('preempt --filter "blk>40"', Preempt, ["r-0000", "r-0002", "r-0004", "r-0006"]),
        ("preempt", Preempt, ["r-0000", "r-0001"]),
    ],
)
async def test_the_line_takes_what_the_shell_takes(text: str, verb: type, names: list[str]) -> None:
    async with console() as rig:
        await rig.pilot.press("space", "space", "colon")
        rig.app.main.line.input.value = text
        await rig.pilot.press("enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        dialog = rig.app.screen
        assert isinstance(dialog, Confirm) and [type(each) for each in dialog.verb.verbs] == [verb] * len(names)
        assert dialog.verb.requests == names


async def test_the_line_marks_by_a_filter_on_every_screen() -> None:
    async with console() as rig:
        await rig.pilot.press("space", "e", "colon")
        rig.app.screen.line.input.value = "mark owner:bob state:run"
        await rig.pilot.press("enter")
        assert any("marked 2 of 8 requests" in note.text for note in rig.app.notes)
        await rig.pilot.press("escape")
        assert marked(rig) == [NAMES[0], NAMES[1], NAMES[6]]
        for wrong, says in (("mark", "mark needs a filter"), ("mark ownr:x", "no field 'ownr'; did you mean owner?")):
            await rig.pilot.press("colon")
            rig.app.main.line.input.value = wrong
            await rig.pilot.press("enter")
            assert says in rig.app.main.line.error
            await rig.pilot.press("escape")
        assert len(marked(rig)) == 3


async def test_the_key_line_and_the_help_name_the_marks() -> None:
    async with console() as rig:
        assert "mark" not in rig.board("foot").split("filter")[0]
        await rig.pilot.press("space")
        assert "esc unmark" in rig.board("foot") and "? help" in rig.board("foot") and "a abort" in rig.board("foot")
        await rig.pilot.press("question_mark")
        text = rig.screen()
        for _ in range(3):
            await rig.pilot.press("pagedown")
            text += rig.screen()
        assert "mark; verbs act on marks" in text and "freeze the display" in text


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 36)])
async def test_marks_are_seen_at_every_size(size: tuple[int, int]) -> None:
    async with console(size=size) as rig:
        await rig.pilot.press("space", "space")
        assert marked(rig) == NAMES[:2] and "2 marked" in title(rig)
        rig.source.plans["many"] = planned(2)
        await rig.confirm("a")
        body = rig.board("dialog-body")
        assert (
            "abort 2 of 2 requests" in body and "at least 9 device blocks" in body and "2 marked requests, on" in body
        )
