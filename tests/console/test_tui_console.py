"""The console on a source in memory: selection, confirm, link, read-only, hostile text, prompt, sizes, colours."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import snapshots
from fake_source import FakeSource
from ppconsole.app import ConsoleApp
from ppconsole.link.settings import Settings
from ppconsole.link.source import LinkLost
from ppconsole.screens.confirm import Confirm
from ppconsole.screens.detail_screens import HelpScreen
from ppconsole.screens.memory import MemoryDialog
from ppconsole.view import board, legend
from ppconsole.view.cells import text_of, width_of
from ppconsole.view.frame import frame
from ppconsole.view.notes import Notes
from ppconsole.widgets.lines import Lines
from ppconsole.widgets.prompt import PromptLine
from ppconsole.widgets.strips import Brush
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.recording import LinkState
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event
from ppengine.protocol.stage_info import CordonInfo
from ppengine.protocol.verbs import (
    Abort,
    Continue,
    Cordon,
    Drain,
    Pause,
    Preempt,
    Priority,
    Release,
    RestartStage,
    Resume,
    SetMemory,
    Submit,
    SwapIn,
    SwapOut,
)
from textual import events
from textual.pilot import Pilot
from textual.widgets import Button


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """App, pilot, source and clock of one test."""

    def __init__(self, app: ConsoleApp, pilot: Pilot[int], source: FakeSource, clock: Clock) -> None:
        self.app, self.pilot, self.source, self.clock = app, pilot, source, clock

    def board(self, name: str) -> str:
        """Text of one part of the screen; empty while the screen is being made."""
        found = self.app.screen.query(f"#{name}").results(Lines)
        return "\n".join(text_of(row) for part in found for row in part.rows)

    def screen(self) -> str:
        """All that is on the terminal, as text."""
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not ready():
                await self.pilot.pause(0.01)

    async def confirm(self, key: str) -> Confirm:
        """Press the key of a verb and wait for the plan."""
        await self.pilot.press(key)
        await self.until(lambda: isinstance(self.app.screen, Confirm) and "effect" in self.board("dialog-body"))
        await self.until(lambda: "asking the engine" not in self.board("dialog-body"))
        dialog = self.app.screen
        assert isinstance(dialog, Confirm)
        return dialog


@asynccontextmanager
async def console(
    picture=None, *, size=(80, 24), read_only=False, live=True, settings=None, title="", **changes
) -> AsyncIterator[Rig]:
    source = FakeSource(snapshots.snapshot(4, 8) if picture is None else picture, live=live)
    for name, value in changes.items():
        setattr(source, name, value)
    clock = Clock()
    app = ConsoleApp(source, read_only=read_only, clock=clock, theme="pp-dark", settings=settings, title=title)
    async with app.run_test(size=size) as pilot:
        rig = Rig(app, pilot, source, clock)
        await rig.until(lambda: app.model.state.snapshot is not None or source.starts <= source.fail_starts)
        app.tick()
        await pilot.pause()
        yield rig
    assert source.closed


async def test_the_selection_follows_the_request_through_insert_and_remove():
    async with console() as rig:
        await rig.pilot.press("down", "down")
        assert rig.app.main.selection.request() == "r-0002"
        picture = copy.deepcopy(rig.source.picture)
        picture.requests = [snapshots.request(99), *picture.requests[1:]]
        picture.requests.reverse()
        rig.source.send(picture)
        rig.app.tick()
        assert rig.app.main.selection.request() == "r-0002"
        assert any(line.startswith("> r-0002") for line in rig.board("left").splitlines())
        picture = copy.deepcopy(picture)
        picture.requests = [each for each in picture.requests if each.id != "r-0002"]
        rig.source.send(picture)
        rig.app.tick()
        after = rig.app.main.selection.request()
        assert any(line.startswith(f"> {after}") for line in rig.board("left").splitlines()), "its place has a cursor"


async def test_a_verb_that_may_be_meant_for_a_request_that_has_just_ended_is_asked_for_twice():
    async with console() as rig:
        await rig.pilot.press("down", "down")
        picture = copy.deepcopy(rig.source.picture)
        del picture.requests[2]
        rig.source.send(picture)
        rig.app.tick()
        assert any(line.startswith("> r-0003") for line in rig.board("left").splitlines())
        await rig.pilot.press("a")
        assert not isinstance(rig.app.screen, Confirm) and not rig.source.commands
        assert any("r-0002 has ended; r-0003 took its place" in note.text for note in rig.app.notes)
        dialog = await rig.confirm("a")
        assert dialog.verb == Abort(request="r-0003")
        await rig.pilot.press("escape")
        picture = copy.deepcopy(picture)
        del picture.requests[2]
        rig.source.send(picture)
        rig.app.tick()
        rig.clock.now += 2.5
        rig.source.send(copy.deepcopy(picture))
        dialog = await rig.confirm("a")
        assert dialog.verb == Abort(request="r-0004"), "it has been the selected one for a while"


async def test_the_reason_of_an_end_is_shown_in_its_row_and_the_row_goes():
    async with console() as rig:
        await rig.pilot.press("down", "down")
        picture = copy.deepcopy(rig.source.picture)
        gone = picture.requests.pop(2)
        picture.requests_total -= 1
        info = FinishedInfo(
            id=gone.id, owner=gone.owner, wall=picture.sampled_at, ended_s=0.0, took_s=gone.age_s, prompt_tokens=1973,
            output_tokens=31, reason="abort", by="eve",
        )  # fmt: skip
        rig.source.send(Event(seq=9, wall=info.wall, kind="request.finished", text="", request=gone.id, finished=info))
        rig.source.send(picture)
        rig.app.tick()
        row = next(line for line in rig.board("left").splitlines() if gone.id in line)
        assert row.startswith("  r-0002") and row.rstrip().endswith("abort by eve") and " done " in row
        assert "REQ 7 " in rig.board("left"), "the head counts those that live"
        assert rig.app.main.selection.request() == "r-0003", "it took the place"
        await rig.pilot.press("end", "a")
        assert not rig.source.commands
        assert any("r-0002 has ended: abort by eve" in note.text for note in rig.app.notes)
        picture = copy.deepcopy(picture)
        picture.sampled_at += 6.0
        rig.source.send(picture)
        rig.app.tick()
        assert "r-0002" not in rig.board("left").partition("LOG")[0]
        assert any(line.startswith("> r-0007") for line in rig.board("left").splitlines())


def in_view(rig):
    """The head of the request table, and the signs and ids of the rows below it."""
    rows = rig.board("left").splitlines()
    at = next(number for number, row in enumerate(rows) if row.startswith("  REQ "))
    return rows[at], [row[:8] for row in rows[at + 1 :] if row[2:4] == "r-"]


@pytest.mark.parametrize("size", [(80, 24), (60, 16)])
async def test_a_sort_shows_the_first_rows_and_the_head_has_those_in_view(size):
    async with console(snapshots.snapshot(2, 19), size=size) as rig:
        await rig.pilot.press("end")
        count = len(in_view(rig)[1])
        assert in_view(rig)[1][-1] == "> r-0012" and f"  {20 - count}-19/19" in in_view(rig)[0]
        for keys, first in ((("S", "i"), "r-0000"), (("R",), "r-0012"), ((*":sort arrival", "enter"), "r-0000")):
            await rig.pilot.press("end", *keys)
            head, rows = in_view(rig)
            assert rows[0] == f"> {first}" and f"  1-{count}/19" in head, keys
        await rig.pilot.press("end", "up", "space", "S", "i")
        head, rows = in_view(rig)
        assert rows[0] == "  r-0000" and f"1 marked  1-{count}/19" in head
        assert rig.app.main.selection.request() == "r-0012", "with marks the sort moves the view alone"
        await rig.pilot.press("up")
        assert any(row[2:] == "r-0011" for row in in_view(rig)[1]), "the next key goes on from the selected row"


async def test_the_cursor_and_the_view_stay_when_the_selected_request_ends():
    async with console(snapshots.snapshot(2, 19)) as rig:
        await rig.pilot.press("S", "b", "down")
        before = in_view(rig)[1]
        picture = copy.deepcopy(rig.source.picture)
        gone = next(each for each in picture.requests if each.id == before[1][2:])
        gone.state, gone.blocks = "finished", 0
        rig.source.send(picture)
        rig.app.tick()
        after = in_view(rig)[1]
        assert after[:2] == [before[0], f"> {before[2][2:]}"], "the next row took its place"
        await rig.pilot.press("end")
        assert in_view(rig)[1][-1] == f"> {gone.id}", "its own row is the last one, and can be chosen"


async def test_four_stages_have_a_row_each_on_the_smallest_screen():
    async with console(size=(60, 16)) as rig:
        rows = rig.board("left").splitlines()
        assert [row.split()[0] for row in rows[1:5]] == ["0", "1", "2", "3"] and "more" not in rig.board("left")
        assert sum("r-000" in row for row in rows) >= 3, "and requests have theirs"
        assert any(row.startswith("LOG") for row in rows) and any(row.startswith("OUT") for row in rows)
    picture = snapshots.snapshot(8, 8)
    async with console(picture, size=(60, 16)) as rig:
        assert "… 5 more" in rig.board("left")


@pytest.mark.parametrize(
    ("key", "verb", "if_rev"),
    [
        ("p", Preempt(request="r-0003"), 3),
        ("o", SwapOut(request="r-0003"), 3),
        ("n", SwapIn(request="r-0003"), 3),
        ("r", Release(request="r-0003"), 3),
        ("a", Abort(request="r-0003"), 3),
        ("P", Pause(), None),
        ("D", Drain(), None),
    ],
)
async def test_a_verb_asks_shows_the_plan_and_carries_the_revision(key, verb, if_rev):
    async with console() as rig:
        rig.app.main.selection.requests.choose("r-0003")
        dialog = await rig.confirm(key)
        assert rig.app.focused is dialog.query_one("#cancel")
        body = rig.board("dialog-body")
        assert "free 45 blocks of 812" in body and "b00t5eed0001" in body and "ppconsole -e opt@n0 " in body
        override = {"override": True, "reason": "the console asks for the plan"}
        assert rig.source.commands == [
            (verb, {"dry_run": True, "if_rev": if_rev, "epoch": "b00t5eed0001", "on_progress": None, **override})
        ]
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: rig.app.screen is rig.app.main)
        assert rig.source.acted() == [verb]
        assert rig.source.commands[-1][1]["if_rev"] == if_rev


async def test_the_key_of_a_verb_that_needs_a_number_opens_the_line_with_its_target():
    async with console() as rig:
        rig.app.main.selection.requests.choose("r-0003")
        await rig.pilot.press("+")
        field = rig.app.main.query_one(PromptLine).input
        assert field.value == "priority r-0003 "
        await rig.pilot.press("-", "5", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        assert "ppconsole -e opt@n0 priority r-0003 -5" in rig.board("dialog-body")
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: rig.app.screen is rig.app.main)
        assert rig.source.acted() == [Priority(request="r-0003", priority=-5)]
        assert rig.source.commands[-1][1]["if_rev"] == 3


@pytest.mark.parametrize("key", ["enter", "escape"])
async def test_cancel_is_the_default(key):
    async with console() as rig:
        await rig.confirm("a")
        await rig.pilot.press(key)
        assert rig.app.screen is rig.app.main and not rig.source.acted()


async def test_a_conflict_is_explained_and_looking_again_takes_the_new_revision():
    async with console() as rig:
        rig.source.answers["preempt"] = Refused(id="1", code="CONFLICT", text="revision is 9, not 0")
        dialog = await rig.confirm("p")
        picture = copy.deepcopy(rig.source.picture)
        picture.requests[0].revision, picture.requests[0].state = 9, "swapped"
        rig.source.send(picture)
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: "CONFLICT" in rig.board("dialog-body"))
        body = rig.board("dialog-body")
        assert "state running > swapped" in body and "revision 0 > 9" in body and "nothing was done" in body
        assert dialog.query_one("#confirm", Button).disabled
        await rig.pilot.click("#again")
        await rig.until(lambda: len(rig.source.commands) == 3)
        assert rig.source.commands[-1][1]["if_rev"] == 9 and rig.source.commands[-1][1]["dry_run"]
        assert rig.app.focused is dialog.query_one("#cancel")


async def test_a_dialog_is_about_its_epoch():
    async with console() as rig:
        await rig.confirm("a")
        picture = copy.deepcopy(rig.source.picture)
        picture.engine.epoch = "another"
        rig.source.send(picture)
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: "restarted" in rig.board("dialog-body"))
        assert not rig.source.acted()
        await rig.pilot.press("escape")
        rig.app.tick()
        assert "opt@n0 restarted: requests and events" in rig.board("left")


async def test_a_link_that_breaks_after_sending_leaves_the_outcome_unknown():
    async with console() as rig:
        rig.source.answers["abort"] = LinkLost("gone after sending", sent=True)
        await rig.confirm("a")
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: "outcome unknown" in rig.board("dialog-body"))


async def test_a_verb_that_takes_long_goes_on_when_its_dialog_is_closed():
    async with console() as rig:
        rig.source.release = asyncio.Event()
        await rig.confirm("D")
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: "esc closes this and it goes on" in rig.board("dialog-body"))
        await rig.pilot.press("escape")
        assert rig.app.screen is rig.app.main and rig.source.acted() == [Drain()]
        rig.source.release.set()
        await rig.until(lambda: any("applied at step 18413" in note.text for note in rig.app.notes))


async def test_a_plan_that_is_refused_cannot_be_confirmed():
    async with console() as rig:
        rig.source.plans["swap-in"] = Refused(id="1", code="DOES_NOT_FIT", text="needs 90 blocks, 12 are free")
        dialog = await rig.confirm("n")
        assert "needs 90 blocks, 12 are free" in rig.board("dialog-body")
        assert dialog.query_one("#confirm", Button).disabled


async def test_memory_shows_the_plan_while_typing_and_then_confirms():
    async with console() as rig:
        await rig.pilot.press("m")
        assert isinstance(rig.app.screen, MemoryDialog)
        await rig.pilot.press("0", ".", "5")
        await rig.until(lambda: "free 45 blocks" in rig.board("memory-plan"))
        await rig.pilot.press("enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        await rig.until(lambda: "free 45" in rig.board("dialog-body"))
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: bool(rig.source.acted()))
        assert rig.source.acted() == [SetMemory(utilization=0.5)] and rig.source.commands[-1][1]["if_rev"] == 7


@pytest.mark.parametrize("typed", ["-20", "0,5", "1.5", "nan", "half"])
async def test_memory_refuses_a_value_as_it_was_typed(typed: str):
    async with console() as rig:
        await rig.pilot.press("m", "ctrl+u", *typed, "enter")
        assert isinstance(rig.app.screen, MemoryDialog)
        said = " ".join(rig.board("memory-plan").split())
        assert f"'{typed}' is no utilization; it is a number above 0 and at most 1" in said
        assert all(how["dry_run"] for _, how in rig.source.commands), "at most the plan of what was typed so far"


async def test_keys_fit_the_state_of_the_engine():
    picture = snapshots.halted()
    picture.engine.state = "paused"
    async with console(picture) as rig:
        await rig.pilot.press("tab", "down")
        dialog = await rig.confirm("c")
        assert dialog.verb == Continue(stage=1)
        await rig.pilot.press("escape", "up")
        rig.source.commands.clear()
        dialog = await rig.confirm("x")
        assert dialog.verb == RestartStage(stage=0)
        await rig.pilot.press("escape")
        rig.source.commands.clear()
        dialog = await rig.confirm("P")
        assert dialog.verb == Resume()


async def test_a_cordon_is_placed_and_lifted_from_the_stage_row():
    async with console() as rig:
        await rig.pilot.press("C")
        assert rig.app.screen is rig.app.main, "no stage is chosen"
        assert any("cordon acts on a stage" in note.text for note in rig.app.notes)
        await rig.pilot.press("tab", "down")
        dialog = await rig.confirm("C")
        assert dialog.verb == Cordon(stage=1) and "free 45 blocks" in rig.board("dialog-body")
        assert "cordon --stage 1" in rig.board("dialog-body")
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: bool(rig.source.acted()))
        picture = snapshots.snapshot(4, 8)
        picture.stages[1].cordon = CordonInfo(by="eve", since_s=1.0)
        rig.source.send(picture)
        await rig.pilot.press("escape")
        await rig.until(lambda: " CORDON 1 " in rig.board("top") and "#" in rig.board("left"))
        dialog = await rig.confirm("C")
        assert dialog.verb == Cordon(stage=1, undo=True)


async def test_a_prompt_typed_while_the_link_is_lost_is_no_key_and_is_kept():
    async with console() as rig:
        rig.source.send(LinkState(state="lost", age_s=7.0, retry_in_s=2.0, text="no answer"))
        await rig.pilot.press("i", *"hello", "enter")
        assert "prompt: the link is lost" in rig.screen() and not rig.source.commands
        assert rig.app.screen is rig.app.main and rig.app.main.line.input.value == "hello"
        rig.source.send(LinkState(state="live", age_s=0.0), snapshots.snapshot(4, 8))
        await rig.pilot.press("enter")
        await rig.until(lambda: [verb.prompt for verb in rig.source.acted()] == ["hello"])
        assert rig.app.main.line.input.value == ""


async def test_a_lost_link_greys_disables_and_comes_back():
    async with console() as rig:
        rig.clock.now += 7
        rig.source.send(LinkState(state="lost", age_s=7.0, retry_in_s=2.0, text="no answer"))
        rig.app.tick()
        left = rig.app.screen.query_one("#left", Lines)
        assert left._faded and "lost" in rig.board("top") and "7.0s" in rig.board("top")
        assert "link lost: no answer; figures are 7.0s old" in rig.board("top"), "the reason is not cut"
        assert "preempt" not in rig.board("foot") and "stacks" in rig.board("foot")
        await rig.pilot.press("tab")
        offered = rig.board("foot").split()
        assert not {"continue", "restart", "cordon", "memory"} & set(offered) and "diagnosis" in offered
        await rig.pilot.press("tab")
        await rig.pilot.press("a", "i")
        assert rig.app.screen is rig.app.main and not rig.source.commands
        assert rig.app.main.query_one(PromptLine).input.has_focus, "words that follow are no keys"
        await rig.pilot.press("escape")
        rig.source.send(LinkState(state="live", age_s=0.0), snapshots.snapshot(4, 8))
        rig.app.tick()
        assert not left._faded and not rig.app.model.verbs_off() and "preempt" in rig.board("foot")


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (120, 50)])
async def test_messages_take_rows_of_their_own_and_cover_nothing(size, monkeypatch):
    monkeypatch.setattr("ppconsole.app.GOOD_S", 60.0)  # A slow machine types longer than a message is shown.
    async with console(size=size) as rig:
        before = rig.board("left").splitlines()
        rig.app.report("abort: the engine said no, and this is why: " + "word " * 14, bad=True)
        rig.app.report("copied: ppconsole show r-0001", bad=False)
        await rig.pilot.press(":", *"set-memory 0.5")
        await rig.until(lambda: "copied: ppconsole show" in rig.screen())
        assert ("! abort: the engine" in rig.screen()) == (size != (60, 16)), "a low screen has room for the newest"
        lines = [line.rstrip() for line in rig.screen().splitlines()]
        assert lines[-2].endswith("set-memory 0.5") and "copied: ppconsole show r-0001" in lines[-3]
        strip, rows = rig.board("note").splitlines(), rig.board("left").splitlines()
        assert len(strip) <= 3 and len(rows) == len(before) - len(strip)
        shown = [line[: len(row)] for line, row in zip(lines[2:], rows, strict=False)]
        assert [line.rstrip() for line in shown] == [row[: size[0]].rstrip() for row in rows], "every row is there"
        assert any(row.startswith("LOG") for row in rows) and any(row.startswith("OUT") for row in rows)
        for note in list(rig.app.notes):
            rig.app._forget_note(note)
        await rig.pilot.pause()
        assert rig.board("left").splitlines() == before, "and give them back"


async def test_messages_have_a_row_on_readers_and_go_by_themselves(monkeypatch):
    monkeypatch.setattr("ppconsole.app.GOOD_S", 60.0)  # A slow machine draws later than a short message ends.
    async with console() as rig:
        await rig.pilot.press("e", "y")
        height = lambda: rig.app.screen.query_one("#reader-body").size.height  # noqa: E731 - a word for it
        # The layout follows the text by a turn.
        await rig.until(lambda: "OSC 52" in rig.screen() and height() == 24 - 3)
        lines = rig.screen().splitlines()
        assert (
            lines[-2].startswith("● sent to the terminal's clipboard (OSC 52): ppconsole") and "esc back" in lines[-1]
        )
        await rig.pilot.press("y", "y", "y")
        assert [note.text for note in rig.app.notes].count(
            "sent to the terminal's clipboard (OSC 52): ppconsole -e opt@n0 events"
        ) == 1
        monkeypatch.setattr("ppconsole.app.GOOD_S", 0.05)
        await rig.pilot.press("y")
        await rig.until(lambda: "OSC 52" not in rig.screen() and height() == 24 - 2)


def test_the_rows_of_messages_are_bounded():
    notes = Notes()
    old = notes.add("the first", bad=False)
    notes.add("word " * 200, bad=True)
    rows = [text_of(row) for row in notes.rows(40, 24)]
    assert len(rows) == 3 and rows[0].startswith("! word") and rows[2].endswith("…")
    assert all(width_of(row) <= 40 for row in rows)
    notes.add("the last", bad=False)
    assert [text_of(row) for row in notes.rows(40, 24)] == ["● the last"], "a message is shown whole or not"
    notes.add("the first", bad=False)
    assert [text_of(row) for row in notes.rows(40, 16)] == ["● the last", "● the first"]
    notes.remove(old)
    assert [text_of(row) for row in notes.rows(40, 24)] == ["● the last", "● the first"]


def test_messages_take_rows_where_most_are_to_spare():
    for size in ((60, 16), (80, 24), (120, 36), (200, 50)):
        for follows in (False, True):
            made = frame(*size, 4, follows, 8)
            for rows in range(3 if size[1] < 20 else 4):
                low = made.lowered(rows)
                parts = ("stages", "requests", "events", "output", "trends")
                assert sum(getattr(made, part) - getattr(low, part) for part in parts) == rows
                assert low.stages == made.stages and low.requests >= 1 and low.output >= 1 and low.events >= 1


async def test_silence_alone_makes_the_picture_stale():
    async with console() as rig:
        rig.clock.now += 3
        rig.app.tick()
        assert "stale 3.0s" in rig.board("top") and rig.app.model.verbs_off()


@pytest.mark.parametrize(("read_only", "live"), [(True, True), (False, False)])
async def test_read_only_and_recordings_hide_and_refuse_verbs(read_only, live):
    async with console(read_only=read_only, live=live) as rig:
        assert "preempt" not in rig.board("foot")
        assert " RO " in rig.board("top")
        await rig.pilot.press("p", "m", "D", "i")
        assert rig.app.screen is rig.app.main and not rig.source.commands
        rig.app.navigation.begin_command("abort r-0001", needs_words=False)
        assert not rig.source.commands


async def test_the_dialog_says_how_to_confirm_and_what_cancel_did():
    async with console() as rig:
        dialog = await rig.confirm("a")
        assert rig.board("dialog-body").splitlines()[-1].startswith("⇥ ⏎ does it   esc cancels")
        await rig.pilot.press("tab")
        assert rig.board("dialog-body").splitlines()[-1].startswith("⏎ does it   esc cancels")
        await rig.pilot.press("shift+tab", "enter")
        assert rig.app.screen is rig.app.main and rig.source.acted() == []
        assert [note.text for note in rig.app.notes] == ["abort: cancelled; nothing was done"]
        rig.source.plans["abort"] = Refused(id="1", code="NOT_FOUND", text="it has ended")
        await rig.confirm("a")
        assert "does it" not in rig.board("dialog-body"), "there is nothing to confirm"
        await rig.pilot.press("escape")
        rig.source.plans.clear()
        rig.source.answers["abort"] = LinkLost("gone", sent=True)
        await rig.confirm("a")
        await rig.pilot.press("tab", "enter")
        await rig.until(lambda: "outcome unknown" in rig.board("dialog-body"))
        before = set(rig.app.notes)
        await rig.pilot.press("escape")
        assert set(rig.app.notes) <= before, "it may have been done"
        assert dialog.verb == Abort(request="r-0000")


async def test_the_page_of_a_request_that_ends_offers_no_verb():
    async with console() as rig:
        await rig.pilot.press("enter")
        await rig.until(lambda: "abort" in rig.board("reader-foot"))
        live = rig.source.picture
        done = copy.deepcopy(live)
        done.requests[0].state = "finished"
        rig.source.send(done)
        await rig.app.screen._load()
        assert "abort" not in rig.board("reader-foot") and "copy answer" in rig.board("reader-foot")
        gone = copy.deepcopy(live)
        del gone.requests[0]
        rig.app.screen._detail = None
        rig.source.send(gone)
        await rig.app.screen._load()
        assert "abort" not in rig.board("reader-foot"), "the engine has forgotten it"
        rig.source.send(live)
        await rig.app.screen._load()
        assert "abort" in rig.board("reader-foot")


async def test_hostile_text_is_inert_everywhere():
    async with console(snapshots.hostile()) as rig:
        picture = rig.screen()
        assert "[red]x[/red]" in picture
        await rig.pilot.press("down")
        await rig.confirm("a")
        picture += rig.screen()
        await rig.pilot.press("escape", "enter")
        picture += rig.screen()
        rig.app.report(snapshots.HOSTILE, bad=True)
        await rig.pilot.pause()
        picture += rig.screen()
        assert not set("\x1b\x07\r\t\u202e\u200b") & set(picture)


async def test_a_prompt_streams_its_output():
    async with console() as rig:
        await rig.pilot.press("i", "h", "i", "enter")
        await rig.until(lambda: rig.app.following.request == "r-new")
        await rig.until(lambda: rig.app.model.state.outputs["r-new"].finished if rig.app.model.state.outputs else False)
        rig.app.paint()
        assert rig.source.acted()[0].prompt == "hi" and isinstance(rig.source.acted()[0], Submit)
        assert "The stage then hands its hidden states on." in rig.board("left")
        await rig.pilot.press("up")
        assert rig.app.main.query_one(PromptLine).input.value == "hi"


async def test_the_command_line_submits_with_the_options_of_the_cli():
    async with console() as rig:
        await rig.pilot.press("colon", *"submit 'a fox' --max-tokens 12 --seed 3", "enter")
        await rig.until(lambda: rig.app.following.request == "r-new")
        sampling = SamplingParams(max_tokens=12, seed=3, temperature=0.8)
        assert rig.source.acted() == [Submit(prompt="a fox", sampling=sampling)]


async def test_keys_that_arrive_in_one_packet_are_the_prompt_and_not_verbs():
    async with console() as rig:
        for char in "ipaq D":
            rig.app.post_message(events.Key({" ": "space", "D": "D"}.get(char, char), char))
        field = rig.app.main.query_one(PromptLine).input
        await rig.until(lambda: field.value == "paq D")
        assert rig.app.screen is rig.app.main and not rig.source.commands


async def test_paste_goes_into_the_prompt_and_nowhere_else():
    async with console() as rig:
        rig.app.post_message(events.Paste("a\nq"))
        await rig.pilot.pause()
        assert rig.app.screen is rig.app.main and not rig.source.commands
        await rig.pilot.press("i")
        field = rig.app.main.query_one(PromptLine).input
        field.post_message(events.Paste("two\nlines"))
        await rig.until(lambda: field.value == "two lines")
        await rig.pilot.press("escape", "colon")
        field.post_message(events.Paste("stop"))
        await rig.pilot.pause()
        assert field.value == ""


async def test_the_command_line_filter_and_completion():
    async with console() as rig:
        await rig.pilot.press("colon", "p", "r", "e", "tab", "space", "r", "-", "0", "0", "0", "5", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        assert rig.app.screen.verb == Preempt(request="r-0005")
        await rig.pilot.press("escape", "slash", "e", "v", "e")
        assert "REQ 2/8" in rig.board("left")
        await rig.pilot.press("escape")
        assert "REQ 8 " in rig.board("left")


async def test_the_display_freezes_while_figures_arrive():
    async with console() as rig:
        await rig.pilot.press("F")
        picture = copy.deepcopy(rig.source.picture)
        picture.engine.step = 20_000
        rig.source.send(picture)
        rig.clock.now += 1
        rig.app.tick()
        assert "step 18412" in rig.board("top") and "FROZEN 1.0s" in rig.board("top")
        assert rig.app.model.state.snapshot.engine.step == 20_000
        await rig.pilot.press("F")
        assert "step 20000" in rig.board("top")


async def test_readers_open_load_and_close():
    async with console(snapshots.stuck()) as rig:
        looks = {
            "s": "attention (ppengine",
            "l": "retired in 22 ms",
            "d": "no step retired",
            "e": "set-memory",
            "enter": "BLOCK TABLE",
            "question_mark": "continue halted stage",
        }
        for key, says in looks.items():
            await rig.pilot.press(key)
            await rig.until(lambda says=says: says in rig.board("reader-body"))
            await rig.pilot.press("escape")
            assert rig.app.screen is rig.app.main
        await rig.pilot.press("tab", "down", "down", "enter")
        assert "STAGE 2" in rig.board("reader-title") and "self_stuck" in rig.board("reader-body")


async def test_a_failing_worker_shows_in_the_banner_and_starts_again():
    async with console(fail_starts=1) as rig:
        await rig.until(lambda: "boom [red]x[/red]" in rig.board("top"))
        await rig.until(lambda: rig.source.starts == 2 and rig.app.model.state.snapshot is not None)


async def test_a_tick_before_a_screen_is_composed_is_harmless():
    async with console() as rig:
        for open_it in (lambda: rig.app.navigation.ask(Pause()), lambda: rig.app.navigation.begin_verb("set-memory"),
                        lambda: rig.app.navigation.open_reader("logs")):  # fmt: skip
            open_it()
            for _ in range(20):
                rig.app.paint()
                await asyncio.sleep(0)
            await rig.pilot.press("escape")
            await rig.until(lambda: rig.app.screen is rig.app.main)


async def test_a_dialog_that_fits_without_its_empty_rows_is_whole():
    async with console(size=(60, 16)) as rig:
        await rig.confirm("p")
        body = rig.board("dialog-body")
        assert "free 45 blocks of 812" in body and "held until released" in body and "esc cancels" in body
        assert "more lines" not in body and len(body.splitlines()) <= 16 - 5


async def test_a_dialog_that_is_too_long_says_what_is_missing():
    lines = [f"line {number} of the plan" for number in range(9)]
    long = Outcome(id="1", op="o1", state="planned", text=lines[0], plan=lines)
    async with console(size=(60, 16), plans={"preempt": long}) as rig:
        await rig.confirm("p")
        body = rig.board("dialog-body").splitlines()
        assert any("more lines" in line for line in body) and "esc cancels" in body[-1]
        assert len(body) == 11 and rig.app.screen.query_one("#cancel").region.bottom <= 16


async def test_the_palette_has_the_verbs_and_the_themes():
    async with console() as rig:
        await rig.pilot.press("ctrl+p", *"set-mem")
        await rig.until(lambda: "change the memory" in rig.screen())
        await rig.pilot.press("enter")
        field = rig.app.main.query_one(PromptLine).input
        await rig.until(lambda: field.value == "set-memory ")
        rig.app.use_theme("pp-light")
        rig.app.tick()
        assert rig.app.theme == "pp-light"


async def test_the_shell_line_is_copied_and_the_picture_saved(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    async with console() as rig:
        await rig.pilot.press("j", "y", "ctrl+s")
        assert rig.app.clipboard == "ppconsole -e opt@n0 show r-0001"
        saved = list(tmp_path.glob("*.svg"))
        assert len(saved) == 1 and "r-0001" in saved[0].read_text()
        await rig.confirm("a")
        await rig.pilot.press("y")
        assert rig.app.clipboard == "ppconsole -e opt@n0 abort r-0001"


async def test_a_text_that_was_copied_is_in_a_file_too_as_a_terminal_may_take_none(tmp_path):
    settings = Settings(tmp_path / "ppconsole" / "console.json")
    async with console(settings=settings, size=(160, 48)) as rig:
        await rig.pilot.press("j", "y")
        kept = tmp_path / "ppconsole" / "copied.txt"
        assert kept.read_text() == "ppconsole -e opt@n0 show r-0001" and kept.stat().st_mode & 0o777 == 0o600
        (note,) = rig.app.notes
        assert note.text == f"sent to the terminal's clipboard (OSC 52), kept in {kept}: {kept.read_text()}"
        kept.unlink()
        kept.mkdir()
        await rig.pilot.press("k", "y")
        assert "clipboard (OSC 52) alone (Is a directory)" in [note.text for note in rig.app.notes][-1]


async def test_the_map_lights_another_request_without_waiting_for_the_next_second(monkeypatch):
    async with console(snapshots.snapshot(4, 8), size=(160, 48)) as rig:
        rig.app.tick()
        main = rig.app.main
        feed, requests = main.block_map, main.selection.requests
        await rig.until(lambda: feed.blocks is not None and feed.blocks.request == requests.id)
        rig.app._next.stop()  # no second comes any more
        monkeypatch.setattr(rig.app, "tick", lambda: None)
        first, drawn = requests.id, feed.blocks
        await rig.pilot.press("j")
        await rig.until(lambda: feed.blocks.request == requests.id != first)
        cells = feed._cells
        assert 0 < sum(count for count, _ in drawn.runs) <= cells
        shown = board.right(rig.app.model.shown, main.selection.frame, 44, feed.blocks, board.Picked(requests.id, None))
        assert shown.cells == cells


@pytest.mark.parametrize(
    ("keys", "screen"),
    [
        ((), "main"), (("enter",), "request"), (("tab", "enter"), "stage"), (("s",), "stacks"), (("l",), "logs"),
        (("e",), "events"), (("d",), "diagnosis"), (("v",), "streams"), (("m",), "memory"), (("P",), "confirm"),
    ],
)  # fmt: skip
async def test_the_help_key_shows_the_legend_of_the_present_screen(keys, screen):
    async with console(snapshots.stuck()) as rig:
        for key in keys:
            await rig.pilot.press(key)
            await rig.pilot.pause(0.05)
        below = rig.app.screen
        await rig.pilot.press("question_mark")
        await rig.until(lambda: isinstance(rig.app.screen, HelpScreen))
        assert f"HELP: {screen.upper()}" in rig.board("reader-title")
        seen = ""
        for _ in range(len(legend.SCREENS[screen]) + 7):  # Tab goes through all sections; those of keys come first
            seen += rig.board("reader-body")
            await rig.pilot.press("tab")
        for section in legend.SCREENS[screen]:
            assert f" {section.title} " in seen
        await rig.pilot.press("question_mark", "escape")
        await rig.until(lambda: rig.app.screen is below)
        assert not rig.source.acted()


async def test_sizes_from_tiny_to_wide():
    async with console(snapshots.snapshot(8, 60), size=(50, 12)) as rig:
        assert "needs 60x16" in rig.screen()
        await rig.pilot.resize_terminal(80, 24)
        await rig.pilot.pause()
        assert "needs" not in rig.screen() and "KV MAP" not in rig.screen()
        assert "blocks" not in rig.source.inspected
        await rig.pilot.resize_terminal(200, 50)
        await rig.pilot.pause()
        rig.app.tick()
        await rig.until(lambda: rig.app.main.block_map.blocks is not None)
        rig.app.tick()
        await rig.pilot.pause()
        picture = rig.screen()
        assert "TIMELINE" in picture and "KV MAP" in picture and " used" in picture and "STAGE 0 STREAMS" in picture


async def test_without_colour_no_colour_is_written(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = ConsoleApp(FakeSource(snapshots.stuck()), clock=Clock())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.tick()
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        styles = [segment.style for strip in strips[:20] for segment in strip if segment.style]
        assert styles and all(
            each is None or each.is_default for style in styles for each in (style.color, style.bgcolor)
        )
        assert "! STAGE 2 self_stuck" in strips[1].text


async def test_a_picture_is_painted_when_it_comes_but_not_twice_in_half_a_second():
    async with console() as rig:
        rig.clock.now += 1.0
        picture = copy.deepcopy(rig.source.picture)
        picture.engine.name = "renamed"
        rig.source.send(picture)
        await rig.until(lambda: "renamed" in rig.board("top"))
        picture = copy.deepcopy(picture)
        picture.engine.name = "again"
        rig.source.send(picture)
        await rig.pilot.pause()
        assert "again" not in rig.board("top")
        await rig.until(lambda: "again" in rig.board("top"))


async def test_only_rows_that_changed_become_strips_again(monkeypatch):
    painted = []
    strip = Brush.strip
    monkeypatch.setattr(Brush, "strip", lambda self, line, width: painted.append(line) or strip(self, line, width))
    async with console() as rig:
        picture = copy.deepcopy(rig.source.picture)
        changed = picture.requests[1]
        changed.owner = "somebody"
        rig.source.send(picture)
        painted.clear()
        rig.app.tick()
        await rig.pilot.pause()
        await rig.until(lambda: bool(painted))
        assert [changed.id in text_of(line) for line in painted].count(True) == 1
        assert not any(other.id in text_of(line) for line in painted for other in picture.requests if other != changed)


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_an_end_is_no_broken_network(size):
    async with console(size=size) as rig:
        rig.source.send(LinkState(state="ended", age_s=0.1, text="ended 02:34:12: stopped by ann: upgrade"))
        await rig.until(lambda: "ENDED" in rig.board("top"))
        first, second = rig.board("top").splitlines()
        assert second.strip() == "ended 02:34:12: stopped by ann: upgrade"
        assert "lost" not in first and "retry" not in first and "SERVING" not in first
        await rig.pilot.press("P")
        assert not rig.source.commands and rig.app.model.verbs_off() == "the engine has ended"
        rig.source.send(LinkState(state="new-epoch", text="restarted"), snapshots.snapshot(4, 8))
        await rig.until(lambda: "SERVING" in rig.board("top"))


async def test_ends_of_several_stages_are_one_line():
    async with console() as rig:
        for index in range(4):
            text = f"dead: stage {index} was killed by SIGKILL"
            rig.source.send(Event(seq=100 + index, wall=0.0, kind="verdict.raised", text=text, stage=index))
        rig.source.send(Event(seq=104, wall=0.0, kind="engine.stopped", text="the gateway was stopped"))
        rig.app.tick()
        lines = [line for line in rig.board("left").splitlines() if "killed by SIGKILL" in line]
        assert len(lines) == 1 and "dead: stages 0 to 3 were killed by SIGKILL" in lines[0]
        await rig.pilot.press("e")
        assert rig.screen().count("was killed by SIGKILL") == 4, "the list of events has each"


async def test_keys_change_the_scale_of_the_timeline_and_nothing_else_does():
    async with console(size=(140, 40)) as rig:
        assert "TIMELINE  last 200 ms" in rig.board("right")
        await rig.pilot.press("Z")
        assert "TIMELINE  last 500 ms" in rig.board("right")
        picture = copy.deepcopy(rig.source.picture)
        picture.stages[0].timeline = [[3, 7, 9000.0, 5.0]]
        rig.source.send(picture)
        rig.app.tick()
        assert "TIMELINE  last 500 ms" in rig.board("right")
        await rig.pilot.press(*["z"] * 9)
        assert "TIMELINE  last 50 ms" in rig.board("right")
        await rig.pilot.press(*["Z"] * 9, "F", "z")
        assert "TIMELINE  last 5 s" in rig.board("right")  # a frozen display, too
        await rig.pilot.press("tab", "enter", "z")
        await rig.until(
            lambda: "TIMELINE  last 2 s" in rig.screen() or "TIMELINE  last 2 s" in rig.board("reader-body")
        )
        assert "z Z" in rig.board("reader-foot")


async def test_prompt_and_answer_are_together_and_a_key_copies_the_answer(monkeypatch):
    copied: list[str] = []
    async with console(size=(120, 36)) as rig:
        monkeypatch.setattr(rig.app, "copy_to_clipboard", copied.append)
        await rig.pilot.press("Y")
        await rig.until(lambda: "no answer to copy" in rig.screen())
        rig.source.output = "A tale\x1b[31m of two stages."
        await rig.pilot.press("i", *"tell", "space", *"me", "enter")
        await rig.until(lambda: "two stages." in rig.board("left"))
        lines = rig.board("left").splitlines()
        at = next(index for index, line in enumerate(lines) if line.startswith("OUT "))
        assert "› tell me" in lines[at] and "two stages." in lines[at + 1]
        assert "request" not in rig.source.inspected, "a prompt that was sent from here is known"
        await rig.pilot.press("escape", "Y")
        assert copied == ["A tale of two stages."]
        await rig.until(lambda: "21 characters of the answer of r-new sent to the terminal's clipboard" in rig.screen())


async def test_the_prompt_of_another_operators_request_is_fetched(monkeypatch):
    copied: list[str] = []
    async with console(size=(120, 36)) as rig:
        monkeypatch.setattr(rig.app, "copy_to_clipboard", copied.append)
        rig.app.main.selection.requests.choose("r-0002")
        await rig.pilot.press("f")
        await rig.until(lambda: "› A stage that has computed its layers" in rig.board("left"))
        await rig.pilot.press("enter")
        await rig.until(lambda: "hidden states" in rig.board("reader-body"))
        lines = rig.board("reader-body").splitlines()
        at = next(index for index, line in enumerate(lines) if line.strip() == "PROMPT")
        assert "› A stage that has computed its layers" in lines[at + 1] and lines[at + 3].strip() == "OUTPUT"
        await rig.pilot.press("Y")
        assert copied == [snapshots.detail(rig.source.picture.requests[2]).output_text]


async def test_a_long_answer_says_how_much_of_it_is_not_kept(monkeypatch):
    notes: list[str] = []
    async with console(size=(120, 36)) as rig:
        monkeypatch.setattr(rig.app, "report", lambda text, *, bad: notes.append(text))
        monkeypatch.setattr(rig.app, "copy_to_clipboard", lambda text: None)
        rig.source.output = "x" * 20_500
        await rig.pilot.press("i", "a", "enter")
        await rig.until(lambda: bool(rig.app.model.state.outputs.get("r-new", board.Output("")).finished))
        await rig.pilot.press("escape", "Y")
        await rig.until(lambda: bool(notes))
        assert notes == [
            "20000 characters of the answer of r-new sent to the terminal's clipboard (OSC 52); "
            "500 before them are not kept here"
        ]


async def test_four_keys_show_the_request_with_most_blocks_on_stage_two():
    async with console() as rig:
        await rig.pilot.press("tab", "down", "down", "enter")
        rows = rig.board("reader-body").splitlines()
        at = next(number for number, row in enumerate(rows) if "REQUESTS BY BLOCKS" in row)
        assert "STAGE 2" in rig.board("reader-title") and rows[at + 2].split()[0] == "r-0002", "without scrolling"
