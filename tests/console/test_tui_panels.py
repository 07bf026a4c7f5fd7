"""Panels of the main screen: shown and hidden by key, kept, hidden by need; and the trends."""

from __future__ import annotations

import asyncio
import copy

import pytest
import snapshots
from ppconsole.link import kept_points
from ppconsole.link.settings import Settings
from ppconsole.view import request_table
from ppconsole.view.cells import place
from ppconsole.view.frame import frame
from ppconsole.view.panels import PANELS, RightColumn, key_of
from ppengine.protocol.recording import Recorder
from ppengine.protocol.snapshot import Queues, Why
from test_tui_console import Clock, console

LONG = "need 512, have 100: r-0001 to r-0009 hold all other blocks"
SEEN = {
    "stages": "STREAM:OP", "requests": "REQ 8", "timeline": "TIMELINE", "kv-map": "KV MAP", "log": "LOG",
    "output": "follows the request", "trends": "TRENDS",
}  # fmt: skip


def waiting(text=LONG):
    """An engine with one request whose WHY is long."""
    picture = snapshots.snapshot(4, 8)
    for request in picture.requests:
        request.why = None
    picture.requests[1].state, picture.requests[1].why = "waiting", Why(code="blocks", text=text)
    return picture


@pytest.mark.parametrize("panel", PANELS)
async def test_a_key_hides_and_shows_a_panel_and_it_stays_so(tmp_path, panel):
    path = tmp_path / "console.json"
    async with console(size=(160, 40), settings=Settings(path)) as rig:
        rig.app.paint()
        assert SEEN[panel] in rig.screen()
        await rig.pilot.press(key_of(panel))
        assert SEEN[panel] not in rig.screen()
        assert all(text in rig.screen() for name, text in SEEN.items() if name != panel)
    async with console(size=(160, 40), settings=Settings(path)) as rig:
        assert SEEN[panel] not in rig.screen()
        await rig.pilot.press(key_of(panel))
        assert SEEN[panel] in rig.screen()
        await rig.pilot.press(key_of(panel), "0")
        assert SEEN[panel] in rig.screen()
    assert Settings(path).panels == {} and Settings(path).problem == ""


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 36), (200, 50)])
def test_any_choice_of_panels_fits(size):
    for number in range(2 ** len(PANELS)):
        choices = {panel: bool(number >> bit & 1) for bit, panel in enumerate(PANELS)}
        for wanted in (True, False):
            made = frame(*size, 4, wanted, 20, choices)
            used = made.stages + made.requests + made.trends + made.events + made.output
            heads = choices["stages"] + choices["requests"]
            assert min(made) >= 0 and used + heads + 5 <= size[1]
            for panel in ("stages", "requests", "trends", "log", "output"):
                assert made.shows(panel) == choices[panel]
            if any(choices[panel] for panel in ("requests", "log", "trends")):
                assert used + heads + 5 == size[1], "a row is not used"


async def test_no_verb_acts_on_a_request_of_a_hidden_table():
    async with console() as rig:
        await rig.pilot.press("down", "2")
        assert rig.app.main.wanted_request() is None
        await rig.pilot.press("a")
        assert rig.app.screen is rig.app.main and not rig.source.commands
        await rig.pilot.press("1", "down", "c")
        assert rig.app.screen is rig.app.main and not rig.source.commands
        await rig.pilot.press("2")
        assert rig.app.main.selection.request() is not None


async def test_the_block_map_is_not_fetched_while_it_is_hidden():
    async with console(size=(120, 36)) as rig:
        await rig.until(lambda: "blocks" in rig.source.inspected)
        await rig.pilot.press("4")
        rig.source.inspected.clear()
        for _ in range(3):
            rig.app.tick()
            await rig.pilot.pause()
        assert "blocks" not in rig.source.inspected
        await rig.pilot.press("4")
        await rig.until(lambda: "blocks" in rig.source.inspected)


async def test_a_panel_of_the_right_column_says_that_it_needs_a_wide_terminal():
    async with console() as rig:
        await rig.pilot.press("4")
        await rig.until(lambda: "needs 120 columns" in rig.screen())
        assert rig.app.settings.panels == {}


def seconds(rig, count):
    """Let seconds pass in which the picture stays."""
    for _ in range(count):
        rig.clock.now += 1
        rig.source.send(copy.deepcopy(rig.source.picture))
        rig.app.tick()


