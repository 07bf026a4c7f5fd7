"""Work of the console that keys would wait for: paints, rows, garbage."""

from __future__ import annotations

import gc
import threading

import pytest
import snapshots
from large_engine import LargeEngine, copied
from ppconsole import upkeep
from ppconsole.screens.detail_screens import EventsScreen
from ppconsole.screens.main_screen import MainScreen
from ppconsole.screens.reader import Reader
from ppconsole.upkeep import EVERY_S, QUIET_S, Upkeep
from ppconsole.view import events, step_table
from ppconsole.view.cells import text_of
from ppconsole.widgets.strips import RowStrip
from ppengine.protocol.place import Place
from rich.segment import Segment
from test_tui_console import Clock, console
from textual.strip import Strip


@pytest.mark.parametrize("size", [(80, 24), (118, 50)])
async def test_a_screen_is_painted_once_when_it_opens_and_once_when_one_returns(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that it is painted by the tick, and when its details come: the block map of a wide terminal is one."""
    monkeypatch.setattr("ppconsole.app.TICK_S", 1000.0)
    painted: list[str] = []
    for kind in (Reader, MainScreen):
        paint = kind.paint
        monkeypatch.setattr(
            kind, "paint", lambda screen, paint=paint: painted.append(type(screen).__name__) or paint(screen)
        )
    async with console(snapshots.snapshot(4, 20), size=size) as rig:
        for key, name in (("e", "EventsScreen"), ("T", "TrendsScreen"), ("question_mark", "HelpScreen")):
            painted.clear()
            await rig.pilot.press(key)
            assert painted == [name] and rig.board("reader-title").strip()
            painted.clear()
            await rig.pilot.press("escape")
            assert painted == ["MainScreen"]


async def test_a_resize_is_painted() -> None:
    async with console(snapshots.snapshot(4, 20)) as rig:
        await rig.pilot.press("e")
        await rig.pilot.resize_terminal(120, 36)
        await rig.until(lambda: len(rig.board("reader-title")) == 120)
        await rig.pilot.press("escape")
        await rig.until(lambda: len(rig.board("top").splitlines()[1]) == 120)


async def test_rows_of_an_event_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LargeEngine(1e9, stages=2, requests=200)
    fresh = [event for _ in range(12) for event in engine.advance(1.0)]
    async with console(engine.snapshot) as rig:
        for event in fresh[:-1]:
            rig.app.model.take(event)
        await rig.pilot.press("e")
        screen = rig.app.screen
        assert isinstance(screen, EventsScreen)
        made: list[int] = []
        rows = events.event_rows
        monkeypatch.setattr(events, "event_rows", lambda event, width: made.append(event.seq) or rows(event, width))
        screen.body(80)
        rig.app.model.take(fresh[-1])
        shown = rig.app.model.shown.events
        assert screen.body(80) == [line for event in shown for line in rows(event, 80)], "as if all were made now"
        assert made == [fresh[-1].seq], "the new one"
        for width in (60, 200, 80):
            assert screen.body(width) == [line for event in shown for line in rows(event, width)]


def test_steps_are_read_of_stages_that_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 stages have 25,000 operations in their rings."""
    read: list[int] = []
    of_stage = step_table.of_stage
    monkeypatch.setattr(step_table, "of_stage", lambda stage, now: read.append(stage.stage) or of_stage(stage, now))
    rings = snapshots.rings()
    newest = max(number for stage in rings.stages for number in of_stage(stage, rings.mono_ns).cells)
    step_table.rows(rings, [], set(), "LAST", "", 200)
    assert read == [0, 1, 2, 3]
    read.clear()
    narrow = step_table.rows(rings, [], {Place(3, 0)}, "LAST", "", 18)
    assert read == [3]
    assert any(text_of(line).startswith(f" m{newest}") for line in narrow), "another stage alone has it"


def test_a_strip_has_the_same_parts_as_the_one_of_the_library() -> None:
    segments = [Segment("stage 0 "), Segment("■■■■"), Segment("  漢字 "), Segment("end")]
    width = sum(segment.cell_length for segment in segments)
    for cuts in ([width], [3, width], [8, 12, width], [4, 9, 15, width], [5], [5, width + 4]):
        mine, theirs = RowStrip(list(segments), width), Strip(list(segments), width)
        for _ in range(2):  # the second time from a cache
            assert list(mine.divide(cuts)) == list(theirs.divide(cuts))


async def test_paints_leave_no_garbage() -> None:
    engine = LargeEngine(1e9, stages=8, requests=100)
    async with console(copied(engine.snapshot), size=(120, 36)) as rig:

        async def paint() -> None:
            engine.advance(1.0)
            rig.app.model.take(copied(engine.snapshot))
            rig.app.main.action_move(1)
            await rig.pilot.pause()

        for _ in range(3):
            await paint()
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await paint()
            found = gc.collect()
        finally:
            gc.enable()
    assert found < 100, "objects that refer to themselves: a paint of 50 rows left 1,900"


def test_garbage_is_searched_for_in_pauses_of_the_keyboard(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, begun = Clock(), threading.Event()
    searched: list[float] = []
    monkeypatch.setattr(upkeep, "begin", begun.set)
    monkeypatch.setattr(gc, "collect", lambda: searched.append(clock.now))
    work = Upkeep(clock)
    work.rest()
    assert begun.wait(10) and not searched, "behind the first picture"
    clock.now += EVERY_S
    work.note_key()
    work.rest()
    assert not searched, "a key has just been pressed, and the next one may come"
    clock.now += QUIET_S
    work.rest()
    work.rest()
    assert len(searched) == 1
    clock.now += EVERY_S
    work.rest()
    assert len(searched) == 2
