"""Rows of stages with several tensor ranks: folded, opened, one dead, one late."""

from __future__ import annotations

import pytest
import rank_snapshots
import snapshots
from ppconsole.cli import render
from ppconsole.model.endings import where
from ppconsole.model.facts import headline, unseen_stages
from ppconsole.model.folding import alike
from ppconsole.model.stacks import grouped, pids
from ppconsole.model.waits import arrows
from ppconsole.view import (
    diagnosis,
    marks,
    meaning,
    pipeline,
    stage_detail,
    stage_rows,
    stage_table,
    step_table,
    stream_table,
    timeline,
)
from ppconsole.view.cells import text_of, width_of
from ppconsole.view.stage_rows import RowKey
from ppengine.protocol.inspection import StacksDetail, StageStacks
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import IncidentInfo, Verdict
from ppengine.protocol.stage_info import StreamInfo


def texts(rows):
    return [text_of(line) for line in rows]


def test_a_stage_is_one_row_with_its_worst_rank_at_80_columns():
    assert texts(stage_table.rows(rank_snapshots.dead(), 80, selected=RowKey(0))) == [
        "    STG S MEMORY    USED KV-USE/MAP/CAP   I>O     MB STEP RANKW STREAM:OP    AGE",
        ">   0×2 B ████▒│···  56% 812/1024/1377*   0>1 m18412 22ms    5% comp:fwd>1  2.3s",
        "! 1.1+1 D ████▒│···  55% 812/1024/1414    ?>?      -    ?  100% -           2.3s",
    ]


def test_an_opened_stage_has_a_row_a_rank_and_columns_keep_their_places():
    picture = rank_snapshots.dead()
    rows = texts(stage_table.rows(picture, 80, selected=RowKey(1, 1), opened={1}))
    assert rows == [
        "    STG S MEMORY    USED KV-USE/MAP/CAP   I>O     MB STEP RANKW STREAM:OP    AGE",
        "    0×2 B ████▒│···  56% 812/1024/1377*   0>1 m18412 22ms    5% comp:fwd>1  2.3s",
        "    1.0 S ████▒│···  55% 812/1024/1414    1>0 m18411 23ms  100% reduce<1.1  2.3s",
        "!   1.1 D ?········    ? ?/?/?            ?>?      -    ?     ? -           2.3s",
    ]
    assert texts(stage_table.rows(rank_snapshots.ranks(), 80))[0] == rows[0]


def test_stages_of_one_rank_have_no_names_and_no_column_of_ranks():
    rows = texts(stage_table.rows(snapshots.snapshot(2, 0), 200))
    assert "RANKW" not in rows[0] and [row.split()[0] for row in rows[1:]] == ["0", "1"]


def test_a_folded_row_has_the_memory_of_the_fullest_and_the_longest_wait():
    picture = rank_snapshots.late(1, 4, at=(0, 2))
    full = rank_snapshots.of(picture, 0, 3)
    full.memory.used, full.kv_blocks.capacity = full.memory.limit, 1100
    (row,), _ = stage_rows.fold(picture, 8)
    assert row.name == "0×4" and row.info.tensor_rank == 2, "the one that is busiest stands for the stage"
    assert row.info.memory == full.memory and row.info.kv_blocks.capacity == 1100 and row.info.rank_wait == 0.46
    assert rank_snapshots.of(picture, 0, 2).rank_wait == 0.02, "the snapshot is as it was"


def test_the_rank_that_comes_late_is_seen_when_its_stage_is_opened():
    rows = texts(stage_table.rows(rank_snapshots.late(1, 4, at=(0, 2)), 80, opened={0}))
    assert [row.split()[0] for row in rows[1:]] == ["0.0", "0.1", "0.2", "0.3"]
    at = rows[0].index("RANKW")
    assert [row[at : at + 5].strip() for row in rows[1:]] == ["46%", "46%", "2%", "46%"]


