"""The list of engines: choosing one at the start, and another from inside the console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_gateway import FakeGateway
from kept_engines import KILLED, kept_engine
from ppconsole.app import ConsoleApp
from ppconsole.link.ended import EndedSource
from ppconsole.link.ended_list import EndedList
from ppconsole.link.engine_link import EngineLink
from ppconsole.screens.engines_screen import EnginesScreen
from ppconsole.screens.navigation import NOTHING_CHOSEN
from ppconsole.view.cells import text_of
from ppconsole.widgets.lines import Lines
from ppengine.protocol.discovery import EndedEngine, ended_engines
from textual.pilot import Pilot


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeGateway, FakeGateway]]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with FakeGateway(name="first") as first, FakeGateway(name="second") as second:
        yield first, second


class Rig:
    """The app and what it shows."""

    def __init__(self, app: ConsoleApp, pilot: Pilot[int]) -> None:
        self.app, self.pilot = app, pilot

    def board(self, name: str) -> str:
        found = self.app.screen.query(f"#{name}")
        return "\n".join(text_of(row) for row in found.first(Lines).rows) if found else ""

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not ready():
                await self.pilot.pause(0.02)


@asynccontextmanager
async def console(app: ConsoleApp) -> AsyncIterator[Rig]:
    async with app.run_test(size=(80, 24)) as pilot:
        yield Rig(app, pilot)


async def test_of_several_engines_one_is_chosen_by_arrows_and_another_by_letters(
    two: tuple[FakeGateway, FakeGateway],
) -> None:
    first, second = two
    async with console(ConsoleApp(None, theme="pp-dark")) as rig:
        await rig.until(lambda: rig.board("reader-body").count("serving") == 2)
        head, *rows = rig.board("reader-body").splitlines()
        assert head.split() == ["NAME", "STATE", "MODEL", "STAGES", "UP", "ID"]
        assert rows[0].startswith("> first") and first.id in rows[0] and rows[1].startswith("  second")
        await rig.pilot.press("down", "enter")
        await rig.until(lambda: " second " in rig.board("top") and "live" in rig.board("top"))
        source = rig.app.source
        assert isinstance(source, EngineLink) and source.record.id == second.id

        await rig.pilot.press("l", "colon", *"engines", "enter")
        await rig.until(lambda: "second (here)" in rig.board("reader-body"))
        await rig.pilot.press(*"s")
        rows = rig.board("reader-body").splitlines()[1:]
        assert rows[0].startswith("> second") and rows[1].startswith("  first"), "the beginning of a name is first"
        await rig.pilot.press("backspace", *"firs")
        assert "/firs" in rig.board("reader-title") and "second" not in rig.board("reader-body")
        await rig.pilot.press("enter")
        await rig.until(lambda: " first " in rig.board("top") and "live" in rig.board("top"))
        assert rig.app.screen is rig.app.main and rig.app.source is not source
        assert not rig.app.model.verbs_off()

        await rig.pilot.press("w")
        await rig.until(lambda: isinstance(rig.app.screen, EnginesScreen))
        await rig.pilot.press(*"zz", "enter")
        assert "no engine matches 'zz'" in rig.board("reader-body")
        await rig.pilot.press("escape", "escape")
        assert rig.app.screen is rig.app.main and " first " in rig.board("top")


async def test_leaving_the_first_list_leaves_the_console(two: tuple[FakeGateway, FakeGateway]) -> None:
    app = ConsoleApp(None, theme="pp-dark")
    async with console(app) as rig:
        await rig.pilot.press("escape")
        await rig.until(lambda: not app.is_running)
    assert app.return_value == NOTHING_CHOSEN


async def test_a_silent_engine_and_one_that_ends_are_shown_as_such(two: tuple[FakeGateway, FakeGateway]) -> None:
    first, second = two
    second.deaf = True
    async with console(ConsoleApp(None, read_only=True, theme="pp-dark")) as rig:
        await rig.until(lambda: "no answer" in rig.board("reader-body"))
        await rig.pilot.press("enter")
        await rig.until(lambda: "live" in rig.board("top"))
        source = rig.app.source
        assert isinstance(source, EngineLink) and source.record.id == first.id and source.read_only
        assert " RO " in rig.board("top")


async def test_ended_engines_are_below_the_live_ones_and_open_in_the_same_console(
    two: tuple[FakeGateway, FakeGateway],
) -> None:
    first, second = two
    kept_engine("dead01", "old", age_s=600.0)
    kept_engine("dead02", "older", age_s=7200.0, reason="stopped by ann: upgrade", clean=True)
    async with console(ConsoleApp(None, theme="pp-dark")) as rig:
        await rig.until(lambda: rig.board("reader-body").count("serving") == 2)
        _, one, two_, head, *ended = rig.board("reader-body").splitlines()
        assert one.startswith("> first") and two_.startswith("  second")
        assert head.split() == ["NAME", "ENDED", "HOW", "RAN", "ID"]
        assert [line.split()[0] for line in ended] == ["old", "older"], "the newest end is first"
        assert KILLED in ended[0] and "dead01" in ended[0] and "stopped by ann: upgrade" in ended[1]
        assert "4 of 4" in rig.board("reader-title")
        await rig.pilot.press("down", "down", "enter")
        await rig.until(lambda: "ENDED" in rig.board("top") and KILLED in rig.board("top"))
        assert isinstance(rig.app.source, EndedSource) and rig.app.model.verbs_off() == "the engine has ended"
        await rig.pilot.press("left")
        assert "REPLAY" in rig.board("top"), "its last minutes can be played"

        await rig.pilot.press("w")
        await rig.until(lambda: "old (here)" in rig.board("reader-body"))
        await rig.pilot.press(*"sec", "enter")
        await rig.until(lambda: " second " in rig.board("top") and "live" in rig.board("top"))
        source = rig.app.source
        assert isinstance(source, EngineLink) and source.record.id == second.id
        assert not rig.app.model.verbs_off() and rig.app.model.playback is None
        await rig.pilot.press("w")
        await rig.until(lambda: "second (here)" in rig.board("reader-body"))
        await rig.pilot.press(*"older")
        assert [line.split()[:2] for line in rig.board("reader-body").splitlines()[2:]] == [[">", "older"]]
        await rig.pilot.press("escape", "escape")
    assert first.id != second.id


async def test_a_list_that_is_longer_than_the_screen_scrolls_to_the_selected_one(
    two: tuple[FakeGateway, FakeGateway],
) -> None:
    for number in range(9):
        kept_engine(f"dead{number:02d}", f"old{number}", age_s=60.0 + number)
    app = ConsoleApp(None, theme="pp-dark")
    async with app.run_test(size=(60, 10)) as pilot:
        rig = Rig(app, pilot)
        await rig.until(lambda: "11 of 11" in rig.board("reader-title"))
        await rig.pilot.press("end")
        assert rig.board("reader-body").splitlines()[-1].startswith("> old8")
        await rig.pilot.press("home")
        assert rig.board("reader-body").splitlines()[1].startswith("> first")
        await rig.pilot.click("#reader-body", offset=(5, 3))
        assert rig.board("reader-body").splitlines()[1].startswith("> first"), "a header selects nothing"
        await rig.pilot.click("#reader-body", offset=(5, 4))
        assert rig.board("reader-body").splitlines()[4].startswith("> old0")


def test_ended_engines_are_read_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    reads, now = [0], [100.0]

    def counted() -> list[EndedEngine]:
        reads[0] += 1
        return ended_engines()

    monkeypatch.setattr("ppconsole.link.ended_list.ended_engines", counted)
    listed = EndedList(lambda: now[0])
    assert listed.read([]) == []
    kept_engine("dead01")
    assert [one.record.id for one in listed.read([])] == ["dead01"]
    now[0] += 60.0
    reads[0] = 0
    for _ in range(5):
        assert len(listed.read([])) == 1
    assert reads[0] == 0, "nothing has changed"
    assert len(listed.read(["live"])) == 1 and reads[0] == 1, "an engine has begun or ended"
    now[0] += 5.0
    kept_engine("dead02")
    assert len(listed.read(["live"])) == 2
    now[0] += 9.0
    listed.read(["live"])
    assert reads[0] == 3, "the end may be noted twice"
    now[0] += 2.0
    listed.read(["live"])
    assert reads[0] == 3
