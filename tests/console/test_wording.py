"""One set of words: the console and the commands name columns, states, reasons and operations alike."""

from __future__ import annotations

import pytest
import snapshots
from ppconsole.cli import render, streams
from ppconsole.model.rows import visible_requests
from ppconsole.model.state import ConsoleState
from ppconsole.model.units import wall_text
from ppconsole.view import (
    diagnosis,
    events,
    figures,
    incident_table,
    ledger,
    legend,
    marks,
    request_table,
    stage_table,
    stream_table,
    wording,
)
from ppconsole.view.cells import Row, text_of
from ppengine.protocol.snapshot import IncidentInfo, OperationInfo, Snapshot

PRINTED_ALONE = {"USED/LIMIT", "REV", "BEGUN", "DONE", "DEVICE", "ALIVE", "STATE"}
"""Columns that a command has and the console shows elsewhere, or not at all."""


def titles(rows: list[Row]) -> set[str]:
    return set(text_of(rows[0]).split())


def request_rows(picture: Snapshot, width: int) -> list[Row]:
    state = ConsoleState(snapshot=picture)
    return request_table.rows(state, visible_requests(state), width)


def test_a_column_of_status_has_the_title_that_the_console_has() -> None:
    picture = snapshots.stuck()
    shown = titles(stage_table.rows(picture, 300)) | titles(request_rows(picture, 300))
    printed = {*render.stage_lines(picture.stages)[0].split(), *render.request_lines(picture.requests)[0].split()}
    assert printed - PRINTED_ALONE <= shown and {"STG", "STATE", "STREAM:OP", "REQ"} <= shown & printed


def test_a_column_of_streams_has_the_title_that_the_console_has() -> None:
    picture = snapshots.stuck()
    for stage in picture.stages:
        stage.streams[0].on_device = True
    picture.engine.checks.ledger = True
    rows = stream_table.rows(picture, [], "", 300, known=snapshots.ledger())
    shown = {word for line in rows if text_of(line).isupper() for word in text_of(line).split()}
    lines = [*streams.device_lines(picture), *streams.ledger_lines(snapshots.ledger())]
    printed = {word for line in lines if line.isupper() for word in line.split()}
    assert len(printed) > 12 and printed - PRINTED_ALONE <= shown
    assert all(column.title in wording.STREAM.values() for column in events.STREAM_COLUMNS)
    assert len(ledger._HANDOFFS) == len(wording.HANDOFF) and len(ledger._BUFFERS) == len(wording.BUFFER)


@pytest.mark.parametrize("state", marks.STAGE)
def test_a_stage_state_is_one_word_everywhere_and_its_letter_means_that_word(state: str) -> None:
    picture = snapshots.snapshot(2, 0)
    picture.verdicts = []
    picture.stages[1].state = state
    printed = render.stage_lines(picture.stages)[2].split()[1]
    assert printed == state
    wide, narrow = stage_table.rows(picture, 120)[2], stage_table.rows(picture, 80)[2]
    letter = marks.STAGE[state].text
    assert text_of(wide).split()[1] == state and text_of(narrow).split()[1] == letter
    meaning = legend.STAGE_STATES.rows[letter]
    assert meaning == state or meaning.startswith(f"{state}:")


@pytest.mark.parametrize("state", marks.REQUEST)
def test_a_request_state_is_one_word_everywhere_and_its_short_form_means_that_word(state: str) -> None:
    picture = snapshots.snapshot(2, 1)
    picture.requests[0].state = state
    assert render.request_lines(picture.requests)[1].split()[2] == state
    wide, narrow = request_rows(picture, 140)[1], request_rows(picture, 80)[1]
    short = marks.REQUEST[state].text
    words = [text_of(line).split() for line in (wide, narrow)]
    assert state in words[0] and short in words[1]
    meaning = legend.REQUEST_STATES.rows[short]
    assert meaning == state or meaning.startswith(f"{state}:")


def test_status_prints_the_operation_and_the_reason_of_the_console() -> None:
    picture = snapshots.snapshot(4, 8)
    lines = render.status_lines(picture)
    where = wording.locate(picture)
    for stage in picture.stages:
        assert any(line.endswith(f" {wording.operation(stage)}") for line in lines)
    for request in picture.requests:
        assert any(line.startswith(request.id) and line.endswith(wording.why(request, where)) for line in lines)
    assert any("at stage" in line for line in lines)


