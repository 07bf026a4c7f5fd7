"""The Diagnosis screen as rows: picture, verdict, steps. Widths 80, 120, 200; nothing from outside can inject."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import rank_snapshots
import snapshots
from ppconsole.cli.incident_text import incident_lines
from ppconsole.cli.render import explain_lines
from ppconsole.link.incident_source import Listed
from ppconsole.model.steps import of_stage
from ppconsole.model.suggestion import suggestion
from ppconsole.model.waits import CORE, arrows
from ppconsole.view import diagnosis, pipeline, step_table
from ppconsole.view.cells import text_of, width_of
from ppconsole.view.diagnosis import Known
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.incidents import Incident
from ppengine.protocol.inspection import OpRecord, StacksDetail, StageRings, StageStacks, ThreadRing
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import FurtherFault, IncidentInfo, Verdict, WaitInfo

WIDTHS = (60, 80, 120, 200)


def texts(rows):
    return [text_of(line) for line in rows]


def page(picture, width=80, off="", **known):
    return texts(diagnosis.page(picture, Known(**known), width, off).rows)


def test_a_stuck_stage_at_80_columns():
    picture = snapshots.stuck()
    lines = [line.rstrip() for line in page(picture, fault=snapshots.fault(picture))]
    assert lines[:21] == [
        " ! STAGE 2 self_stuck, for 6.2s",
        "  attention of m18410 on comp; 0 to 1 blocked, 3 starved",
        "  do   > ppconsole stacks --stage 2",
        "         Enter shows the stacks   y copies the line",
        " PIPELINE  an arrow points from a waiting stage to the one it waits for",
        " ┌─ 0 ───────────┐   ┌─ 1 ───────────┐   ╔═ 2 ROOT ══════╗   ┌─ 3 ───────────┐",
        " │ B blocked     │   │ B blocked     │   ║ X faulty      ║   │ S starved     │",
        " │ forward m18412│──►│ receive       │──►║ forward m18410║◄──│ forward m18409│",
        " │ for 6.1s      │   │ for 6.1s      │   ║ for 6.2s      ║   │ for 6.0s      │",
        " └───────────────┘   └───────────────┘   ╚═══════════════╝   └───────────────┘",
        "  6.1s   core waits for stage 2: m18410 to be retired",
        " WHY",
        "  - stage 2: forward of m18410 open for 6.2 s, expected 0.1 s",
        "  - its process is running (state R), CPU 100 %",
        "  - no step retired for 6.2 s",
        "  stage 1 blocked 6.1s: send to stage 2 open for 6.1 s",
        "  the arrows in words",
        "  6.1s   stage 0 waits for stage 1: m18410, which is not received",
        "  6.1s   stage 1 waits for stage 2: m18410, which is not received",
        "  6.1s   stage 3 waits for stage 2: m18410, which is not sent",
        "",
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("stages", "at"), [(2, 1), (4, 0), (4, 3), (12, 5), (40, 39)])
def test_every_width_shows_the_root_and_never_breaks_a_line(width, stages, at):
    picture = snapshots.stuck(stages, at) if at else snapshots.stuck(stages, 1)
    root = picture.verdicts[0].stage
    made = diagnosis.page(picture, Known(fault=snapshots.fault(picture, root)), width)
    assert all(width_of(text_of(line)) <= width for line in made.rows)
    text = "\n".join(texts(made.rows))
    assert f"╔═ {root} ROOT" in text and f"! STAGE {root} self_stuck" in text
    assert "frozen at the fault" in text and f"stage {root}: MainThread" in text
    assert list(made.sections) == sorted(set(made.sections)) and made.sections[-1] < len(made.rows)


def test_the_arrows_point_from_who_waits():
    picture = snapshots.snapshot(3, 2)
    picture.waits = [
        WaitInfo(waiter="stage 0", on="the link from stage 0 to stage 1", what="message 3", since_s=3.0),
        WaitInfo(waiter="stage 1", on="stage 0", what="room", since_s=2.0),
        WaitInfo(waiter="stage 2", on="the link from stage 1 to stage 2", what="message 4", since_s=2.0),
        WaitInfo(waiter="the send thread of stage 1", on="stage 1", what="itself", since_s=1.0),
        WaitInfo(waiter="nonsense", on="stage 9", what="?", since_s=9.0),
    ]
    found = [(arrow.waiter, arrow.on, arrow.link) for arrow in arrows(picture.waits)]
    assert found == [(0, 1, True), (1, 0, False), (2, 1, True)]
    rows = texts(pipeline.rows(picture, 80))
    assert rows[2].count("◄─►") == 1 and rows[2].count("◄──") == 1
    words = "\n".join(texts(pipeline.words(arrows(picture.waits), 80, 8)))
    assert "stage 0 waits for the link to stage 1: message 3" in words
    assert arrows([WaitInfo(waiter="the engine core", on="stage 1", what="x", since_s=1)])[0].waiter == CORE


def test_the_core_as_the_root_and_a_healthy_pipeline():
    picture = snapshots.snapshot(2, 2)
    text = "\n".join(page(picture, rings=snapshots.rings(2, None)))
    assert "no fault found: serving" in text and "ROOT" not in text and "as of" in text
    picture.engine.state, picture.engine.message = "paused", "paused by eve; resume goes on"
    assert "no fault found: paused by eve; resume goes on" in "\n".join(page(picture)), "the state once"
    picture.engine.state, picture.engine.message = "serving", ""
    picture.verdicts = [Verdict(stage=None, cause="core", summary="the engine core is stopped", since_s=3.0)]
    text = "\n".join(page(picture))
    assert "! ROOT: the engine core" in text and "! CORE, for 3.0s" in text
    assert "asking for the last steps" in text


def test_a_fault_that_is_over_stays_with_its_steps():
    picture = snapshots.stuck()
    kept = snapshots.fault(picture, over_wall=snapshots.WALL + 9)
    text = "\n".join(page(snapshots.snapshot(), fault=kept))
    assert "no fault now; this one was healed at" in text and "attention of m18410" in text
    assert "frozen at the fault" in text and "! stage 2 ROOT" in text
    assert "STAGE 2 was self_stuck, healed after 15s" in text and "! STAGE 2" not in text and "do   >" not in text
    kept.verdict = Verdict(stage=None, cause="core", summary="the engine core is stopped", since_s=3.0)
    assert " CORE was the cause, healed after 12s" in "\n".join(page(snapshots.snapshot(), fault=kept))


def test_a_fault_that_is_over_lasted_as_long_as_its_incident():
    """The verdict of a record counts on until the fault is over, and is reported for some seconds after that."""
    kept = snapshots.fault(snapshots.stuck(), over_wall=snapshots.WALL + 9)
    kept.verdict.since_s = 11.0
    picture = snapshots.snapshot()
    picture.incident = IncidentInfo(
        number=1, wall=snapshots.WALL - 2, over_wall=snapshots.WALL + 3, stage=2, cause="self_stuck", summary="x"
    )
    assert "STAGE 2 was self_stuck, healed after 5.0s" in "\n".join(page(picture, fault=kept))
    picture.incident.wall = snapshots.WALL + 60
    assert "healed after 5.0s" not in "\n".join(page(picture, fault=kept)), "a later incident"
    picture.incident.wall, picture.incident.stage = snapshots.WALL - 2, None
    kept.verdict = Verdict(stage=None, cause="core", summary="the engine core is stopped", since_s=11.0)
    picture.incident.cause = "core"
    assert "healed after 5.0s" in "\n".join(page(picture, fault=kept))
    picture.incident.cause = "store"
    assert "healed after 5.0s" not in "\n".join(page(picture, fault=kept)), "an incident of a store"


def test_steps_say_how_far_each_stage_got():
    rings = snapshots.rings()
    read = {stage.stage: of_stage(stage, rings.mono_ns) for stage in rings.stages}
    assert (read[2].began, read[2].finished) == (18410, 18409)
    hung = read[2].cells[18410]
    assert (hung.done, hung.op) == (False, "forward") and hung.op_ms > 6000
    assert read[1].cells[18411].op == "room>2"
    done = read[3].cells[18400]
    assert done.done and (round(done.total_ms), round(done.waited_ms)) == (20, 4)
    lines = texts(step_table.rows(snapshots.rings(), [18410, 18410, 18409, 18408], {Place(2, 0)}, "LAST", "", 100))
    row = next(line for line in lines if line.startswith(" m18410"))
    assert row.split() == ["m18410", "R", "16ms", "+4ms", "R", "16ms", "+4ms", "B", "6.2s", "forward", "·"]
    row = next(line for line in lines if line.startswith(" m18409"))
    assert row.split()[-3:] == ["F", "16ms", "+4ms"], "stage 3 has finished it, and the driver does not know"
    assert sum(line.startswith(" m18") for line in lines) == 64


def test_no_stage_has_retired_a_step_that_its_rings_do_not_have():
    """Rings are fetched once a second, and the core's figure comes with each snapshot."""
    later = texts(step_table.rows(snapshots.rings(), [18999] * 4, set(), "LAST", "", 100))
    found = {line.split()[0]: line.split()[1:] for line in later if line.startswith((" finished", " retired"))}
    assert len(found["retired"]) == 4 and found["retired"] == found["finished"]


