"""The list of engines: choosing one at the start, and another from inside the console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_gateway import FakeGateway
from ppconsole.app import ConsoleApp
from ppconsole.link.engine_link import EngineLink
from ppconsole.screens.engines_screen import EnginesScreen
from ppconsole.screens.navigation import NOTHING_CHOSEN
from ppconsole.view.cells import text_of
from ppconsole.widgets.lines import Lines
from textual.pilot import Pilot


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeGateway, FakeGateway]]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
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