def test_the_head_and_the_rows_agree_on_the_micro_batches_in_flight() -> None:
    picture = snapshots.snapshot(2, 4)
    for stage, numbers in zip(picture.stages, ([7], [5, 6]), strict=True):
        stage.micro_batches = numbers
    for request, numbers in zip(picture.requests, ([8], [7], [6], []), strict=True):
        request.in_flight, request.why = numbers, None
    rows = [text_of(line) for line in request_rows(picture, 80)]
    assert "m008 in flight" in rows[1] or "m8 in flight" in rows[1], "on its way to the first stage"
    assert text_of(request_table.pool(picture, 80)).endswith("fly m5-8"), "each that WHY or MB names"


def test_micro_batches_without_room_are_counted() -> None:
    numbers = [30560, 30561, 30562, 30616, 30618, 30619]
    assert figures.micro_batches(numbers, 27) == "m30560-62 m30616 m30618-19"
    assert figures.micro_batches(numbers, 25) == "m30560-62 m30616 +2"
    assert [figures.micro_batches(numbers, width) for width in (15, 12, 11, 1)] == ["m30560-62 +3"] * 2 + [
        "m30560 +5",
        "+6",
    ]
    assert figures.micro_batches([], 20) == ""


def test_the_status_lists_open_operations_and_the_newest_of_those_that_are_done() -> None:
    """After a load of submissions the picture would scroll out of a terminal of 24 lines."""
    picture = snapshots.snapshot(2, 4)
    picture.operations = [
        OperationInfo(id=f"op-{number}", verb="submit", by="eve", state="applied", progress="queued")
        for number in range(40)
    ]
    picture.operations[3].state = "deferred"
    lines = [line for line in render.status_lines(picture) if line.startswith(("OP", "... and 35"))]
    assert lines[0] == "... and 35 older operations (ppconsole events)"
    assert [line.split()[1] for line in lines[1:]] == ["op-3", "op-36", "op-37", "op-38", "op-39"]


def test_the_status_of_a_stuck_engine_does_not_begin_with_serving() -> None:
    picture = snapshots.halted()
    assert picture.engine.state == "serving"
    assert " STUCK  model" in render.status_lines(picture)[0]
    picture.verdicts = []
    assert " SERVING  model" in render.status_lines(picture)[0]


def test_a_micro_batch_has_its_whole_number_or_a_sign_that_it_has_not() -> None:
    """`m429` beside `m2429` looks like another micro-batch."""
    assert [figures.micro_batch(2429, width) for width in (0, 6, 5, 4)] == ["m2429", "m2429", "m2429", "…429"]
    assert figures.micro_batch(429, 4) == "m429"
    runs = [figures.micro_batches([first, first + 1], 20) for first in (7, 11, 1999, 999, 2429)]
    assert runs == ["m7-8", "m11-12", "m1999-2000", "m999-1000", "m2429-30"]
    picture = snapshots.snapshot(2, 4)
    picture.stages[0].micro_batches, picture.requests[0].in_flight, picture.requests[0].why = [2429], [2429], None
    shown = "\n".join(text_of(line) for line in (*stage_table.rows(picture, 120), *request_rows(picture, 80)))
    assert shown.count("m2429") == 2 and "m429" not in shown


def test_an_operation_has_the_shorter_word_of_its_kind() -> None:
    forms = ["all_reduce<1.0 m7", "reduce<1.0 m7", "reduce<.0 m7", "reduce"]
    assert [wording.fitting_op(forms[0], len(form)) for form in forms] == forms
    assert [wording.fitting_op(forms[0], len(form) - 1) for form in forms] == [*forms[1:], "reduce"]
    found = [wording.fitting_op(op, 7) for op in ("token_return<1", "token_return<11", "sample", "own code", "", "-")]
    assert found == ["token<1", "token", "sample", "own", "", "-"]


def test_the_end_of_a_fault_has_one_word_and_one_time() -> None:
    picture = snapshots.snapshot(4, 8)
    fault = snapshots.fault(snapshots.stuck(), 2)
    fault.over_wall = snapshots.WALL + 9.0
    begin = fault.wall - fault.verdict.since_s
    picture.incident = IncidentInfo(
        number=1, wall=begin, stage=2, cause=fault.verdict.cause, summary="stuck", over_wall=begin + 5.0
    )

    def page() -> str:
        made = diagnosis.page(picture, diagnosis.Known(fault=fault), 80)
        return "\n".join(text_of(line) for line in made.rows)

    picture.sampled_at = begin + 60.0
    assert "healed in 5.0s" in incident_table.badge(picture, 80)
    assert f"this one was healed at {wall_text(begin + 5.0)}" in page()
    picture.incident.stage = 1
    assert f"this one was healed at {wall_text(fault.over_wall)}" in page(), "another incident came since"
