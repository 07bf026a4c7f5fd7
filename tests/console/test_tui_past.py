"""The past in the console: a replay that moves, the last hour of a live engine, incidents, the badge."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import snapshots
from kept_engines import kept_engine, kept_incident, minute, picture
from ppconsole.app import ConsoleApp
from ppconsole.link.ended import EndedSource
from ppconsole.link.history import History
from ppconsole.link.replay import ReplaySource
from ppconsole.screens.detail_screens import EventsScreen
from ppconsole.screens.diagnosis_screen import DiagnosisScreen
from ppconsole.screens.incidents_screen import IncidentsScreen
from ppconsole.view.banner import Link, verdict_line
from ppconsole.view.cells import text_of
from ppconsole.view.incident_table import badge
from ppengine.protocol.discovery import ended_engines
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.snapshot import IncidentInfo
from test_tui_console import Clock, Rig, console

BEGIN = 1_700_000_000.0


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()


@asynccontextmanager
async def replay(source: ReplaySource, size: tuple[int, int] = (120, 36)) -> AsyncIterator[Rig]:
    app = ConsoleApp(source, read_only=True, clock=Clock(), theme="pp-dark")
    async with app.run_test(size=size) as pilot:
        rig = Rig(app, pilot, source, Clock())  # type: ignore[arg-type]
        await rig.until(lambda: app.model.state.snapshot is not None)
        app.tick()
        yield rig


def step(rig: Rig) -> int:
    snapshot = rig.app.screen.console.model.state.snapshot  # type: ignore[attr-defined]
    return snapshot.engine.step


def past(tmp_path: Path, **options: object) -> ReplaySource:
    minutes = [minute(tmp_path / "h", BEGIN + at) for at in (0.0, 60.0, 120.0)]
    return ReplaySource(History.of_segments(minutes), **options)  # type: ignore[arg-type]


async def test_keys_move_in_a_replay_and_the_title_has_the_position(tmp_path: Path) -> None:
    async with replay(past(tmp_path, begin=BEGIN + 30.0, paused=True)) as rig:
        at = time.strftime("%H:%M:%S", time.localtime(BEGIN + 30.0))
        assert f"REPLAY {at} 30/179 s paused" in rig.board("top") and step(rig) == 30
        await rig.pilot.press("right")
        assert step(rig) == 40
        await rig.pilot.press("left", "left", "]")
        assert step(rig) == 20 and "80/179 s" in rig.board("top"), "the second minute, which counts from 0"
        await rig.pilot.press("e")
        assert rig.screen().count("test.event") == 9, "events up to this moment and none after it"
        await rig.pilot.press("left_square_bracket")
        assert rig.screen().count("test.event") == 3, "the keys are those of every screen, and events go back, too"
        await rig.pilot.press("escape", "space", "greater_than_sign")
        assert "x2" in rig.board("top")
        await rig.pilot.press("less_than_sign", "less_than_sign")
        assert "x0.5" in rig.board("top")


async def test_filter_and_order_stay_in_effect_while_one_moves(tmp_path: Path) -> None:
    async with replay(past(tmp_path, begin=BEGIN + 30.0, paused=True)) as rig:
        await rig.pilot.press("slash", *"no-such", "enter", "S", "i", "right")
        assert step(rig) == 40 and "/no-such" in rig.board("left") and "REQ 0/" in rig.board("left")
        assert rig.app.model.state.order.column == "id" and not rig.app.model.arranged()


async def test_a_mark_compares_two_moments(tmp_path: Path) -> None:
    async with replay(past(tmp_path, begin=BEGIN + 10.0, paused=True)) as rig:
        await rig.pilot.press("M", "right")
        marked = time.strftime("%H:%M:%S", time.localtime(BEGIN + 10.0))
        assert re.search(rf"from {marked} tok/s\S+ wait\+0 kv\+0", rig.board("top"))
        await rig.pilot.press("J")
        assert step(rig) == 10
        await rig.pilot.press("e", "J")
        assert step(rig) == 20 and f"from {marked}" in rig.screen(), "back and forth, on every screen"


async def test_the_events_between_the_mark_and_now_with_the_figures_of_both(tmp_path: Path) -> None:
    """The task `what changed in the last minute` is four keys from the present: h M [ e."""
    async with replay(past(tmp_path, begin=BEGIN + 95.0, paused=True), size=(80, 24)) as rig:
        await rig.pilot.press("M", "left_square_bracket", "e")
        shown = rig.board("reader-body")
        span = [time.strftime("%H:%M:%S", time.localtime(BEGIN + at)) for at in (35.0, 95.0)]
        assert "EVENTS SINCE THE MARK" in rig.board("reader-title")
        assert shown.startswith(f" FROM {span[0]} TO {span[1]}  1m00"), "the earlier first, whichever is marked"
        figure = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith("  ")}
        assert figure["step"][1:] == ["35", "35"], "each minute counts its seconds from 0"
        assert "EVENTS BETWEEN  6" in shown
        seconds = [line.split()[-1] for line in shown.splitlines() if "test.event" in line]
        assert seconds == ["40", "50", "0", "10", "20", "30"]
        await rig.pilot.press("right", "right")
        assert "EVENTS BETWEEN  4" in rig.board("reader-body") and "THEN" in rig.board("reader-body")
        figure = {line.split()[0]: line.split() for line in rig.board("reader-body").splitlines() if line}
        assert figure["step"][1:] == ["55", "35", "-20"]
        screen = rig.app.screen
        assert isinstance(screen, EventsScreen)
        rows = screen.body(80)
        (at,) = screen.places(rows, "second 10")
        assert "second 10" in text_of(rows[at]), "the search counts the rows of the figures"
        await rig.pilot.press("M")
        assert "THEN" not in rig.board("reader-body"), "at a new mark there is nothing between"


async def test_the_banner_and_the_table_have_the_same_sign_on_both_sides_of_the_mark(tmp_path: Path) -> None:
    async with replay(past(tmp_path, begin=BEGIN + 95.0, paused=True), size=(120, 36)) as rig:
        playback = rig.app.model.playback
        assert playback is not None
        for key, word in (("left", "to"), ("right", "from")):
            await rig.pilot.press("M", key)
            await rig.until(lambda: playback.interval() is not None)
            interval = playback.interval()
            assert interval is not None and interval[0].snapshot is not None
            marked, clock = interval[0], interval[0].wall
            marked.snapshot.queues.waiting = 5
            rig.app.model.state.snapshot.queues.waiting = 2  # type: ignore[union-attr]
            rig.app.paint()
            sign = "+3" if key == "left" else "-3"
            assert f"{word} {time.strftime('%H:%M:%S', time.localtime(clock))}" in rig.board("top")
            assert f"wait{sign}" in rig.board("top")
            await rig.pilot.press("e")
            table = {line.split()[0]: line.split() for line in rig.board("reader-body").splitlines() if line}
            assert table["waiting"][-1] == sign
            await rig.pilot.press("escape")


async def test_the_figures_since_the_mark(tmp_path: Path) -> None:
    minutes = minute(tmp_path / "h", BEGIN)
    source = ReplaySource(History.of_segments([minutes]), begin=BEGIN + 10.0, paused=True)
    async with replay(source) as rig:
        await rig.pilot.press("M")
        later = picture(99)
        later.throughput.output_tok_s = (later.throughput.output_tok_s or 0.0) + 120.0
        later.queues.waiting += 3
        later.stages[0].kv_blocks.used = (later.stages[0].kv_blocks.used or 0) - 210
        rig.app.on_update(later)
        rig.app.paint()
        assert "tok/s+120 wait+3 kv-210" in rig.board("top")


async def test_the_last_hour_of_a_live_engine_opens_and_escape_returns(tmp_path: Path) -> None:
    live = picture(5000)
    minute(engine_folder(live.engine.id) / "history", time.time() - 100.0)
    async with console(live) as rig:
        await rig.pilot.press("h")
        await rig.until(lambda: "REPLAY" in rig.board("top"))
        assert step(rig) == 59
        await rig.pilot.press("left", "P")
        assert step(rig) == 49 and not rig.source.commands
        assert rig.app.screen.console.model.verbs_off() == "this is the past: each Esc goes back one screen"
        rig.app.tick()
        await rig.pilot.press("escape")
        await rig.until(lambda: "REPLAY" not in rig.board("top"))
        assert rig.app.screen is rig.app.main and step(rig) == 5000
        await rig.pilot.press("escape")
        assert rig.app.screen is rig.app.main, "there is nothing to leave"


async def test_the_last_hour_has_the_trends_of_the_live_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same hour: reading it once more would delay the first keys."""
    live = picture(5000)
    live.sampled_at = time.time()
    begin = time.time() - 100.0
    minute(engine_folder(live.engine.id) / "history", begin)
    async with console(live) as rig:
        await rig.until(lambda: rig.app.model.trends.whole and len(rig.app.model.trends.points) > 50)
        monkeypatch.setattr("ppconsole.link.kept_points.read_points", lambda *_: pytest.fail("read once more"))
        await rig.pilot.press("h")
        await rig.until(lambda: "REPLAY" in rig.board("top"))
        await rig.pilot.press("left")
        await rig.until(lambda: step(rig) == 49)
        shown = rig.app.screen.console.model.trends.points  # type: ignore[attr-defined]
        assert [round(point.wall - shown[0].wall) for point in shown] == list(range(50))


async def test_an_operator_may_quit_in_the_past(tmp_path: Path) -> None:
    source = past(tmp_path)
    async with console() as rig:
        rig.app.open_past(source, "")
        await rig.until(lambda: source._player is not None)
    assert source._player is not None and source._player.done(), "it plays no more"


async def test_an_engine_without_history_says_so() -> None:
    async with console() as rig:
        await rig.pilot.press("h")
        await rig.until(lambda: "no history of this engine is in " in rig.screen())


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_incidents_are_listed_and_open_their_diagnosis(size: tuple[int, int]) -> None:
    folder = kept_engine("dead01", "inc", age_s=60.0)
    kept_incident(folder, 1, age_s=100.0, by="ann")
    kept_incident(folder, 2, age_s=80.0)
    (ended,) = ended_engines()
    shown = picture(5)
    shown.engine.id = "dead01"
    async with console(shown, size=size) as rig:
        await rig.pilot.press("colon", *"incidents", "enter")
        await rig.until(lambda: "stage 1 was killed" in rig.screen() or "dead" in rig.board("reader-body"))
        lines = rig.board("reader-body").splitlines()
        await rig.pilot.press("question_mark")
        assert "HELP: INCIDENTS" in rig.screen() and "LASTED" in rig.screen()
        await rig.pilot.press("escape")
        assert lines[1].startswith("> 2 ") and lines[2].startswith("  1 "), "the newest first"
        await rig.pilot.press("down", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, DiagnosisScreen))
        await rig.until(lambda: "stage 1 was killed by SIGKILL" in rig.screen())
        assert "REPLAY" in rig.board("reader-title")
        assert "LAST 64 STEPS  frozen at the fault" in "\n".join(
            text_of(line) for line in rig.app.screen.body(size[0])
        )  # fmt: skip
        past = rig.app.screen.console
        assert past.model.verbs_off() == "this is the past: each Esc goes back one screen"
        await rig.pilot.press("escape")
        await rig.until(lambda: rig.app.screen is past.main)
        await rig.pilot.press("escape")
        await rig.until(lambda: isinstance(rig.app.screen, IncidentsScreen))
        await rig.pilot.press("escape")
        await rig.until(lambda: rig.app.screen is rig.app.main)
        await rig.pilot.press("I")
        await rig.pilot.press("h")
        await rig.until(lambda: "REPLAY" in rig.screen())
    assert ended.record.id == "dead01"


