"""The legend has a row for each column, label, letter and glyph that a screen shows."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
import rank_snapshots
import snapshots
import test_tiers
from cli_helpers import Cli
from ppconsole.cli import render
from ppconsole.cli.streams import device_lines, ledger_lines
from ppconsole.model import facts
from ppconsole.model.rows import visible_requests
from ppconsole.model.state import ConsoleState
from ppconsole.model.topology import topology_of
from ppconsole.view import (
    board,
    clients_page,
    diagnosis,
    drilldown,
    help_page,
    kvmap,
    legend,
    marks,
    stage_detail,
    stage_table,
    step_table,
    stream_table,
    tiers_page,
    timeline,
    topology_page,
    wording,
)
from ppconsole.view import keys as key_tables
from ppconsole.view.cells import Column, Row, text_of, width_of
from ppconsole.view.frame import frame
from ppconsole.view.keys import HELP_KEYS, help_rows
from ppengine.protocol.clients import ClientInfo
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.gpu import GpuInfo, GpuProcess, Xid
from ppengine.protocol.operation_kinds import Kind
from ppengine.protocol.stage_info import CordonInfo

WORD = re.compile(r"[A-Z][A-Z0-9:>/-]*[A-Z0-9]|\b[A-Z]\b")
LABEL = re.compile(r"  (\S.{0,12}?) +")


def known_words(screen: str) -> set[str]:
    """Every word of the legend's abbreviations and titles."""
    sections = legend.SCREENS[screen]
    return {word for section in sections for text in (section.title, *section.rows) for word in text.split()}


def terms(screen: str) -> set[str]:
    return {term for section in legend.SCREENS[screen] for term in section.rows}


def headers(rows: list[Row]) -> list[str]:
    """The texts of the rows that name columns or sections: a header bar, or dim capitals."""
    found = []
    for line in rows:
        dim = all(style == "dim" or not text.strip() for text, style in line.segs)
        text = text_of(line)
        if line.fill == "head" or (dim and text.isupper()):
            found.append(text)
    return found


def unknown_words(screen: str, lines: list[str]) -> set[str]:
    """Capitals in `lines` that the legend of `screen` lacks; numbers and the names of things do not count."""
    known = known_words(screen)
    return {word for text in lines for word in text.split() if WORD.fullmatch(word)} - known


def labels(rows: list[Row]) -> set[str]:
    """Labels in front of values: dim, two spaces in front, 16 cells wide."""
    found = set()
    for line in rows:
        for text, style in line.segs:
            match = LABEL.fullmatch(text)
            if style == "dim" and width_of(text) == 16 and match is not None:
                found.add(match[1])
    return found


def main_rows(width: int = 400) -> list[Row]:
    """The main screen with both tables at full width."""
    state = ConsoleState(snapshot=snapshots.stuck(), events=tuple(snapshots.events()))
    arranged = visible_requests(state)
    size = frame(width, 60, 4, True, len(arranged))._replace(left=width, side=width, streams=True)
    beside = board.right(state, size, 60, snapshots.blocks(state.snapshot), board.Picked("r-0001"))
    ranked = stage_table.rows(rank_snapshots.dead(), width)
    return board.left(state, size, arranged, board.Picked("r-0001")) + beside.rows + ranked


def stage_rows() -> list[Row]:
    """A stage with a GPU that has something to say about everything."""
    picture = snapshots.stuck()
    gpu = GpuInfo(
        uuid="GPU-b", problem="no", throttle=["thermal"], xids=[Xid(code=79, age_ms=9.0)],
        processes=[GpuProcess(pid=1, name="python")],
    )  # fmt: skip
    picture.stages[0] = msgspec.structs.replace(picture.stages[0], gpu=gpu, cordon=CordonInfo(by="eve", since_s=1.0))
    ranked = rank_snapshots.dead()
    return stage_detail.rows(picture, 0, None, 160) + stage_detail.rows(ranked, 1, None, 160)


def request_rows() -> list[Row]:
    info = snapshots.stuck().requests[0]
    found = snapshots.detail(info)
    found = msgspec.structs.replace(
        found,
        why="held",
        host_blocks=[1, 2],
        prompt_token_ids=[1],
        output_token_ids=[2],
        history=["x"],
        bad_words=["king"],
    )
    return drilldown.request_rows(info, found, "", 160) + drilldown.request_rows(info, None, "", 160)


