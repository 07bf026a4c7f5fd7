"""The Diagnosis and Streams screens under a pilot, on a source in memory."""

from __future__ import annotations

import copy
import zipfile

import pytest
import snapshots
from ppconsole.link.source import QueryFailed
from ppconsole.model.units import wall_text
from ppconsole.screens.confirm import Confirm
from ppconsole.screens.diagnosis_screen import DiagnosisScreen
from ppconsole.screens.streams_screen import StreamsScreen
from ppengine.protocol.control import Refused
from ppengine.protocol.inspection import FindingsDetail
from ppengine.protocol.recording import LinkState
from ppengine.protocol.stage_info import CordonInfo
from ppengine.protocol.verbs import Continue, Cordon, RestartStage, SetCheck
from test_tui_console import console


def halted():
    picture = snapshots.halted()
    picture.verdicts[0].suggest = "ppconsole continue 1 (or: kill -CONT 41201)"
    return picture


def kept(picture, **changes):
    return snapshots.fault(picture, at=1, **changes)


@pytest.mark.parametrize("size", [(80, 24), (80, 50), (120, 24), (200, 50)])
async def test_the_screen_names_the_stage_at_every_size(size):
    picture = snapshots.stuck()
    async with console(picture, size=size, details={"fault": snapshots.fault(picture)}) as rig:
        await rig.pilot.press("d")
        await rig.until(lambda: "frozen at the fault" in "\n".join(rows(rig)))
        screen = rig.screen()
        assert "! STAGE 2 self_stuck" in screen and "╔═ 2 ROOT" in screen and "──►" in screen
        assert "ppconsole stacks --stage 2" in screen and "⏎ stacks --stage 2 " in screen
        await rig.pilot.press("tab", "tab", "tab")
        assert "m18410" in rig.screen()


def rows(rig):
    from ppconsole.view.cells import text_of

    screen = rig.app.screen
    return [text_of(line) for line in screen.body(screen.size.width)]