def test_a_fault_marks_the_named_rank_and_without_a_name_all_of_the_stage():
    picture = rank_snapshots.ranks()
    picture.verdicts = [Verdict(stage=0, rank=1, cause="straggler", summary="x", since_s=1.0)]
    assert marks.faulty_places(picture) == {Place(0, 1)} and marks.faulty_stages(picture) == {0}
    (first, second), _ = stage_rows.fold(picture, 8)
    assert first.name == "0.1+1" and first.info.tensor_rank == 1 and second.name == "1×2"
    assert "!" in text_of(stage_table.rows(picture, 80)[1]) and " X " in text_of(stage_table.rows(picture, 80)[1])
    picture.verdicts[0].rank = None
    assert marks.faulty_places(picture) == {Place(0, 0), Place(0, 1)}
    picture.verdicts[0].rank = 7
    assert marks.faulty_places(picture) == {Place(0, 0), Place(0, 1)}, "a rank that no snapshot has"


def test_rows_of_an_opened_stage_stay_when_there_are_too_many():
    picture = rank_snapshots.ranks(8, 4)
    shown, rest = stage_rows.fold(picture, 8, {2})
    assert [row.name for row in shown if row.key.stage == 2] == ["2.0", "2.1", "2.2", "2.3"]
    assert len(shown) == 7 and len(rest) == 4 and all("×4" in row.name for row in rest)
    assert texts(stage_table.rows(picture, 80, 8, None, {2}))[-1].strip().startswith("… 4 more: ")
    assert stage_rows.count(picture, {2}) == 11


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_row_of_ranks_is_wider_than_the_terminal(width: int) -> None:
    picture = rank_snapshots.dead(12, 8, at=(11, 7))
    rows = [*stage_table.rows(picture, width, opened={11}), *stage_detail.rows(picture, 11, 7, width)]
    rows += pipeline.rows(picture, width) + stream_table.rows(picture, [], "", width)
    assert max(width_of(text) for text in texts(rows)) <= width
    assert any("11.7 D" in text or "11.7 dead" in text for text in texts(rows))


def test_an_old_wait_for_a_rank_is_shown_with_its_step_at_80_columns():
    picture = rank_snapshots.ranks()
    stage = rank_snapshots.of(picture, 1, 0)
    stage.streams = [StreamInfo(name="main", owner="main", op="token_return<1 m38058", age_ms=9000.0, pending=0)]
    assert any("! token_return<1 m38058 " in line for line in texts(stream_table.rows(picture, [], "", 80)))


def test_the_detail_compares_all_ranks_and_shows_the_selected_one():
    picture = rank_snapshots.dead()
    text = "\n".join(texts(stage_detail.rows(picture, 1, 1, 80)))
    assert "STATE  stage 1 rank 1" in text and "STATE  stage 1 rank 0" not in text
    assert "    1.0 S" in text and "!   1.1 D" in text and "\n  1.0 " in text and "\n  1.1 " in text
    both = "\n".join(texts(stage_detail.rows(picture, 1, None, 80)))
    assert both.index("STATE  stage 1 rank 0") < both.index("STATE  stage 1 rank 1")
    assert "waits for     collective of rank 1, 2.2s" in both and both.count("TIMELINE") == 1
    assert both.count("killed by SIGKILL") == 1, "the verdict is of one rank"
    assert stage_detail.rows(picture, 7, None, 80) == []


def test_the_selected_rank_in_words():
    picture = rank_snapshots.dead()
    (section,) = meaning.of_selection(picture, None, 1, 0)
    assert section.title == "SELECTED  stage 1 rank 0" and "100%" in section.rows["RANKW"]
    assert section.rows["waits for"].startswith("rank 1 (collective)") and "!" not in section.rows
    assert len(meaning.of_selection(picture, None, 1)) == 2


def test_lanes_are_named_and_a_long_wait_for_ranks_is_painted_over_the_layers():
    picture = rank_snapshots.ranks()
    picture.stages[0].timeline = [[3, 7, 200.0, 200.0], [18, 7, 100.0, 90.0], [18, 7, 190.0, 0.1]]
    rows = texts(timeline.rows(picture, stage_rows.rows_of_ranks(picture, 0), 86))
    assert rows[1].startswith("  0.0 77777") and "rrrrr" in rows[1] and rows[1].count("r") < 40
    assert rows[2].startswith("  0.1 ") and {width_of(row) for row in rows} == {86}