def test_an_open_operation_is_short_where_its_name_does_not_fit():
    def row(width):
        lines = texts(step_table.rows(snapshots.rings(), [], set(), "LAST", "", width))
        return next(line for line in lines if line.startswith(" m18410")).split()

    assert "forward" in row(100) and "fwd" in row(68)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_wait_for_a_rank_is_whole_in_four_columns_at_80(kind: str):
    rings = rank_snapshots.fault(rank_snapshots.dead()).rings
    (thread,) = next(each for each in rings.stages if (each.stage, each.rank) == (1, 0)).threads
    forward = thread.records[-1]
    assert (forward.kind, forward.done_ns) == ("forward", 0)
    thread.records.append(msgspec.structs.replace(forward, kind=kind, peer=1))
    for width, form in ((80, "<.1"), (88, "<1.1")):
        lines = texts(step_table.rows(rings, [], {Place(1, 1)}, "LAST", "", width))
        assert f"B 6.2s {kind.removeprefix('all_')}{form} " in next(
            each for each in lines if each.startswith(" m18410")
        )
        assert "…" not in "".join(lines)


def test_many_stages_have_the_root_among_the_columns():
    picture = snapshots.rings(40, 30)
    text = "\n".join(texts(step_table.rows(picture, [None] * 40, {Place(30, 0)}, "LAST", "", 80)))
    assert "!30" in text and "32 more stages have no room" in text
    none = texts(step_table.rows(None, [], set(), "LAST", "this is a recording", 80))
    assert none[1] == "  this is a recording"