async def test_the_suggested_command_is_run_after_a_confirm():
    async with console(halted()) as rig:
        await rig.pilot.press("d", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        assert rig.app.screen.verb == Continue(stage=1)
        await rig.until(lambda: "asking the engine" not in rig.board("dialog-body"))
        assert rig.app.focused is rig.app.screen.query_one("#cancel")
        await rig.pilot.press("enter")
        assert not rig.source.acted() and isinstance(rig.app.screen, DiagnosisScreen)
        await rig.pilot.press("enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm) and "free 45" in rig.board("dialog-body"))
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: rig.source.acted() == [Continue(stage=1)])


async def test_a_suggested_command_that_is_refused_opens_no_line():
    """It was not typed."""
    refused = Refused(id="1", code="CONFLICT", text="stage 1 runs again")
    async with console(halted(), plans={"continue": refused}) as rig:
        await rig.pilot.press("d", "enter")
        await rig.until(lambda: "stage 1 runs again" in rig.screen())
        await rig.pilot.press("escape")
        assert isinstance(rig.app.screen, DiagnosisScreen) and not rig.app.screen.line.is_open
        rig.clock.now += 3
        await rig.pilot.press("enter")
        assert isinstance(rig.app.screen, DiagnosisScreen) and not rig.app.screen.line.is_open
        cancelled, stale = rig.app.notes
        assert cancelled.text == "continue: cancelled; nothing was done"
        assert stale.text.startswith("continue: ") and stale.bad


async def test_the_keys_of_stage_verbs_act_on_the_root_as_on_every_screen():
    picture = halted()
    picture.stages[1].cordon = CordonInfo(by="eve", since_s=3.0)
    async with console(picture) as rig:
        await rig.pilot.press("d")
        assert "⏎ continue 1 " in rig.board("reader-foot") and "c continue 1 x restart 1 " in rig.board("reader-foot")
        for key, verb in (("c", Continue(stage=1)), ("x", RestartStage(stage=1)), ("C", Cordon(stage=1, undo=True))):
            assert (await rig.confirm(key)).verb == verb
            await rig.pilot.press("escape")
            assert isinstance(rig.app.screen, DiagnosisScreen)
        calm = copy.deepcopy(picture)
        calm.verdicts = []
        calm.stages[1].state = "idle"
        rig.source.send(calm)
        rig.app.paint()
        rig.source.commands.clear()
        assert "restart" not in rig.board("reader-foot") and "continue" not in rig.board("reader-foot")
        await rig.pilot.press("x", "c", "enter")
        assert isinstance(rig.app.screen, DiagnosisScreen) and not rig.source.commands


async def test_a_fault_that_is_over_is_in_the_past_tense_and_nothing_runs_it():
    picture = halted()
    async with console(picture, details={"fault": kept(picture)}) as rig:
        await rig.pilot.press("d")
        await rig.until(lambda: "Enter runs it" in rig.screen() and "! STAGE 1 stopped, for" in rig.screen())
        assert rig.app.screen.cli() == "continue 1"
        calm = copy.deepcopy(picture)
        calm.verdicts = []
        rig.source.details["fault"] = kept(picture, over_wall=snapshots.WALL + 5)
        rig.source.send(calm)
        await rig.app.screen._load()
        text = "\n".join(rows(rig))
        assert " STAGE 1 was stopped, healed after" in text and "no fault now; this one was healed at" in text
        assert "runs it" not in text and "do   >" not in text and "STAGE 1 stopped" not in text
        assert rig.app.screen.cli() == "explain" and "⏎" not in rig.board("reader-foot")


async def test_a_suggestion_that_only_looks_opens_a_reader():
    async with console(snapshots.stuck()) as rig:
        await rig.pilot.press("d", "enter")
        await rig.until(lambda: "STACKS OF STAGE 2" in rig.board("reader-title"))
        await rig.pilot.press("escape")
        assert isinstance(rig.app.screen, DiagnosisScreen)


async def test_read_only_and_no_link_have_no_act():
    async with console(halted(), read_only=True) as rig:
        await rig.pilot.press("d", "enter")
        await rig.pilot.pause()
        assert isinstance(rig.app.screen, DiagnosisScreen) and not rig.board("reader-foot").startswith("⏎ ")
        assert "this console is read-only" in rig.screen()
    async with console(halted()) as rig:
        await rig.pilot.press("d")
        rig.source.send(LinkState(state="lost", text="gone"))
        await rig.pilot.press("enter")
        await rig.until(lambda: rig.app.screen.query_one("#reader-body")._faded)  # what is old is grey
        assert isinstance(rig.app.screen, DiagnosisScreen) and not rig.source.commands


async def test_the_steps_stay_frozen_until_a_new_fault():
    picture = halted()
    async with console(picture, details={"fault": kept(picture)}) as rig:
        await rig.pilot.press("d")
        screen = rig.app.screen
        await rig.until(lambda: "fault 1 of this engine" in "\n".join(rows(rig)))
        calm = copy.deepcopy(picture)
        calm.verdicts = []
        rig.source.details["fault"] = kept(picture, over_wall=snapshots.WALL + 5)
        rig.source.send(calm)
        await screen._load()
        text = "\n".join(rows(rig))
        assert "no fault now; this one was healed at" in text and "fault 1 of this engine" in text
        assert "rings" not in rig.source.inspected
        rig.source.details["fault"] = kept(picture, number=2)
        rig.source.send(picture)
        await screen._load()
        assert "fault 2 of this engine" in "\n".join(rows(rig))
        again = copy.deepcopy(calm)
        again.engine.epoch = "another"
        rig.source.details["fault"] = QueryFailed("NOT_FOUND", "no fault yet")
        rig.source.send(again)
        await screen._load()
        assert "LAST 64 STEPS  as of" in "\n".join(rows(rig)), "another engine's fault is not this one's"
        await rig.pilot.press("escape", "d")
        await rig.until(lambda: "as of" in "\n".join(rows(rig)))


async def test_stacks_are_taken_when_asked_for():
    async with console(halted()) as rig:
        await rig.pilot.press("d")
        assert "t takes them" in "\n".join(rows(rig)) and "stacks" not in rig.source.inspected
        await rig.pilot.press("t")
        await rig.until(lambda: "stages 0, 1:" in "\n".join(rows(rig)))
        rig.source.details["stacks"] = QueryFailed("FAILED", "the agent [b]has[/b] not reported")
        await rig.pilot.press("t")
        await rig.until(lambda: "the agent [b]has[/b] not reported" in "\n".join(rows(rig)))


async def test_an_older_engine_without_details_still_has_the_verdict():
    refused = QueryFailed("PROTOCOL", "Invalid enum value 'rings'")
    async with console(halted(), details={"fault": refused, "rings": refused}) as rig:
        await rig.pilot.press("d")
        await rig.until(lambda: "Invalid enum value" in "\n".join(rows(rig)))
        assert "! STAGE 1 stopped" in rig.screen()


async def test_the_streams_and_the_keys_of_the_checks():
    picture = snapshots.stuck()
    picture.engine.checks.ledger, picture.engine.checks.findings = True, 1
    async with console(picture, details={"findings": FindingsDetail(findings=snapshots.findings())}) as rig:
        await rig.pilot.press("v")
        await rig.until(lambda: "written by" in "\n".join(rows(rig)))
        assert "1 ledger   ON" in rig.screen() and " OWNER " in rig.screen()
        assert "1 finding: ⇥ goes there" in rig.screen() and "written by" not in rig.screen()
        await rig.pilot.press("tab")
        assert "written by" in rig.screen()
        await rig.pilot.press("tab")
        assert " OWNER " in rig.screen()
        for key, verb in (("1", SetCheck(check="ledger", mode="off")), ("3", SetCheck(check="finite")),
                          ("4", SetCheck(check="shadow", share=0.01)),
                          ("5", SetCheck(check="checksum"))):  # fmt: skip
            dialog = await rig.confirm(key)
            assert dialog.verb == verb
            await rig.pilot.press("escape")
        await rig.pilot.press("d")
        assert isinstance(rig.app.screen, DiagnosisScreen)
        await rig.pilot.press("v")
        assert isinstance(rig.app.screen, StreamsScreen), "back to the one below, and no third"
        assert len(rig.app.screen_stack) == 3
        assert not rig.source.acted()


async def test_tab_goes_to_the_findings_then_to_the_ledger_then_back():
    picture = snapshots.stuck()
    picture.engine.checks.ledger = True
    details = {"findings": FindingsDetail(findings=snapshots.findings() * 4)}
    async with console(picture, details=details) as rig:
        await rig.pilot.press("v")
        await rig.until(lambda: "send>2 buffer 0" in "\n".join(rows(rig)))
        await rig.pilot.press("tab")
        assert rig.screen().splitlines()[1].startswith(" FINDINGS  4") and " LEDGER" not in rig.screen()
        await rig.pilot.press("tab")
        assert " LEDGER" in rig.screen() and "send>2 buffer 0" in rig.screen() and "send of m7" in rig.screen()
        await rig.pilot.press("tab")
        assert rig.screen().splitlines()[1].startswith(" LIVE CHECKS")
        rig.source.details["ledger"] = QueryFailed("NO_CORE", "the core is away")
        await rig.app.screen._load()
        assert "the core is away" in "\n".join(rows(rig))
        assert "4 findings" in rig.screen(), "the one without the other"


async def test_checks_are_not_switched_read_only():
    async with console(snapshots.stuck(), read_only=True) as rig:
        await rig.pilot.press("colon", *"streams", "enter", "2")
        await rig.pilot.pause()
        assert isinstance(rig.app.screen, StreamsScreen) and not rig.source.commands
        assert "2 strict" not in rig.board("reader-foot")


async def test_export_from_the_screen(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    picture = snapshots.stuck()
    async with console(picture, details={"fault": snapshots.fault(picture)}) as rig:
        await rig.pilot.press("colon", *"diagnosis", "enter", "E")
        await rig.until(lambda: list(tmp_path.glob("*.zip")) != [])
        (file,) = tmp_path.glob("*.zip")
        assert {"rings.json", "fault.json", "snapshot.json"} <= set(zipfile.ZipFile(file).namelist())


async def test_hostile_texts_inject_nothing():
    picture = snapshots.hostile()
    async with console(picture, details={"findings": FindingsDetail(findings=snapshots.findings())}) as rig:
        for key in ("d", "v"):
            await rig.pilot.press(key)
            await rig.pilot.pause()
            screen = rig.screen()
            assert "\x1b" not in screen and "\u202e" not in screen and "[red]x[/red]" in screen
            await rig.pilot.press("escape")


async def test_after_the_end_its_reason_comes_first_and_the_fault_is_there():
    picture = snapshots.stuck()
    over = snapshots.fault(picture, over_wall=snapshots.WALL + 2.0)
    picture.verdicts, picture.waits = [], []
    async with console(picture, details={"fault": over}) as rig:
        await rig.pilot.press("d")
        await rig.until(lambda: "LAST 64 STEPS" in "\n".join(rows(rig)))
        assert "frozen at the fault" not in "\n".join(rows(rig)), "a fault that is over is not the present one"
        rig.source.send(LinkState(state="ended", text="ended 02:34:12: core ended: killed by SIGKILL"))
        rig.app.screen.start_load()
        await rig.until(lambda: "frozen at the fault" in "\n".join(rows(rig)))
        assert rows(rig)[0].strip() == "ended 02:34:12: core ended: killed by SIGKILL"


async def test_a_fault_in_an_export_is_shown_although_it_was_over():
    picture = snapshots.stuck()
    over = snapshots.fault(picture, over_wall=snapshots.WALL + 2.0)
    picture.verdicts, picture.waits = [], []
    async with console(picture, live=False, details={"fault": over}) as rig:
        await rig.pilot.press("d")
        await rig.until(lambda: "frozen at the fault" in "\n".join(rows(rig)))
        assert "no fault now; this one was healed at" in rig.screen()


@pytest.mark.parametrize(("link", "said"), [("lost", "link lost for 7.0s"), ("live", "no sample for 7.0s")])
async def test_the_screen_of_a_lost_link_says_of_which_time_it_is(link, said):
    picture = snapshots.snapshot(2, 3)
    async with console(picture) as rig:
        await rig.pilot.press("d")
        await rig.until(lambda: "no fault found: serving" in rig.screen())
        rig.clock.now += 7.0
        rig.source.send(LinkState(state=link, age_s=7.0))
        rig.app.tick()
        await rig.pilot.pause()
        lines = [line.strip() for line in rows(rig)]
        assert lines[0] == f"{said}: the diagnosis is of {wall_text(picture.sampled_at)}"
        assert lines[1] == "no fault found by then: serving"
        rig.source.send(picture)
        rig.app.tick()
        await rig.pilot.pause()
        assert rows(rig)[0].strip() == "no fault found: serving"


async def test_a_verdict_of_a_lost_link_is_of_its_time_too():
    picture = halted()
    async with console(picture) as rig:
        rig.source.send(LinkState(state="lost", age_s=0.0))
        rig.clock.now += 75.0
        await rig.pilot.press("d")
        assert rows(rig)[0].strip() == f"link lost for 1m15: the diagnosis is of {wall_text(picture.sampled_at)}"
        assert "! STAGE 1 stopped" in rows(rig)[1]