def diagnosis_rows(width: int) -> list[Row]:
    picture = snapshots.stuck()
    return diagnosis.page(picture, diagnosis.Known(fault=snapshots.fault(picture)), width).rows


def streams_rows() -> list[Row]:
    picture = snapshots.stuck()
    picture.engine.checks.ledger = True
    return stream_table.rows(picture, snapshots.findings(), "", 400, known=snapshots.ledger())


RENDERED = {
    "main": main_rows,
    "stage": stage_rows,
    "request": request_rows,
    "diagnosis": lambda: diagnosis_rows(120) + diagnosis_rows(200),
    "streams": streams_rows,
    "topology": lambda: topology_page.rows(topology_of(rank_snapshots.on_cards()), 160),
    "tiers": lambda: tiers_page.rows(test_tiers.picture(), 160),
    "clients": lambda: clients_page.rows([ClientInfo(key="http", route="/v1/completions")], 160),
}


@pytest.mark.parametrize("screen", RENDERED)
def test_the_legend_has_each_header_of_a_screen(screen: str) -> None:
    shown = headers(RENDERED[screen]())
    assert shown and not unknown_words(screen, shown)


def test_a_new_column_without_a_legend_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (*stage_table.COLUMNS[:-1], Column("age", "NEWCOL", 6, 0))
    monkeypatch.setattr(stage_table, "_WIDE_COLUMNS", columns)
    assert unknown_words("main", headers(main_rows())) == {"NEWCOL"}


def test_all_columns_are_rendered_by_these_tests() -> None:
    """At this width no column drops out, so that the test above sees each of them."""
    shown = " ".join(headers(main_rows()))
    assert all(column.title in shown for column in stage_table.COLUMNS)


@pytest.mark.parametrize(("screen", "rows"), [("stage", stage_rows), ("request", request_rows)])
def test_the_legend_has_each_label(screen: str, rows) -> None:
    causes = {"self_stuck", "dead"}
    assert len(labels(rows())) > 10 and labels(rows()) - causes <= terms(screen)


def test_the_legend_has_each_letter_and_glyph() -> None:
    main = terms("main")
    assert {mark.text for mark in (*marks.STAGE.values(), marks.FAULT, *marks.REQUEST.values())} <= main
    assert set(marks.STAGE_WORDS) <= main and marks.CORDONED in main
    assert {glyph for glyph, _ in (*timeline.KINDS.values(), *kvmap.GLYPHS.values(), kvmap.SELECTED)} <= main
    letters = re.findall(r"(?:^|\s)(\S) (?:retired|finished|begun|not begun)", step_table.LEGEND)
    assert len(letters) == 4 and set(letters) <= terms("diagnosis")
    boxes = {char for line in main_rows() for text, style in line.segs if style.startswith("bar.") for char in text}
    assert boxes and boxes <= main


def test_the_legend_has_each_column_of_the_commands() -> None:
    picture = snapshots.stuck()
    record = EngineRecord(
        id="e1", name="opt", epoch="b", pid=1, pid_start=1, state_endpoint="", control_endpoint="", bulk_endpoint="",
        proto=1, model="opt", pipeline_parallel_size=2, run_dir="", started_wall=0.0,
    )  # fmt: skip
    for stage in picture.stages:
        stage.streams[0].on_device = True
    heads = {
        "status": [*render.stage_lines(rank_snapshots.dead().stages)[:1],
                    *render.stage_lines(picture.stages)[:1], *render.request_lines(picture.requests)[:1]],
        "ls": render.engine_lines([(record, "serving")], 0.0)[:1],
        "streams-command": [line for line in (*device_lines(picture), *ledger_lines(snapshots.ledger()))
                            if line.isupper()],
    }  # fmt: skip
    assert len(heads["streams-command"]) == 4
    for screen, lines in heads.items():
        assert not {word for line in lines for word in line.split()} - known_words(screen), screen


