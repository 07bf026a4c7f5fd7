"""The list of engines to choose from, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ppengine.protocol.discovery import EndedEngine, EngineRecord

from ppconsole.model.endings import clock_text
from ppconsole.model.facts import FAULT_WORDS
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text
from ppconsole.view.cells import FLEX, Column, Row, Seg, fit, header, place, row, table_row
from ppconsole.view.marks import ENGINE

COLUMNS = (
    Column("mark", "", 1, 0),
    Column("name", "NAME", 12, 0, grow=12),
    Column("state", "STATE", 9, 1),
    Column("model", "MODEL", 12, 2, grow=FLEX),
    Column("stages", "STAGES", 6, 3, ">"),
    Column("up", "UP", 5, 4, ">"),
    Column("id", "ID", 8, 5),
)


ENDED_COLUMNS = (
    Column("mark", "", 1, 0),
    Column("name", "NAME", 14, 0),
    Column("ended", "ENDED", 12, 1),
    Column("how", "HOW", 16, 2, grow=FLEX),
    Column("ran", "RAN", 5, 4, ">"),
    Column("id", "ID", 8, 3),
)


class Line(NamedTuple):
    """One row of the list. `id`: the engine that it selects; None: it is a header or a note."""

    id: str | None
    row: Row


def _matches(record: EngineRecord, text: str) -> bool:
    """Return whether every word of `text` is in name, id or model."""
    return all(word in f"{record.name} {record.id} {record.model}".casefold() for word in text.casefold().split())


def matching(engines: Sequence[tuple[EngineRecord, str]], text: str) -> list[tuple[EngineRecord, str]]:
    """Return the engines with every word of `text` in name, id or model; those whose name begins with it are first."""
    found = [each for each in engines if _matches(each[0], text)]
    return sorted(found, key=lambda each: not each[0].name.casefold().startswith(text.casefold()))


def matching_ended(engines: Sequence[EndedEngine], text: str) -> list[EndedEngine]:
    """Return the ended engines that match, the newest first."""
    return [one for one in engines if _matches(one.record, text)]


def head(width: int) -> Row:
    """Return the header of the engines that run."""
    return header(place(COLUMNS, width))


def live_lines(
    engines: Sequence[tuple[EngineRecord, str]], selected: str | None, present: str, width: int, now: float
) -> list[Line]:
    """Return one row an engine. `present`: id of the engine that the console is attached to."""
    placed = place(COLUMNS, width)
    lines = []
    for record, state in engines:
        mine = record.id == selected
        cells: dict[str, Seg] = {
            "mark": (">" if mine else " ", "accent"),
            "name": (_name(record, present), "strong"),
            "state": (state, _style(state)),
            "model": (clean(record.model), ""),
            "stages": (f"{record.pipeline_parallel_size}", ""),
            "up": (age_text(max(0.0, now - record.started_wall)), "dim"),
            "id": (record.id, "dim"),
        }
        lines.append(Line(record.id, table_row(placed, cells, fill="select" if mine else "")))
    return lines


def ended_lines(
    engines: Sequence[EndedEngine], selected: str | None, present: str, width: int, now: float
) -> list[Line]:
    """Return a header and one dim row an ended engine: when and how it ended. Nothing without any."""
    placed = place(ENDED_COLUMNS, width)
    lines = [Line(None, header(placed))] if engines else []
    for record, end, _ in engines:
        mine = record.id == selected
        cells: dict[str, Seg] = {
            "mark": (">" if mine else " ", "accent"),
            "name": (_name(record, present), "dim"),
            "ended": (clock_text(end.wall, now), "dim"),
            "how": (clean(end.reason), "dim"),
            "ran": (age_text(end.wall - record.started_wall), "dim"),
            "id": (record.id, "dim"),
        }
        lines.append(Line(record.id, table_row(placed, cells, fill="select" if mine else "")))
    return lines


def nothing(known: bool, wanted: str, width: int) -> Row:
    """Return the row for a list without engines."""
    text = f"no engine matches {wanted!r}; Esc clears it" if wanted else "no engine runs here: ppconsole serve PROFILE"
    return row((fit(f"  {text if known else 'looking for engines…'}", width), "dim"))


def _name(record: EngineRecord, present: str) -> str:
    return f"{record.name}{' (here)' if record.id == present else ''}"


def _style(state: str) -> str:
    faulty = state in (*FAULT_WORDS.values(), "fault")
    return "bad" if faulty else ENGINE.get(state, "dim").removeprefix("chip.")
