"""Ranks on the screens: a stage is opened and folded, a rank is shown in detail, verbs stay those of the stage."""

from __future__ import annotations

import copy

import pytest
import rank_snapshots
import snapshots
from ppconsole.screens.detail_screens import HelpScreen, StageScreen
from ppconsole.screens.topology_screen import TopologyScreen
from ppconsole.view.stage_rows import RowKey
from ppengine.protocol.verbs import RestartStage
from test_tui_console import Rig, console


def names(rig: Rig) -> list[str]:
    """First words of the rows of stages, with their marks."""
    lines = rig.board("left").splitlines()
    return [
        line[:8].strip() for line in lines[1 : next(at for at, line in enumerate(lines) if line.startswith("POOL"))]
    ]


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (120, 36)])
async def test_a_stage_is_opened_into_its_ranks_and_folded(size: tuple[int, int]) -> None:
    async with console(rank_snapshots.dead(), size=size) as rig:
        assert names(rig) == ["0×2", "! 1.1+1"]
        await rig.pilot.press("tab", "down")
        assert "u ranks" in rig.board("foot") and rig.app.main.selection.stage_row() == RowKey(1)
        await rig.pilot.press("u")
        assert names(rig) == ["0×2", "1.0", "!   1.1"]
        assert rig.app.main.selection.stage_row() == RowKey(1, 1), "the rank that the row was about"
        await rig.pilot.press("up", "up", "u")
        assert names(rig)[:2] == [">   0.0", "0.1"]
        await rig.pilot.press("down", "u")
        assert names(rig) == [">   0×2", "1.0", "!   1.1"]
        assert all(len(line) <= size[0] for line in rig.screen().splitlines())


async def test_without_the_focus_on_stages_all_are_opened_and_folded() -> None:
    async with console(rank_snapshots.ranks()) as rig:
        await rig.pilot.press("u")
        assert names(rig) == ["0.0", "0.1", "1.0", "1.1"]
        await rig.pilot.press("u")
        assert names(rig) == ["0×2", "1×2"]


async def test_a_rank_is_shown_in_detail_and_verbs_act_on_its_stage() -> None:
    async with console(rank_snapshots.dead()) as rig:
        await rig.pilot.press("tab", "down", "u")
        assert "restart 1" in rig.board("foot")
        dialog = await rig.confirm("x")
        assert dialog.verb == RestartStage(stage=1)
        await rig.pilot.press("escape", "question_mark")
        assert isinstance(rig.app.screen, HelpScreen) and "SELECTED  stage 1 rank 1" in rig.screen()
        await rig.pilot.press("escape", "enter")
        screen = rig.app.screen
        assert isinstance(screen, StageScreen) and "STAGE 1 RANK 1" in rig.screen()
        assert "STATE  stage 1 rank 1" in rig.screen() and "reduce<1.1" in rig.screen()
        dialog = await rig.confirm("x")
        assert dialog.verb == RestartStage(stage=1)


async def test_the_selected_rank_stays_selected_while_figures_change() -> None:
    async with console(rank_snapshots.late()) as rig:
        await rig.pilot.press("tab", "u", "up")
        assert rig.app.main.selection.stage_row() == RowKey(0, 0)
        picture = copy.deepcopy(rig.source.picture)
        picture.stages.reverse()
        rig.source.send(picture)
        rig.app.tick()
        assert names(rig) == [">   0.0", "0.1", "1×2"]


async def test_a_click_selects_a_rank() -> None:
    async with console(rank_snapshots.ranks()) as rig:
        await rig.pilot.press("u")
        await rig.pilot.click("#left", offset=(6, 4))
        assert rig.app.main.selection.focused_row() == RowKey(1, 1)


async def test_stages_of_one_rank_cannot_be_opened() -> None:
    async with console() as rig:
        await rig.pilot.press("u")
        assert [name[0] for name in names(rig)] == ["0", "1", "2", "3"] and any(
            "each stage" in note.text for note in rig.app.notes
        )
        await rig.pilot.press("tab")
        assert "ranks" not in rig.board("foot")


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 50)])
async def test_the_topology_has_its_key_and_its_name(size: tuple[int, int]) -> None:
    async with console(rank_snapshots.on_cards(), size=size) as rig:
        await rig.pilot.press("L")
        assert isinstance(rig.app.screen, TopologyScreen)
        shown = rig.screen()
        assert "pp2 tp2: 4 processes on 1 node" in shown and "device memory" in shown
        assert "6.2 us    1.3  one shot" in shown, "sums of ranks"
        await rig.pilot.press("G")
        assert "240  copies" in rig.screen() and "NV18" in rig.screen()
        await rig.pilot.press("escape", *":topology", "enter")
        assert isinstance(rig.app.screen, TopologyScreen)
        await rig.pilot.press("question_mark")
        assert "TOKENS" in rig.screen() or "PLACE" in rig.screen()


async def test_the_topology_waits_for_a_first_sample() -> None:
    async with console(snapshots.unknown()) as rig:
        await rig.pilot.press("L")
        assert "one place: nothing is sent" in rig.screen()
