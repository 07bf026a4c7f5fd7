"""The list of engines to choose from, as rows."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.discovery import EngineRecord

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


def matching(engines: Sequence[tuple[EngineRecord, str]], text: str) -> list[tuple[EngineRecord, str]]:
    """Return the engines with every word of `text` in name, id or model; those whose name begins with it are first."""
    wanted = text.casefold()
    found = [
        each
        for each in engines
        if all(word in f"{each[0].name} {each[0].id} {each[0].model}".casefold() for word in wanted.split())
    ]
    return sorted(found, key=lambda each: not each[0].name.casefold().startswith(wanted))


def rows(
    engines: Sequence[tuple[EngineRecord, str]], selected: str | None, present: str, width: int, now: float
) -> list[Row]:
    """Return the header and one row an engine. `present`: id of the engine that the console is attached to."""
    placed = place(COLUMNS, width)
    lines = [header(placed)]
    for record, state in engines:
        mine = record.id == selected
        cells: dict[str, Seg] = {
            "mark": (">" if mine else " ", "accent"),
            "name": (f"{record.name}{' (here)' if record.id == present else ''}", "strong"),
            "state": (state, _style(state)),
            "model": (clean(record.model), ""),
            "stages": (f"{record.pipeline_parallel_size}", ""),
            "up": (age_text(max(0.0, now - record.started_wall)), "dim"),
            "id": (record.id, "dim"),
        }
        lines.append(table_row(placed, cells, fill="select" if mine else ""))
    return lines


def nothing(known: bool, wanted: str, width: int) -> Row:
    """Return the row for a list without engines."""
    text = f"no engine matches {wanted!r}; Esc clears it" if wanted else "no engine runs here: ppconsole serve PROFILE"
    return row((fit(f"  {text if known else 'looking for engines…'}", width), "dim"))


def _style(state: str) -> str:
    return ENGINE.get(state, "dim").removeprefix("chip.")