async def test_an_ended_engine_can_be_played_back() -> None:
    kept_engine()
    (ended,) = ended_engines()
    async with replay(EndedSource(ended)) as rig:
        first, second = rig.board("top").splitlines()
        assert "ENDED" in first and second.strip().endswith("core ended: killed by SIGKILL")
        await rig.pilot.press("left")
        first, second = rig.board("top").splitlines()
        assert "ENDED" not in first and "REPLAY" in first and "SIGKILL" not in second and step(rig) == 49


def log_lines(folder: Path, begin: float, seconds: int, process: str = "core") -> None:
    """Write a line a second."""
    stamps = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin + at)) for at in range(seconds))
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{stamp}.000 INFO second {at} of the {process}\n" for at, stamp in enumerate(stamps))
    (folder / f"{process}.log").write_text(text)


async def test_logs_of_an_ended_engine_are_those_up_to_the_moment_in_view() -> None:
    folder = kept_engine()
    (ended,) = ended_engines()
    begin = EndedSource(ended).history.begin
    log_lines(folder, begin, 70)
    (folder / "stage1.log").unlink()
    async with replay(EndedSource(ended)) as rig:
        await rig.pilot.press("l")
        await rig.until(lambda: "second 69 of the core" in rig.screen())
        assert "the moment in view" not in rig.screen(), "the last words come after the last picture"
        await rig.pilot.press("left")
        await rig.until(lambda: "the moment in view" in rig.screen())
        *_, last, moment = rig.board("reader-body").splitlines()
        assert "second 49 of the core" in last or "second 48 of the core" in last
        assert time.strftime("%H:%M:%S", time.localtime(begin + 49)) in moment
        await rig.pilot.press("right", "right")
        await rig.until(lambda: "second 69 of the core" in rig.screen())