async def test_the_right_column_yields_to_a_why_that_is_cut_and_a_key_brings_it_back():
    async with console(waiting(), size=(120, 36)) as rig:
        assert "KV MAP" in rig.screen() and LONG not in rig.screen()
        seconds(rig, 3)
        await rig.until(lambda: "KV MAP" not in rig.screen() and LONG in rig.screen())
        assert "4 brings back the KV map" in rig.board("foot")
        await rig.pilot.press("4")
        seconds(rig, 10)
        await rig.until(lambda: "KV MAP" in rig.screen())
        assert "brings back" not in rig.board("foot")


async def test_at_80_columns_owner_and_host_blocks_yield_to_a_why_that_is_cut():
    reason = "step full, 512 tokens; behind r-0000"
    async with console(waiting(reason), size=(80, 24)) as rig:
        rig.app.paint()
        assert "OWNER" in rig.screen() and reason not in rig.screen()
        seconds(rig, 3)
        assert reason in rig.screen() and "AGE" in rig.screen()
        assert "OWNER" not in rig.screen() and "SWP" not in rig.screen() and "KV map" not in rig.screen()


async def test_nothing_yields_to_the_end_of_a_request():
    picture = waiting("short")
    ended = picture.requests[2]
    ended.state, ended.in_flight, ended.finish_reason = "finished", [], "length: the model's limit of 1024 tokens"
    async with console(picture, size=(120, 36)) as rig:
        seconds(rig, 3)
        assert "KV MAP" in rig.screen()


@pytest.mark.parametrize("width", [60, 70, 80, 90, 110])
def test_why_stays_on_narrow_screens_that_yield_to_it(width):
    made = frame(width, 24, 2, False, 20, yields=True)
    placed = {
        each.column.key: each.width for each in place(request_table.columns(made.left, made.why_least), made.left)
    }
    usual = {each.column.key: each.width for each in place(request_table.columns(made.left), made.left)}
    assert {"id", "state", "out", "blk"} <= set(placed) and placed["why"] >= usual["why"]


async def test_the_right_column_comes_back_when_no_why_is_cut_any_more():
    async with console(waiting(), size=(120, 36)) as rig:
        seconds(rig, 3)
        rig.source.picture = waiting("short")
        seconds(rig, 3)
        await rig.pilot.pause()
        assert "KV MAP" not in rig.screen(), "not yet: it would flicker"
        seconds(rig, 6)
        await rig.until(lambda: "KV MAP" in rig.screen())


async def test_a_terminal_of_another_width_is_laid_out_at_once():
    async with console(waiting(), size=(160, 40)) as rig:
        seconds(rig, 3)
        narrow = rig.app.main.selection.frame
        await rig.pilot.resize_terminal(80, 24)
        await rig.until(lambda: (rig.app.main.selection.frame.left, rig.app.main.selection.frame.side) == (80, 0))
        await rig.pilot.resize_terminal(160, 40)
        await rig.until(lambda: rig.app.main.selection.frame == narrow)  # The WHY is still cut beside a wide column,
        rig.source.picture = waiting("short")
        seconds(rig, 1)
        await rig.pilot.resize_terminal(200, 50)
        await rig.until(lambda: rig.app.main.selection.frame.side > narrow.side)  # and now it is not.


async def test_on_a_wide_screen_the_column_becomes_narrow():
    async with console(waiting(), size=(160, 40)) as rig:
        before = rig.app.main.selection.frame.side
        seconds(rig, 3)
        assert 0 < rig.app.main.selection.frame.side < before
        await rig.until(lambda: LONG in rig.screen() and "KV MAP" in rig.screen())


def test_a_why_that_comes_and_goes_moves_nothing():
    clock = Clock()
    column = RightColumn(clock)
    for number in range(100):
        clock.now += 1
        assert not column.look(number % 2 == 0, 120)


async def test_a_file_with_unknown_panels_is_read(tmp_path):
    path = tmp_path / "console.json"
    path.write_text('{"panels": {"radar": true, "log": false}, "trends_s": 7}')
    async with console(size=(120, 36), settings=Settings(path)) as rig:
        assert "LOG" not in rig.screen() and rig.app.main.panels.span_s == 300


# --- trends ---------------------------------------------------------------------------------------------------