def test_the_picture_of_the_pipeline_has_a_box_a_stage_with_its_ranks():
    rows = texts(pipeline.rows(rank_snapshots.dead(), 100))
    text = "\n".join(rows)
    assert "══ 1 ROOT" in text.replace("╔═", "══") and "0S 1D" in text and "0B 1B" in text and "──►" in text
    assert "stage 1 rank 0 waits for stage 1 rank 1: its part of m18411" in text
    alone = texts(pipeline.rows(snapshots.stuck(2, 1), 100))
    assert alone[4].startswith(" └") and rows[5].startswith(" └"), "stages of one rank have no line of ranks"


def test_waits_name_ranks_and_those_of_links_go_to_the_other_end():
    picture = rank_snapshots.dead()
    found = arrows(picture.waits)
    assert [(each.waiter, each.waiter_rank, each.on, each.on_rank) for each in found] == [
        (1, 0, 1, 1), (0, 0, 1, 0), (0, 1, 1, 1),
    ]  # fmt: skip
    picture.waits[0].on = "the link from stage 1 rank 0 to stage 0 rank 0"
    assert arrows(picture.waits)[0][:3] == (1, 0, True)


def test_the_diagnosis_names_the_rank_and_marks_its_steps_alone():
    picture = rank_snapshots.dead()
    fault = rank_snapshots.fault(picture)
    rows = texts(diagnosis.page(picture, diagnosis.Known(fault=fault), 120).rows)
    assert rows[0].startswith(" ! STAGE 1 RANK 1 dead, for 2.3s")
    head = next(row for row in rows if row.startswith(" STEP"))
    assert head.split() == ["STEP", "stage", "0.0", "stage", "0.1", "stage", "1.0", "!", "stage", "1.1", "ROOT"]
    retired = next(row for row in rows if row.startswith(" retired"))
    assert retired.split()[1:] == ["m18410", "m18410", "m18409", "m18409"]


def test_where_columns_lack_room_only_the_root_has_all_its_ranks():
    picture = rank_snapshots.dead()
    rings = rank_snapshots.fault(picture).rings
    lines = texts(step_table.rows(rings, [18410, 18409], {Place(1, 1)}, "LAST", "", 40))
    assert next(line for line in lines if line.startswith(" STEP")).split() == ["STEP", "0.0", "1.0", "!1.1"]


def test_commands_name_ranks():
    picture = rank_snapshots.dead()
    lines = render.stage_lines(picture.stages)
    assert lines[0].split()[10:12] == ["RANKW", "AGE"]
    assert [line.split()[0] for line in lines[1:]] == ["0.0", "0.1", "1.0", "1.1"]
    assert "2 stages of 2 ranks" in render.engine_line(picture) and "ranks" not in render.engine_line(
        snapshots.snapshot()
    )
    assert "!STAGE 1 RANK 1 dead 2.3s: " in "\n".join(render.status_lines(picture))
    assert render.explain_lines(picture)[0].startswith("STAGE 1 RANK 1 dead")
    assert headline(picture.verdicts[0], over=True) == "STAGE 1 RANK 1 was dead"
    for each in picture.stages:
        each.sample_age_ms = 5000.0
    assert unseen_stages(picture) == "stages 0.0, 0.1, 1.0 for 5.0s"


def test_stacks_and_incidents_name_ranks():
    detail = StacksDetail(
        stages=[StageStacks(stage=1, rank=rank, pid=70 + rank, text="f (a.py:1)") for rank in range(2)]
    )
    assert [group.title for group in grouped(detail)] == ["stages 1.0, 1.1:"]
    assert pids(detail) == [("stage 1 rank 0", 70), ("stage 1 rank 1", 71)]
    info = IncidentInfo(number=1, wall=1.0, stage=1, rank=1, cause="dead", summary="x")
    assert where(info) == "1.1"


def test_lines_that_differ_by_their_rank_are_one():
    lines = [f"stage {stage} rank {rank} (pid {stage}{rank}) was killed" for stage in (0, 1) for rank in (0, 1)]
    assert alike([*lines, "the end"]) == ["stages 0.0, 0.1, 1.0 and 1.1 were killed", "the end"]
