"""A change of the KV memory as it is typed: `-20%`, `+5%`, `-2GiB`; by key, on the `:` line, by the CLI."""

from __future__ import annotations

import pytest
import snapshots
from ppconsole.model import memory_change
from ppconsole.screens.confirm import Confirm
from ppconsole.view import commands
from ppengine.common.memory_arithmetic import StageBudget, plan_memory
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import SetMemory
from test_tui_console import console

BUDGETS = (StageBudget(2**30, 300 * 2**20, 40_000), StageBudget(2**30, 350 * 2**20, 40_000))


def picture(utilization: float = 0.6) -> Snapshot:
    """Return a snapshot of two stages, of which the second sets the number of blocks."""
    found = snapshots.snapshot(2, 2)
    plan = plan_memory(BUDGETS, utilization)
    found.engine.memory_utilization = utilization
    for index, stage in enumerate(found.stages):
        stage.memory.total, stage.memory.kv_mapped = BUDGETS[index].total, plan.mapped * BUDGETS[index].block_bytes
        stage.kv_blocks.mapped, stage.kv_blocks.capacity = plan.mapped, plan.capacities[index]
        stage.kv_blocks.binding = index == plan.binding
    return found


@pytest.mark.parametrize(("text", "share"), [("-20%", 0.8), ("+5%", 1.05), ("-.5 %", 0.995), ("+12.5%", 1.125)])
def test_a_percentage_is_of_the_present_kv_memory(text: str, share: float) -> None:
    before = plan_memory(BUDGETS, 0.6).mapped
    after = plan_memory(BUDGETS, memory_change.utilization(text, picture())).mapped
    assert after == pytest.approx(before * share, abs=1)


@pytest.mark.parametrize(("text", "mib"), [("-64MiB", -64), ("+0.125GiB", 128), ("-65536k", -64), ("-64m", -64)])
def test_a_size_is_of_each_device(text: str, mib: float) -> None:
    assert memory_change.utilization(text, picture()) == pytest.approx(0.6 + mib / 1024, abs=1e-6)


@pytest.mark.parametrize("text", ["20%", "-20", "half", "-2GB", "- 20%", "-20%%", "nan", "", "-%", "1e3%"])
def test_other_texts_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no utilization; it is a number above 0 and .*-20%, \+5%, -2GiB"):
        memory_change.utilization(text, picture())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("-100%", "-100% leaves no KV memory: it is 264.4 MiB on stage 1"),
        ("-1GiB", "-1GiB leaves no KV memory: it is 264.4 MiB on stage 1"),
        ("+900%", r"\+900% is utilization 2.92.*; the most is 1, which is \+155%"),
    ],
)
def test_a_change_that_is_too_large_says_how_large_it_may_be(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        memory_change.utilization(text, picture())


def test_a_stage_without_figures_needs_the_absolute() -> None:
    seen = picture()
    seen.stages[1].memory.kv_mapped = None
    with pytest.raises(ValueError, match=r"the KV memory of stage 1 is not known yet; type it as 0\.5"):
        memory_change.utilization("-20%", seen)
    assert memory_change.utilization("0.5", seen) == 0.5


def test_steps_add_up() -> None:
    assert memory_change.stepped("0.6", -20) == "-20%" and memory_change.stepped("-20%", -20) == "-40%"
    assert memory_change.stepped("-5%", 5) == "+0%" and memory_change.stepped("-90%", -20) == "-95%"


def test_the_line_takes_a_change_of_the_present_memory() -> None:
    verb = commands.asked("set-memory -20%", snapshot=picture()).verb
    assert verb == SetMemory(utilization=memory_change.utilization("-20%", picture()))
    with pytest.raises(commands.UsageError, match="set-memory: -100% leaves no KV memory"):
        commands.asked("set-memory -100%", snapshot=picture())


async def test_five_keys_free_a_fifth_of_the_kv_memory() -> None:
    seen = picture()
    async with console(seen) as rig:
        await rig.pilot.press("m", "pagedown")
        wanted = memory_change.utilization("-20%", seen)
        await rig.until(lambda: f"0.6 -> {wanted:g}" in rig.board("memory-plan") and "free 45" in rig.screen())
        await rig.pilot.press("enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm) and "free 45" in rig.board("dialog-body"))
        assert f"util    0.6 -> {wanted:g}" in rig.board("dialog-body")
        await rig.pilot.press("tab", "enter")
        await rig.until(lambda: bool(rig.source.acted()))
        assert rig.source.acted() == [SetMemory(utilization=wanted)] and rig.source.commands[-1][1]["if_rev"] == 7


async def test_the_dialog_takes_a_change_as_it_was_typed() -> None:
    seen = picture()
    async with console(seen) as rig:
        await rig.pilot.press("m", *"-64MiB")
        await rig.until(lambda: "0.6 -> 0.5375" in rig.board("memory-plan"))
        await rig.pilot.press("enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        assert rig.app.screen.verb == SetMemory(utilization=0.5375)  # type: ignore[attr-defined]