@pytest.mark.parametrize(
    ("text", "words", "stage"),
    [
        ("ppconsole continue 1 (or: kill -CONT 41201)", ("continue", "1"), None),
        ("ppconsole stacks --stage 3", ("stacks", "--stage", "3"), 3),
        ("ppconsole restart-stage 1 (weights anew); ppconsole logs --stage 1", ("restart-stage", "1"), None),
        ("ppconsole logs --stage 2; and so on", ("logs", "--stage", "2"), 2),
        ("ppconsole -e opt continue 0", ("continue", "0"), None),
        ("kill -CONT 77", (), None),
        ("see stage 2", (), None),
        ("ppconsole abort 'r 1", (), None),
        ("", (), None),
    ],
)
def test_what_a_verdict_suggests(text, words, stage):
    found = suggestion(text)
    assert (found.words, found.stage) == (words, stage)


def test_no_act_is_offered_while_verbs_are_off():
    picture = snapshots.halted()
    picture.verdicts[0].suggest = "ppconsole continue 1 (or: kill -CONT 7)"
    assert any("Enter runs it, after a look at the plan" in line for line in page(picture))
    told = [line.strip() for line in page(picture, off="the link is lost 7s")]
    assert "the link is lost 7s; y copies the line" in told and not any("Enter runs it" in line for line in told)
    picture.verdicts[0].suggest = "kill -CONT 7"
    assert any("shell on the engine's host" in line for line in page(picture))
    picture.verdicts[0].suggest = "let the consumer wait for the producer's event"
    assert not any("copies it" in line for line in page(picture))


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_texts_stay_text(width):
    picture = snapshots.hostile()
    bad = snapshots.HOSTILE
    picture.verdicts[0].root = True
    picture.waits = [WaitInfo(waiter="stage 0", on="stage 1", what=bad, since_s=9.0)]
    picture.stages[0].op = picture.engine.message = bad
    stacks = StacksDetail(stages=[StageStacks(stage=0, pid=1, text=bad, error=bad)], ability=bad)
    kept = snapshots.fault(snapshots.stuck(), verdict=picture.verdicts[0], stacks=stacks, missing=[bad])
    rings = snapshots.rings(2, None)
    first = rings.stages[0].threads[0].records
    first[-1] = msgspec.structs.replace(first[-1], kind=bad, done_ns=0)
    rings.stages[1].error = bad
    kept.rings = rings
    for known in (Known(fault=kept), Known(stacks=stacks, rings=rings), Known(problem=bad, stacks_problem=bad)):
        for line in texts(diagnosis.page(picture, known, width).rows):
            assert "\x1b" not in line and "\u202e" not in line and "\n" not in line and "\x07" not in line