@pytest.mark.parametrize("width", [60, 80, 120, 160])
@pytest.mark.parametrize("screen", legend.SCREENS)
def test_the_help_of_a_screen_fits_every_width_and_loses_nothing(screen: str, width: int) -> None:
    made = help_page.page(screen, (("esc", "back", None),), width)
    assert all(width_of(text_of(line).rstrip()) <= width for line in made.rows)
    assert all(made.rows[at].fill == "head" for at in made.headings)
    shown = "".join(text_of(line) for line in made.rows).replace(" ", "")
    for section in legend.SCREENS[screen]:
        for term, meaning in section.rows.items():
            assert term.replace(" ", "") in shown
            if width >= 120:
                assert meaning.replace(" ", "") in shown


@pytest.mark.parametrize("width", [60, 80])
def test_no_row_of_the_help_is_cut(width: int) -> None:
    made = [help_rows(width), *(help_page.page(screen, HELP_KEYS, width).rows for screen in legend.SCREENS)]
    assert not [text_of(line) for rows in made for line in rows if "…" in text_of(line).replace("…412", "", 1)]
    for name in (name for name in dir(key_tables) if name.endswith("_KEYS")):
        table = getattr(key_tables, name)
        for own in table.values() if isinstance(table, dict) else [table]:
            assert "…" not in " ".join(map(text_of, help_page.page("topology", own, width).rows)), name
    keys = " ".join(map(text_of, made[0]))
    assert ":sort ttft" in keys and ":abort" in keys and "--owner" in keys


@pytest.mark.parametrize("kind", Kind)
def test_each_operation_that_a_stage_can_be_in_has_an_entry(kind: Kind) -> None:
    name = wording.SHORT.get(kind.name.lower(), kind.name.lower())
    assert name in legend.OPERATIONS.rows and help_page.find(name)


def test_help_finds_a_name_of_the_legend_on_all_its_screens(cli: Cli) -> None:
    done = cli("help", "I>O")
    assert done.code == 0 and done.out.count("I>O") == 1, "two screens share the entry"
    assert "STAGES  main screen" in done.out and "ppconsole status" in done.out and "steps not begun" in done.out
    assert "stream of the step loop" in cli("help", "main:").out
    assert cli("help", "CONSUMER").out.count("streams") >= 2, "it shares a row with PRODUCER"
    assert "output tokens" in cli("help", "Out").out, "another case, as nothing else has this name"
    done = cli("help", "WHY", "--json")
    assert done.code == 0 and any("why it waits" in rows["WHY"] for rows in json.loads(done.out).values())
    done = cli("help", "I>Q")
    assert done.code == 2 and "I>Q" in done.err and "help columns" in done.err


def test_help_finds_each_badge_and_a_name_with_any_number() -> None:
    for badge in (
        *(word.upper() for word in facts.FAULT_WORDS.values()),
        "FAULT",
        *(state.upper() for state in marks.ENGINE),
    ):
        assert help_page.find(badge.upper()), badge
    for name, meaning in {
        "peak": "output tokens", "healed": "is over", "+1": "in flight", "+2": "in flight", "r0": "revision",
        "m5": "micro-batch", "11-19/240": "rows in view",
    }.items():  # fmt: skip
        assert any(meaning in text for found in help_page.find(name) for text in found.rows.values()), name
    assert not help_page.find("rx")


@pytest.mark.parametrize("screen", legend.SCREENS)
def test_each_name_of_the_legend_is_found(screen: str) -> None:
    for section in legend.SCREENS[screen]:
        for term, meaning in section.rows.items():
            assert any(found.rows.get(term) == meaning for found in help_page.find(term)), term


def test_help_columns_prints_the_legend_without_an_engine(cli: Cli) -> None:
    done = cli("help", "columns")
    assert done.code == 0
    words = " ".join(done.out.split())
    for screen, sections in legend.SCREENS.items():
        assert (f"{screen} screen" in done.out) != (screen in legend.COMMANDS)
        for section in sections:
            assert f"  {section.title}" in done.out
            assert all(" ".join(meaning.split()) in words for meaning in section.rows.values())
    done = cli("help", "columns", "--json")
    assert done.code == 0 and json.loads(done.out)["main"]["STAGES"]["MB"] == "micro-batch in the stage"


def test_help_explains_a_command_and_refuses_another_word(cli: Cli) -> None:
    done = cli("help", "pause")
    assert done.code == 0 and done.out.startswith("Usage: ppconsole pause")
    done = cli("help")
    assert done.code == 0 and "Commands:" in done.out
    done = cli("help", "colums")
    assert done.code == 2 and "colums" in done.err