async def test_the_trends_grow_from_two_rows_to_the_whole_screen():
    async with console(size=(80, 24)) as rig:
        assert "TRENDS" not in rig.screen() and "waiting   " not in rig.board("left")
        await rig.pilot.press("7")
        assert rig.app.main.selection.frame.trends == 2 and "tok/s out" in rig.board("left")
    heights = []
    for height in (30, 40, 50):
        async with console(snapshots.snapshot(4, 60), size=(120, height)) as rig:
            heights.append(rig.app.main.selection.frame.trends)
            await rig.pilot.press("T")
            body = rig.board("reader-body")
            assert len(body.splitlines()) == height - 2 and "swaps/s" in body and "TRENDS" in rig.board("reader-title")
    assert heights == sorted(heights) and heights[0] < heights[-1]


async def test_the_span_changes_by_a_key_and_is_kept(tmp_path):
    settings = Settings(tmp_path / "console.json")
    async with console(size=(120, 40), settings=settings) as rig:
        seen = []
        for _ in range(4):
            await rig.pilot.press("t")
            seen.append(rig.app.main.panels.span_s)
            assert f"last {seen[-1] // 60} min" in rig.board("left")
        assert seen == [900, 3600, 60, 300]
        await rig.pilot.press(*":trends", "enter", "t")
        assert "last 15 min" in rig.board("reader-title")
    assert Settings(tmp_path / "console.json").trends_s == 900


async def test_a_frozen_display_has_frozen_trends():
    async with console(size=(120, 40)) as rig:
        await rig.pilot.press("F")
        for number in range(5):
            picture = snapshots.snapshot(4, 8, sampled_at=snapshots.WALL + 10 + number, queues=Queues(waiting=7531))
            rig.source.send(picture)
            rig.app.tick()
        assert "7531" not in rig.board("left")
        await rig.pilot.press("F")
        assert "7531" in rig.board("left")


async def test_the_last_hour_is_there_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "ppconsole" / "engines" / "e1" / "history"
    folder.mkdir(parents=True)
    for minute in (3, 2, 1):
        begun = snapshots.WALL - 60 * minute
        now = [0.0]
        path = folder / f"{int(begun * 1e3):015d}.rec"
        recorder = Recorder(path, engine="e1", name="opt", packed=True, clock=lambda now=now: now[0])
        for tenth in range(600):
            now[0] = tenth / 10
            recorder.write(snapshots.snapshot(2, 1, sampled_at=begun + tenth / 10, queues=Queues(waiting=minute * 111)))
        recorder.flush()
        if minute > 1:  # the newest one is being written: its end is cut
            recorder.close()
    picture = snapshots.snapshot(4, 8, sampled_at=snapshots.WALL)
    async with console(picture, size=(120, 40)) as rig:
        points = rig.app.model.trends.points
        await rig.until(lambda: len(rig.app.model.trends.points) > 100)
        points = rig.app.model.trends.points
        assert 170 <= len(points) <= 181 and points[-1].wall == snapshots.WALL
        assert {point.waiting for point in points} >= {111, 222, 333}
        assert [point.wall for point in points] == sorted(point.wall for point in points)
        await rig.until(lambda: "333" in rig.board("left"))
    recorder.close()


async def test_reading_the_hour_ends_in_time_and_when_the_console_is_left(tmp_path):
    from threading import Event

    with Recorder(tmp_path / "1.rec", engine="e1", name="opt", packed=True) as recorder:
        for number in range(200):
            recorder.write(snapshots.snapshot(2, 1, sampled_at=float(number)))
    leaving = Event()
    assert kept_points.read_points(tmp_path.glob("*"), 0.0, 1e9, leaving, read_s=0.0) == []
    leaving.set()
    assert kept_points.read_points(tmp_path.glob("*"), 0.0, 1e9, leaving) == []
    (tmp_path / "2.rec").write_bytes(b"no recording")
    assert len(await asyncio.to_thread(kept_points.read_points, tmp_path.glob("*"), 0.0, 200.0, Event())) == 1


async def test_a_replay_reads_no_files(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("read")

    monkeypatch.setattr(kept_points, "read_points", never)
    async with console(size=(120, 40), live=False) as rig:
        await rig.pilot.pause(0.1)
        assert rig.app.model.problem == ""