def test_a_step_that_waits_for_the_tokens_of_an_older_one():
    ms = 10**6
    records = [
        OpRecord("step", 9, -1, 10 * ms, 0, 0, 1, 1),
        OpRecord("token_return", 7, 2, 11 * ms, 0, 0, 1, 1),
    ]
    ring = ThreadRing(ring="main", name="main", recorded=2, records=records)
    (cell,) = of_stage(StageRings(stage=0, rank=0, pid=1, threads=[ring]), 31 * ms).cells.values()
    assert (cell.done, cell.op, cell.op_ms, cell.total_ms, cell.waited_ms) == (False, "token_return<2", 20, 21, 20)


def test_a_stage_whose_last_move_is_unknown_says_so() -> None:
    picture = snapshots.snapshot(2, 1)
    stage = picture.stages[1]
    stage.streams, stage.op, stage.waiting_on, stage.progress_age_ms = [], None, None, None
    assert "last move unknown" in "\n".join(texts(pipeline.rows(picture, 80)))


def test_further_processes_of_a_verdict_are_lines_behind_its_evidence():
    """On the screen, in `explain` and in an incident; only a field makes them."""
    further = [
        FurtherFault(subject="texts", summary="texts (pid 8) is stopped", suggest="kill -CONT 8"),
        FurtherFault(subject="agent", summary="agent\x07 (pid 9) hangs"),
    ]
    verdict = Verdict(
        stage=None, cause="process", subject="http0", summary="http0 (HTTP process, pid 7) is stopped", since_s=3.0,
        evidence=["pid 7: process state T"], suggest="kill -CONT 7", further=further,
    )  # fmt: skip
    picture = snapshots.snapshot(2, 0, verdicts=[verdict])
    shown = [line.rstrip() for line in page(picture)]
    first = shown.index("  - pid 7: process state T")
    also = ["also: texts (pid 8) is stopped (kill -CONT 8)", "also: agent (pid 9) hangs"]
    assert shown[first + 1 : first + 3] == [f"  - {line}" for line in also]
    assert explain_lines(picture)[1:4] == [f"    {line}" for line in ("pid 7: process state T", *also)]
    fault = msgspec.structs.replace(snapshots.fault(snapshots.stuck()), verdict=verdict)
    info = IncidentInfo(number=3, wall=1e9, stage=None, cause="process", summary=verdict.summary)
    engine = EngineRecord(
        id="e", name="tiny", epoch="e", pid=1, pid_start=1, state_endpoint="", control_endpoint="", bulk_endpoint="",
        proto=2, model="tiny", pipeline_parallel_size=2, run_dir="", started_wall=1e9,
    )  # fmt: skip
    listed = Listed("3", engine, info, Path("incidents/3"))
    lines = incident_lines(listed, Incident(info=info, fault=fault), 1e9 + 9)
    assert [f"    {line}" for line in also] == lines[3:5]
