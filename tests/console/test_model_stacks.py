"""Stacks of many stages as few: the outlier alone and first, the others once."""

from ppconsole.cli.render import stacks_lines
from ppconsole.model.stacks import grouped, notes
from ppconsole.view.drilldown import stacks_rows
from ppengine.protocol.inspection import StacksDetail, StageStacks, ThreadStack

WAITS = ["poll socket.py:1", "run worker.py:9"]


def stage(number, frames, *, gil=False, error="", native=True):
    threads = [
        ThreadStack(name="MainThread", frames=frames, owns_gil=gil),
        ThreadStack(name="control", frames=["poll socket.py:1"]),
    ]
    return StageStacks(stage=number, pid=70 + number, text="x", threads=threads, error=error, native=native)


def test_identical_stacks_are_told_once_and_the_outlier_first():
    stages = [stage(0, WAITS), stage(1, WAITS), stage(2, ["match re.py:1"], gil=True), stage(3, WAITS)]
    groups = grouped(StacksDetail(stages=stages))
    assert [group.title for group in groups] == [
        "stage 2: MainThread (holds the GIL)", "stages 0, 1, 3: MainThread", "stages 0, 1, 2, 3: control",
    ]  # fmt: skip
    assert groups[0].frames == ("match re.py:1",) and groups[1].frames == tuple(WAITS)
    lines = stacks_lines(StacksDetail(stages=stages))
    assert lines[:4] == [
        "pids: stage 0 70, stage 1 71, stage 2 72, stage 3 73", "", "stage 2: MainThread (holds the GIL)",
        "    match re.py:1",
    ]  # fmt: skip
    assert sum("poll socket.py:1" in line for line in lines) == 2
    rows = ["".join(text for text, _ in row.segs) for row in stacks_rows(StacksDetail(stages=stages), "", 60)]
    assert any("stages 0, 1, 3: MainThread" in row for row in rows)


def test_the_core_comes_last_and_is_no_stage():
    core = StageStacks(stage=None, pid=9, text="x", threads=stage(0, WAITS).threads, error="late")
    detail = StacksDetail(stages=[stage(0, WAITS)], core=core)
    titles = [group.title for group in grouped(detail)]
    assert titles == ["stage 0: MainThread", "stage 0: control", "core: MainThread", "core: control"]
    assert stacks_lines(detail)[:2] == ["pids: stage 0 70, core 9", "core: late"]
    alone = StacksDetail(stages=[], core=core, ability="py-spy sees Python frames alone")
    assert [group.title for group in grouped(alone)] == ["core: MainThread", "core: control"]


def test_text_alone_is_grouped_too_and_nothing_is_lost():
    stages = [StageStacks(stage=k, pid=k, text="Thread 1\n  f (a.py:1)") for k in (0, 1)]
    stages.append(StageStacks(stage=2, pid=None, error="there is no such process any more"))
    (group,) = grouped(StacksDetail(stages=stages))
    assert group.title == "stages 0, 1:" and group.frames == ("Thread 1", "  f (a.py:1)")
    assert notes(StacksDetail(stages=stages)) == ["stage 2: there is no such process any more"]


def test_what_could_not_be_seen_is_said():
    detail = StacksDetail(stages=[stage(0, WAITS, native=False)], ability="py-spy sees Python frames alone")
    assert notes(detail) == ["py-spy sees Python frames alone"]
    assert notes(StacksDetail(stages=[stage(0, WAITS)], ability="all")) == []


def test_escape_sequences_of_a_process_reach_no_terminal():
    detail = StacksDetail(stages=[stage(0, ["\x1b[2Jf a.py:1"])])
    assert not any("\x1b" in line for line in stacks_lines(detail))
