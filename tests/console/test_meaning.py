"""`?` explains the selected row first, and names the colours of the theme."""

from __future__ import annotations

import msgspec
import pytest
import rank_snapshots
import snapshots
from ppconsole.model.state import ConsoleState
from ppconsole.screens.detail_screens import HelpScreen
from ppconsole.view import colours, help_page, legend, marks, meaning, request_table, wording
from ppconsole.view.cells import text_of
from ppconsole.widgets.theme import PALETTES
from ppengine.protocol.operation_kinds import Kind
from ppengine.protocol.snapshot import Why
from ppengine.protocol.stage_info import CordonInfo
from test_tui_console import console


def words(section: legend.Section) -> str:
    return " ".join(f"{term} {text}" for term, text in section.rows.items())


@pytest.mark.parametrize("state", marks.REQUEST)
def test_a_request_has_its_state_in_words(state: str) -> None:
    picture = snapshots.snapshot(4, 8)
    request = msgspec.structs.replace(picture.requests[0], state=state)
    found = meaning.of_request(picture, request)
    letter = marks.request_mark(state).text
    assert next(iter(found.rows)) == letter
    assert found.rows[letter] == legend.REQUEST_STATES.rows[letter]


def test_why_is_repeated_and_explained() -> None:
    picture = snapshots.snapshot(4, 8)
    why = Why(code="blocks", need=121, have=100, text="need 121, have 100")
    waiting = msgspec.structs.replace(picture.requests[0], state="waiting", why=why)
    text = meaning.of_request(picture, waiting).rows["WHY"]
    assert "need 121, have 100" in text and "KV blocks are missing" in text
    newer = msgspec.structs.replace(waiting, why=Why(code="moonphase", text="wait"))
    assert "moonphase" in meaning.of_request(picture, newer).rows["WHY"]


def test_why_of_a_step_in_flight_names_the_micro_batch_as_the_pool_line_does_and_its_stage() -> None:
    picture = snapshots.snapshot(4, 8)
    why = Why(code="in_flight", need=2, text="m11256 m11257 in flight")
    request = msgspec.structs.replace(picture.requests[0], why=why, in_flight=[11256, 11257])
    picture.stages[2].micro_batches = [11256]
    assert wording.why(request, wording.locate(picture)) == "m11256 at stage 2 +1"
    assert "+1 is one more" in meaning.of_request(picture, request).rows["WHY"]
    assert wording.why(request, {}) == "m11256 in flight +1", "no stage has it yet"
    picture.stages[2].micro_batches = [11256, 11257]
    assert "m11256-57" in text_of(request_table.pool(picture, 160))
    fenced = msgspec.structs.replace(request, why=Why(code="fenced", text="eve waits for m11256 m11257"))
    assert wording.why(fenced, {}) == "eve waits for m11256 m11257"


def test_why_of_a_step_in_flight_names_the_stage_that_is_stuck() -> None:
    """It is the reason of all of them, wherever their micro-batch is."""
    picture = rank_snapshots.dead()
    picture.requests = [snapshots.request(0), snapshots.request(1)]
    flying, waiting = picture.requests
    flying.state, flying.why, flying.in_flight = "running", None, [18411]
    waiting.state, waiting.in_flight, waiting.why = "waiting", [], Why(code="blocks", text="need 121, have 100")
    rows = [text_of(line) for line in request_table.rows(ConsoleState(snapshot=picture), picture.requests, 80)]
    assert rows[1].endswith("stage 1.1 dead m18411  ") and "need 121, have 100" in rows[2]
    assert (
        "stage 1.1 dead m18411: its step is in the pipeline, which this fault stops"
        in meaning.of_request(picture, flying).rows["WHY"]
    )
    for verdict in picture.verdicts:
        verdict.cause, verdict.root = "straggler", True
    assert wording.stuck_at(picture) == "", "steps go on"
    picture.verdicts[0].cause, picture.verdicts[0].stage = "core", None
    assert wording.stuck_at(picture) == "core stuck"
    picture.engine.state, picture.engine.message = (
        "degraded",
        "the engine core (pid 7) ended, killed by SIGKILL, and is restarted",
    )
    assert wording.stuck_at(picture) == "core ended", "a killed core is not stuck: its successor comes"


