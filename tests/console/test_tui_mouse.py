"""The mouse: a click selects or sorts, the wheel scrolls."""

from __future__ import annotations

import snapshots
from ppconsole.model.sorting import Order
from ppconsole.widgets.prompt import PromptLine
from test_tui_console import console
from textual import events


def row_of(rig, text):
    """Return the row of the left part that has `text`."""
    return next(y for y, line in enumerate(rig.board("left").splitlines()) if text in line)


async def wheel(rig, kind, selector, times=1):
    for _ in range(times):
        await rig.pilot._post_mouse_events([kind], selector, button=0)
    await rig.pilot.pause()


async def test_a_click_selects_a_request_or_a_stage():
    async with console() as rig:
        await rig.pilot.click("#left", offset=(5, row_of(rig, "r-0004")))
        assert rig.app.main.selection.request() == "r-0004" and not rig.app.main.selection.on_stages
        assert any(line.startswith("> r-0004") for line in rig.board("left").splitlines()), "at once"
        await rig.pilot.click("#left", offset=(5, 3))
        assert rig.app.main.selection.focused_stage() == 2 and "restart 2" in rig.board("foot")
        await rig.pilot.click("#left", offset=(5, row_of(rig, "POOL")))
        assert rig.app.main.selection.focused_stage() == 2, "nothing is there to select"
        await rig.pilot.press("colon", "x")
        await rig.pilot.click("#left", offset=(5, row_of(rig, "r-0001")))
        assert rig.app.main.selection.request() == "r-0001"
        assert not rig.app.screen.query_one(PromptLine).is_open


async def test_a_click_on_a_title_sorts_and_again_reverses():
    async with console() as rig:
        title = row_of(rig, "REQ 8")
        at = rig.board("left").splitlines()[title].index("OUT") + 1
        for arrow in ("OUT▼", "OUT▲", "OUT▼"):
            await rig.pilot.click("#left", offset=(at, title))
            assert arrow in rig.board("left")
        assert rig.app.model.state.order == Order("out", True)
        await rig.pilot.click("#left", offset=(0, title))
        assert rig.app.model.state.order.column == "out", "that column has no title"


async def test_the_wheel_moves_in_the_table_and_scrolls_a_reader():
    async with console(snapshots.snapshot(2, 60)) as rig:
        await wheel(rig, events.MouseScrollDown, "#left", 3)
        assert rig.app.main.selection.request() == "r-0003"
        await wheel(rig, events.MouseScrollUp, "#left")
        assert rig.app.main.selection.request() == "r-0002"
        await rig.pilot.press("question_mark")
        await wheel(rig, events.MouseScrollDown, "#reader-body", 2)
        assert rig.app.screen.top == 6
        await wheel(rig, events.MouseScrollUp, "#reader-body")
        assert rig.app.screen.top == 3
