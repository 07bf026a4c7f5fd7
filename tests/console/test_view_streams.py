"""The Streams screen as rows: streams of every stage, checks with their keys, findings with both call sites."""

from __future__ import annotations

import pytest
import snapshots
from ppconsole.view import events, stream_table
from ppconsole.view.cells import text_of, width_of
from ppengine.protocol.inspection import LedgerDetail
from ppengine.protocol.reports import Finding, LedgerBuffer, LedgerStream
from ppengine.protocol.snapshot import ChecksInfo
from ppengine.protocol.stage_info import StreamInfo
from ppengine.protocol.verbs import SetCheck


def texts(rows):
    return [text_of(line) for line in rows]


def checked(**checks):
    picture = snapshots.stuck()
    picture.engine.checks = ChecksInfo(**checks)
    return picture


def test_streams_findings_and_checks_at_80_columns():
    lines = [line.rstrip() for line in texts(stream_table.rows(checked(ledger=True), snapshots.findings(), "", 80))]
    assert lines[1] == "  1 ledger   ON   hand-offs between streams and threads"
    assert lines[2].startswith("  2 strict   off")
    assert lines[5].startswith("  5 checksum off")
    assert lines[6].split() == ["STG", "STREAM", "OWNER", "OPERATION", "AGE", "PEND", "WAITS-FOR"]
    root = next(line for line in lines if line.startswith(" ! 2"))
    assert root.split() == ["!", "2", "comp", "main", "!", "forward", "m18410", "6.2s", "3"]
    text = "\n".join(lines)
    assert "FINDINGS  1" in text and "stage 1 stream_order, first seen 3.2s ago" in text
    assert "written by  copy of seqstart" in text and "runner.py:210" in text
    assert "read by  pickling of seqstart" in text and "broadcast.py:51" in text and "to fix  record an event" in text


def test_an_idle_stage_is_not_marked_as_old_but_a_starved_one_is():
    picture = snapshots.snapshot(2, 0)
    for stage, state in zip(picture.stages, ("idle", "starved"), strict=True):
        stage.state = state
        stage.streams = [StreamInfo(name="main", owner="main", op="idle", age_ms=60_000.0, waits_for="core")]
    idle, starved = (line for line in texts(stream_table.rows(picture, [], "", 80)) if "core" in line)
    assert "!" not in idle and "1m00" in idle
    assert "! idle" in starved


@pytest.mark.parametrize("width", [80, 120])
def test_no_operation_of_a_stream_is_cut(width):
    picture = snapshots.snapshot(2, 4)
    names = ("main", "control", "receive", "send")
    for stage in picture.stages:
        stage.streams = [
            StreamInfo(name=name, owner="main", op="token_return<3 m1985", age_ms=6000.0, waits_for="stage 11")
            for name in names
        ]
    for made in (stream_table.rows(picture, [], "", width), events.streams(picture.stages[0], width)):
        lines = [line for line in texts(made) if "token_return" in line]
        assert lines and all("token_return<3 m1985 " in line and "stage 11" in line for line in lines)


def test_the_ledger_of_a_stage_at_80_columns():
    known = snapshots.ledger()
    (stage,) = known.stages
    stage.age_s = 0.4
    free = LedgerBuffer(name="send>2 buffer 1", device="cpu", bytes=64, generation=2, writer="", readers=[],
                        in_flight=[], freed=True)  # fmt: skip
    stage.buffers.insert(0, free)
    stage.streams.append(
        LedgerStream(
            name="compute", owner="main", device="cuda:0", purpose="compute", alive=True, op="attention m7",
            age_ms=2100.0, pending=3,
        )
    )  # fmt: skip
    lines = [line.rstrip() for line in texts(stream_table.rows(checked(ledger=True), [], "", 80, known=known))]
    assert lines[lines.index(" LEDGER") + 1 :] == [
        " stage 1  2 streams, 1 of 2 buffers in use, 1 finding  0.4s ago",
        "  STREAM         OWNER          OPERATION                AGE PEND FOR",
        "  send>2         send           send of m7              0.4s    1 send",
        "  compute        main           ! attention m7          2.5s    3 compute cuda:0",
        "  PRODUCER                 CONSUMER                 ORDERED-BY             TIMES",
        "  thread main              thread send              queue                      7",
        "  BUFFER                 GEN  SIZE LAST-WRITER                    READ-NOW-BY",
        "  send>2 buffer 0          7  2.0K main: result of m7             send>2: send …",
    ]


