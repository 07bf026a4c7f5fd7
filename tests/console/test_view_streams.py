"""The Streams screen as rows: streams of every stage, checks with their keys, findings with both call sites."""

from __future__ import annotations

import pytest
import snapshots
from ppconsole.view import streams
from ppconsole.view.cells import text_of, width_of
from ppengine.protocol.control import SetCheck
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import ChecksInfo


def texts(rows):
    return [text_of(line) for line in rows]


def checked(**checks):
    picture = snapshots.stuck()
    picture.engine.checks = ChecksInfo(**checks)
    return picture


def test_streams_findings_and_checks_at_80_columns():
    lines = [line.rstrip() for line in texts(streams.rows(checked(ledger=True), snapshots.findings(), "", 80))]
    assert lines[1] == "  1 ledger  ON   hand-offs between streams and threads"
    assert lines[2].startswith("  2 strict  off")
    assert lines[5].split() == ["STG", "STREAM", "OWNER", "THREAD", "OPERATION", "AGE", "PEND", "WAITS", "FOR"]
    root = next(line for line in lines if line.startswith(" ! 2"))
    assert root.split() == ["!", "2", "comp", "main", "!", "forward", "m18410", "6.2s", "3"]
    text = "\n".join(lines)
    assert "FINDINGS  1" in text and "stage 1 stream_order, first seen 3.2s ago" in text
    assert "written by  copy of seqstart" in text and "runner.py:210" in text
    assert "read by  pickling of seqstart" in text and "broadcast.py:51" in text and "to fix  record an event" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_width(width):
    rows = streams.rows(checked(ledger=True), snapshots.findings(), "", width)
    assert all(width_of(text_of(line)) <= width for line in rows)
    assert any("OPERATION" in text_of(line) for line in rows)


@pytest.mark.parametrize(
    ("checks", "findings", "problem", "says"),
    [
        ({}, None, "", "no check is on"),
        ({}, [], "", "no check is on"),
        ({"ledger": True}, [], "", "none so far"),
        ({"finite": True}, None, "", "asking"),
        ({"ledger": True}, None, "the link is down", "the link is down"),
    ],
)
def test_without_findings_it_says_why(checks, findings, problem, says):
    assert any(says in line for line in texts(streams.rows(checked(**checks), findings, problem, 80)))


def test_a_key_turns_a_check_over():
    off, on = ChecksInfo(), ChecksInfo(ledger=True, shadow=0.01, shadow_state="ready", shadow_compared=7)
    assert streams.toggle("ledger", off) == SetCheck(check="ledger", mode="on")
    assert streams.toggle("ledger", on) == SetCheck(check="ledger", mode="off")
    assert streams.toggle("shadow", off) == SetCheck(check="shadow", mode="on", share=0.01)
    assert streams.toggle("shadow", on) == SetCheck(check="shadow", mode="off")
    picture = snapshots.stuck()
    picture.engine.checks = on
    assert any(
        "1.0% of the steps, ready, 7 tokens compared" in line for line in texts(streams.rows(picture, [], "", 120))
    )


def test_hostile_texts_stay_text():
    bad = snapshots.HOSTILE
    picture = snapshots.hostile()
    picture.stages[0].streams[0].owner = picture.stages[0].streams[0].waits_for = picture.stages[0].streams[0].name = (
        bad
    )
    picture.engine.checks = ChecksInfo(shadow=0.5, shadow_state=bad)
    found = [Finding(stage=0, cause="stream_order", summary=bad, since_s=1.0, evidence=[bad, f"read by: {bad}"])]
    for line in texts(streams.rows(picture, found, bad, 80)):
        assert not any(char in line for char in "\x1b\u202e\n\x07\r")
