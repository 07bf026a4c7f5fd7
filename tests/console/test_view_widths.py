"""Rows that fit every width without losing a figure, a name or the end of a text."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest
import snapshots
from ppconsole.link.incident_source import Listed
from ppconsole.view import banner, completion, events, incident_table
from ppconsole.view.cells import Row, text_of, width_of
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.snapshot import Event, IncidentInfo


def texts(rows: list[Row]) -> list[str]:
    return [text_of(line) for line in rows]


def listed_as(name: str, info: IncidentInfo) -> Listed:
    return Listed(name, cast(EngineRecord, None), info, Path())


def test_incidents_give_the_fault_its_room_and_keep_the_author() -> None:
    now = 1_700_000_000.0
    info = IncidentInfo(
        number=7, wall=now - 60, stage=2, cause="stopped", summary="stage 2 is stopped by a signal", by="alice",
        over_wall=now - 50, ended="healed",
    )  # fmt: skip
    listed = [listed_as("7", info)]
    for width in (60, 80, 120):
        head, line = texts(incident_table.rows(listed, "7", now, width))
        assert width_of(line) <= width and "alice" in line and " BY " in head
        assert ("stage 2 is stopped by a signal" in line) == (width >= 80)
    long = msgspec.structs.replace(info, cause="self_stuck", by="nightly-batch", summary="x" * 90)
    _, line = texts(incident_table.rows([listed_as("opt-2/17", long)], "7", now, 80))
    assert width_of(line) <= 80 and "opt-2/17" in line


def test_an_empty_list_says_where_an_incident_that_the_engine_reports_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    newest = IncidentInfo(number=7, wall=1.7e9, stage=2, cause="stopped", summary="stage 2 is stopped by a signal")
    assert texts(incident_table.none_kept(None)) == ["  no incident was kept"]
    assert texts(incident_table.none_kept(newest)) == [
        f"  incident 7 of this engine is not in {tmp_path}/ppconsole",
        "  it may have been started with another XDG_STATE_HOME",
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_an_event_is_shown_in_full_at_every_width(width: int) -> None:
    text = "the first of many words that go on and on, " * 4 + "and the last one"
    event = Event(seq=17, wall=1.7e9, kind="verdict.raised", text=text, by="alice", step=18410)
    lines = texts(events.event_rows(event, width))
    assert len(lines) > 1 and all(width_of(line) <= width for line in lines)
    joined = " ".join(" ".join(lines).split())
    assert " ".join(f"alice {text} step 18410".split()) in joined and "…" not in joined
    assert all(line.startswith(" " * 11) for line in lines[1:])
    short = msgspec.structs.replace(event, text="short", step=None)
    assert texts(events.event_rows(short, width)) == texts([events.event_row(short, width, full=True)])


def test_candidates_of_a_verb_show_its_options_after_the_ids() -> None:
    picture = snapshots.snapshot(4, 40)
    found = tuple(completion.complete("abort ", picture, ()))
    assert found[0].split()[1].startswith("r-") and found[-1] == "abort --filter"
    for at in (-1, 0, 30):
        line = text_of(completion.candidates_row(completion.Completion("abort ", found, at), 80))
        assert width_of(line) <= 80 and "--owner --older --state --filter" in line
        assert at < 0 or found[at].split()[1] in line
    only = completion.complete("abort --", picture, ())
    assert only[0].startswith("abort --") and not any("r-" in line for line in only)


def test_a_narrow_banner_drops_whole_figures_since_the_mark() -> None:
    figures = (" tok/s+89.1", " wait+0", " kv+2048")
    position = (("REPLAY 14:48:20 3/60 min paused", "info"), (" vs 14:47:59", "warn"), *((f, "warn") for f in figures))
    seen = []
    for width in range(40, 161):
        link = banner.Link("REPLAY", position=position)
        line = text_of(banner.banner(snapshots.snapshot(4, 8), link, width))
        shown = [figure for figure in figures if f"{figure} " in line]
        assert shown == list(figures[: len(shown)])
        assert all(figure in line or figure[:4] not in line for figure in figures), "no part of a figure is left"
        seen.append(len(shown))
    assert seen == sorted(seen) and {0, 1, 2, 3} <= set(seen)
