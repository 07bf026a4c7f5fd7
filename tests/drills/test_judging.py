"""How a drill is judged, and what the table says of it."""

from typing import Any

import lanes
import pytest
import report
from drill import Result, positions
from ppengine.drills.registry import find


def result(**changes: Any) -> Result:
    """Return a drill in which a hang at stage 1 of 2 was named rightly in 1.5 s."""
    fields: dict[str, Any] = {
        "kind": "sleep-before-send", "stages": 2, "stage": 1, "position": "last", "effect": "hang", "held_out": False,
        "expects": ["self_stuck"], "right_stages": [1], "target_s": 2.0, "detect_s": 1.5, "named_s": 1.5,
        "first": [(1, "self_stuck")], "named": [(1, "self_stuck")],
    }  # fmt: skip
    return Result(**(fields | changes))


def verdict(one: Result) -> tuple[bool, bool, bool]:
    return one.stage_right, one.cause_right, one.undetermined


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True, True, False)),
        ({"named": [(0, "self_stuck")]}, (False, False, False)),
        ({"named": [(1, "dead")]}, (True, False, False)),
        ({"named": [(1, "undetermined")]}, (True, False, True)),
        ({"named": [(1, "self_stuck"), (0, "dead")]}, (False, False, False)),
        ({"first": [], "named": []}, (False, False, False)),
        ({"expects": ["undetermined"], "named": [(1, "undetermined")]}, (True, True, False)),
        ({"right_stages": [0, 1], "named": [(0, "self_stuck")]}, (True, True, False)),
        ({"right_stages": [None], "expects": ["core"], "named": [(None, "core")]}, (True, True, False)),
    ],
)
def test_right_and_wrong(changes: dict[str, Any], expected: tuple[bool, bool, bool]) -> None:
    assert verdict(result(**changes)) == expected


def test_silence_is_right_where_nothing_is_broken() -> None:
    quiet = result(effect="none", expects=[], first=[], named=[], detect_s=None, named_s=None)
    assert verdict(quiet) == (True, True, False)
    loud = result(effect="none", expects=[], false_roots=["dead at 1"])
    assert verdict(loud)[:2] == (False, False)
    blind = result(effect="blind", expects=["undetermined"], first=[], named=[])
    assert verdict(blind)[:2] == (True, True)


def test_in_time() -> None:
    assert result().in_time
    assert not result(named_s=2.1).in_time
    assert not result(named_s=None).in_time


def test_positions() -> None:
    assert positions(find("sigkill"), 2) == {"first": 0, "last": 1}
    assert positions(find("sigkill"), 4) == {"first": 0, "middle": 2, "last": 3}
    assert positions(find("drop-send"), 4) == {"first": 0, "middle": 2}
    assert positions(find("wrong-metadata"), 2) == {"last": 1}
    assert positions(find("core-stop"), 4) == {"core": None}


def test_table_counts_undetermined_apart_and_leaves_out_what_was_spoiled() -> None:
    some = [
        result(),
        result(position="first", stage=0, right_stages=[0], named=[(0, "undetermined")], first=[(0, "undetermined")]),
        result(kind="x", problem="no cgroup"),
        result(kind="y", held_out=True, named=[(0, "dead")], false_roots=["dead at 0"]),
    ]
    text = report.table(some, [{"name": "idle", "does": "nothing", "alarms": [], "problem": "", "seconds": 120.0}])
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "| all | 3 | 2/3 (67 %) | 1/3 (33 %) | 1 | 0 | 1 |" in rows["all"]
    assert "| held out | 1 | 0/1 (0 %) |" in rows["held out"]
    assert "1.5 s stage, cause" in rows["sleep-before-send"]
    assert "1.5 s stage, ?" in rows["sleep-before-send"]
    assert "NOT dead@0" in rows["y (held out)"]
    assert "x" not in rows
    assert "SPOILED no cgroup" in text
    assert "| idle: nothing | 120 | none |" in text


def test_row_of_a_kind_counts_its_drills_and_wrong_ones_are_listed() -> None:
    some = [
        result(),
        result(position="first", named_s=3.0),
        result(kind="y", held_out=True, named=[(0, "dead")], named_s=None),
        result(kind="z", problem="no cgroup"),
    ]
    text = report.by_kind(some)
    assert "| sleep-before-send | 2 | 2/2 (100 %) | 2/2 (100 %) | 1/2 (50 %) | 1.5 to 3.0 |" in text
    assert "| y (held out) | 1 | 0/1 (0 %) | 0/1 (0 %) | 0/1 (0 %) | - |" in text
    assert "| all | 3 | 2/3 (67 %) | 2/3 (67 %) | 1/3 (33 %) | 1.5 to 3.0 |" in text
    bad = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(bad) == 2 and bad[0].startswith("- y 2/last") and "SPOILED no cgroup" in bad[1]


def test_lanes_share_no_processor() -> None:
    assert lanes.split(range(16), 3, 5) == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}, {12, 13, 14}]
    assert lanes.split({7, 1, 5, 4}, 2, 9) == [{1, 4}, {5, 7}]
    assert lanes.split(range(8), 2, 3) == [{0, 1}, {2, 3}, {4, 5}]
    assert lanes.split({0, 1}, 3, 5) == [{0, 1}], "one lane, if there are too few for two"