async def test_logs_in_the_last_hour_of_a_live_engine_are_of_that_hour(tmp_path: Path) -> None:
    live = picture(5000)
    begin = time.time() - 100.0
    minute(engine_folder(live.engine.id) / "history", begin)
    log_lines(tmp_path / "run" / "ppconsole" / live.engine.id, begin, 90)
    async with console(live) as rig:
        await rig.pilot.press("h")
        await rig.until(lambda: "REPLAY" in rig.board("top"))
        await rig.pilot.press("left", "l")
        await rig.until(lambda: "the moment in view" in rig.screen())
        assert re.search(r"second 4[89] of the core\s+──", rig.board("reader-body"))


async def test_a_request_of_an_ended_engine_has_its_last_known_state() -> None:
    kept_engine()
    (ended,) = ended_engines()
    async with replay(EndedSource(ended)) as rig:
        await rig.pilot.press("enter")
        await rig.until(lambda: "LAST KNOWN STATE" in rig.screen())
        await rig.pilot.press("left")
        at = time.strftime("%H:%M:%S", time.localtime(EndedSource(ended).history.end - 10.0))
        await rig.until(lambda: f"as of         {at}" in rig.screen())
        await rig.pilot.press("escape", "colon", *"show none", "enter")
        await rig.until(lambda: "is in no picture and no event" in rig.screen())


