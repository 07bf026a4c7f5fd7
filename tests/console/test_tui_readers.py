"""Titles and keys that all readers share, under a pilot, on a source in memory."""

from __future__ import annotations

import pytest
import snapshots
from ppconsole.screens.main_screen import MainScreen
from test_tui_console import console

READERS = (
    ("d", "diagnosis"), ("v", "streams"), ("L", "topology"), ("K", "clients"), ("V", "tiers"), ("H", "finished"),
    ("e", "events"), ("T", "trends"), ("s", "stacks"), ("l", "logs"),
)  # fmt: skip


@pytest.mark.parametrize("key", ["K", "V", "v", "L", "e", "H", "T", "l", "question_mark"])
async def test_the_title_of_every_reader_names_a_fault_that_comes(key: str) -> None:
    async with console(snapshots.snapshot(), size=(80, 24)) as rig:
        await rig.pilot.press(key)
        calm = rig.board("reader-title")
        assert "SERVING" not in calm and "!" not in calm
        rig.source.send(snapshots.halted())
        await rig.until(lambda: "STUCK" in rig.board("reader-title"))
        assert " ! STAGE 1 stopped 1.9s" in rig.board("reader-title")
        rig.source.send(snapshots.snapshot())
        await rig.until(lambda: "STUCK" not in rig.board("reader-title"))
        assert "STAGE 1" not in rig.board("reader-title")


async def test_the_title_names_a_state_in_which_the_engine_does_not_serve() -> None:
    picture = snapshots.snapshot()
    picture.engine.state = "draining"
    async with console(picture, size=(80, 24)) as rig:
        await rig.pilot.press("K")
        assert rig.board("reader-title").startswith(" CLIENTS  DRAINING  live")


async def test_the_diagnosis_names_the_fault_in_its_body_alone() -> None:
    async with console(snapshots.halted(), size=(80, 24)) as rig:
        await rig.pilot.press("d")
        assert "STUCK" in rig.board("reader-title") and "STAGE 1" not in rig.board("reader-title")


@pytest.mark.parametrize("begin", ["d", "K", "e", "question_mark"])
async def test_the_key_of_a_screen_opens_it_from_every_reader(begin: str) -> None:
    async with console(snapshots.halted(), size=(80, 24)) as rig:
        for key, topic in READERS:
            if key == begin:
                continue
            await rig.pilot.press(begin, key)
            assert rig.app.screen.topic == topic
            await rig.pilot.press("escape")
            assert rig.app.screen.topic == dict(READERS).get(begin, "")
            await rig.pilot.press("escape")
            assert isinstance(rig.app.screen, MainScreen)


async def test_the_key_of_the_screen_itself_or_of_the_one_below_goes_back() -> None:
    async with console(snapshots.halted(), size=(80, 24)) as rig:
        await rig.pilot.press("d", "v", "d")
        assert rig.app.screen.topic == "diagnosis" and len(rig.app.screen_stack) == 3
        await rig.pilot.press("d")
        assert isinstance(rig.app.screen, MainScreen)