@pytest.mark.parametrize(("width", "columns"), [(80, 80), (160, 100)])
def test_the_ledger_of_a_gpu_stage_is_read_in_one_glance(width, columns):
    known = snapshots.ledger()
    (stage,) = known.stages
    stage.streams[0] = LedgerStream(
        name="kv fill", owner="kv-map", device="cuda:0", purpose="zeroing", alive=True, op="", age_ms=None, pending=0
    )
    stage.buffers[0] = LedgerBuffer(
        name="slot 0 of stage 2", device="cuda:0", bytes=0, generation=7, writer="send of m18410 (stream compute)",
        readers=[], in_flight=["receive of m18410 (stage 2)"],
    )  # fmt: skip
    lines = texts(stream_table.rows(checked(ledger=True), [], "", width, known=known))
    fill = next(line for line in lines if "kv fill" in line)
    assert fill.split() == ["kv", "fill", "kv-map", "idle", "-", "0", "zeroing", "cuda:0"]
    assert len(fill.rstrip()) <= columns, "what belongs together is not far apart"
    slot = next(line for line in lines if "slot 0" in line)
    assert " - compute: send of m18410 " in slot and "stage 2: rece" in slot


@pytest.mark.parametrize(
    ("ledger", "missing", "says"),
    [
        (None, "", "asking"),
        (None, "no core", "no core"),
        (LedgerDetail(on=True, stages=[]), "", "no stage has reported"),
    ],
)
def test_without_a_ledger_it_says_why(ledger, missing, says):
    lines = texts(stream_table.rows(checked(ledger=True), [], "", 80, known=ledger, missing=missing))
    assert says in lines[lines.index(next(line for line in lines if line.startswith(" LEDGER"))) + 1]
    assert not any(line.startswith(" LEDGER") for line in texts(stream_table.rows(checked(), [], "", 80)))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_width(width):
    rows = stream_table.rows(checked(ledger=True), snapshots.findings(), "", width, known=snapshots.ledger())
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
    assert any(says in line for line in texts(stream_table.rows(checked(**checks), findings, problem, 80)))


def test_a_key_turns_a_check_over():
    off, on = ChecksInfo(), ChecksInfo(ledger=True, shadow=0.01, shadow_state="ready", shadow_compared=7)
    assert stream_table.toggle("ledger", off) == SetCheck(check="ledger", mode="on")
    assert stream_table.toggle("ledger", on) == SetCheck(check="ledger", mode="off")
    assert stream_table.toggle("shadow", off) == SetCheck(check="shadow", mode="on", share=0.01)
    assert stream_table.toggle("shadow", on) == SetCheck(check="shadow", mode="off")
    picture = snapshots.stuck()
    picture.engine.checks = on
    assert any(
        "1.0% of the steps, ready, 7 tokens compared" in line for line in texts(stream_table.rows(picture, [], "", 120))
    )


def test_hostile_texts_stay_text():
    bad = snapshots.HOSTILE
    picture = snapshots.hostile()
    picture.stages[0].streams[0].owner = picture.stages[0].streams[0].waits_for = picture.stages[0].streams[0].name = (
        bad
    )
    picture.engine.checks = ChecksInfo(shadow=0.5, shadow_state=bad)
    found = [Finding(stage=0, cause="stream_order", summary=bad, since_s=1.0, evidence=[bad, f"read by: {bad}"])]
    picture.engine.checks.ledger = True
    known = snapshots.ledger()
    for each in (known.stages[0].streams[0], known.stages[0].buffers[0]):
        each.name = bad
    known.stages[0].handoffs[0].event = bad
    for line in texts(stream_table.rows(picture, found, bad, 80, known=known)):
        assert not any(char in line for char in "\x1b\u202e\n\x07\r")