def shown_walls(rig: Rig) -> list[float]:
    """Return the times of the points on the present screen."""
    return [round(point.wall - BEGIN) for point in rig.app.screen.console.model.trends.points]  # type: ignore[attr-defined]


async def test_every_moment_of_a_past_has_the_trends_up_to_it(tmp_path: Path) -> None:
    async with replay(past(tmp_path, begin=BEGIN + 100.0, paused=True)) as rig:
        await rig.until(lambda: len(shown_walls(rig)) > 1)
        assert shown_walls(rig) == list(range(101)), "no second of it was played"
        await rig.pilot.press("]")
        assert shown_walls(rig) == list(range(161)), "a jump leaves no gap"
        await rig.pilot.press("left", "left")
        assert shown_walls(rig) == list(range(141)), "nothing after the moment in view"
        assert rig.app.screen.console.model.trends.points[-1].swaps_s == 0.0  # type: ignore[attr-defined]


async def test_an_incident_opens_with_the_trends_before_it(tmp_path: Path) -> None:
    past_minutes = [minute(tmp_path / "h", BEGIN + at) for at in (0.0, 60.0)]
    async with console() as rig:
        live = len(rig.app.model.trends.points)
        source = ReplaySource(History.of_segments(past_minutes), begin=BEGIN + 70.0, paused=True)
        rig.app.open_past(source, "incident 1")
        await rig.until(lambda: rig.app.screen is not rig.app.main and len(shown_walls(rig)) > 1)
        assert shown_walls(rig) == list(range(71))
        await rig.pilot.press("escape")
        await rig.until(lambda: rig.app.screen is rig.app.main)
        assert len(rig.app.model.trends.points) == live, "the trends of the present are its own"


def healed(age_s: float = 60.0) -> IncidentInfo:
    wall = snapshots.WALL - age_s
    return IncidentInfo(
        number=3, wall=wall - 1.9, over_wall=wall, stage=1, cause="dead", summary="stage 1 was killed", ended="back"
    )


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_the_badge_fits_and_yields(width: int) -> None:
    shown = snapshots.snapshot(4, 8)
    shown.operations = []
    shown.incident = healed()
    line = text_of(verdict_line(shown, Link(state="live"), width, [1.0, 2.0]))
    assert "last fault" in line or width == 60
    assert len(line.rstrip()) <= width and "tok/s" in line
    if width >= 80:
        assert "healed in 1.9s" in line
    shown.verdicts = snapshots.stuck().verdicts
    assert "last fault" not in text_of(verdict_line(shown, Link(state="live"), width)), "a verdict is worse"


def test_the_badge_goes_after_an_hour_and_while_it_lasts() -> None:
    shown = snapshots.snapshot()
    shown.incident = healed(3590.0)
    assert badge(shown, 80).startswith("last fault")
    shown.incident = healed(3610.0)
    assert badge(shown, 80) == ""
    shown.incident = healed()
    shown.incident.over_wall = None
    assert badge(shown, 80) == ""


async def test_attaching_to_an_engine_leaves_the_past(tmp_path: Path) -> None:
    async with replay(past(tmp_path, begin=BEGIN + 30.0, paused=True)) as rig:
        rig.app.model.restart()
        rig.app.on_update(picture(7))
        await rig.pilot.press("left")
        assert step(rig) == 7 and "REPLAY" not in rig.board("top"), "the keys of the past move nothing any more"