def test_a_stage_has_state_operation_verdict_wait_and_cordon_in_words() -> None:
    picture = snapshots.stuck()
    root = next(verdict for verdict in picture.verdicts if verdict.root)
    stage = next(stage for stage in picture.stages if stage.index == root.stage)
    stage.cordon = CordonInfo(by="eve", since_s=1.0)
    found = meaning.of_stage(picture, stage)
    letter = marks.stage_mark(stage, marks.faulty_places(picture)).text
    assert next(iter(found.rows.items())) == (letter, legend.STAGE_STATES.rows[letter])
    assert root.summary in found.rows["!"] and "eve" in found.rows[marks.CORDONED]
    receiving = snapshots.stage(1)
    text = meaning.of_stage(picture, receiving).rows["STREAM:OP"]
    assert wording.operation(receiving) in text and legend.OPERATIONS.rows["recv"] in text
    assert "open for 4ms" in text
    assert "stage 0 (receive)" in meaning.of_stage(picture, receiving).rows["waits for"]


def test_each_operation_of_a_stage_has_words() -> None:
    shown = {kind.name.lower() for kind in Kind} - {"step", "on_device"}  # these are records, no open operation
    assert {wording.SHORT.get(kind, kind) for kind in shown} <= set(legend.OPERATIONS.rows)


@pytest.mark.parametrize("theme", PALETTES)
def test_colours_have_their_names_in_each_theme(theme: str) -> None:
    found = colours.section(theme)
    palette = PALETTES[theme]
    assert set(colours.NAMES) == set(PALETTES)
    looks = {term: palette.style(style) for term, style in found.styles.items()}
    assert set(looks) == set(found.rows) and len({str(look) for look in looks.values()}) == len(looks)
    names = colours.NAMES[theme]
    assert all(palette.style(style) == looks[name] for style, name in names.items())


def test_help_columns_names_the_colours() -> None:
    lines = list(help_page.text())
    assert all(any(colours.section(theme).title in line for line in lines) for theme in PALETTES)


async def test_the_help_begins_with_the_selected_row_and_keeps_up_with_it() -> None:
    async with console(size=(80, 24)) as rig:
        rig.app.main.selection.requests.choose("r-0003")
        await rig.pilot.press("question_mark")
        await rig.until(lambda: isinstance(rig.app.screen, HelpScreen))
        first = rig.board("reader-body").splitlines()
        assert "SELECTED  request r-0003" in first[0] and "wait" in first[1]
        rig.source.picture.requests[3].state = "finished"
        rig.source.send(rig.source.picture)
        rig.app.tick()
        assert "finished" in rig.board("reader-body").splitlines()[1]
        await rig.pilot.press("escape", "tab", "down", "question_mark")
        await rig.until(lambda: "SELECTED  stage 1" in rig.board("reader-body"))
        assert "receiving: takes hidden states" in rig.board("reader-body").splitlines()[1]
        await rig.pilot.press("escape", "enter", "question_mark")
        await rig.until(lambda: "HELP: STAGE" in rig.board("reader-title"))
        assert "SELECTED  stage 1" in rig.board("reader-body").splitlines()[0]


def test_a_page_without_a_selection_begins_as_before() -> None:
    made = help_page.page("main", (), 80)
    assert "MOVE" in text_of(made.rows[0])
    assert meaning.of_selection(snapshots.snapshot(4, 2), None, None) == []


def test_a_selection_that_has_ended_says_so() -> None:
    picture = snapshots.snapshot(4, 2)
    for gone in (meaning.of_selection(picture, "r-gone", None), meaning.of_selection(picture, None, 99)):
        assert len(gone) == 1 and words(gone[0]) == "- not in the table any more"
