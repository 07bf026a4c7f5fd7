"""Incidents as rows, and the badge of the newest one."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.kept_files import state_dir
from ppengine.protocol.snapshot import IncidentInfo, Snapshot

from ppconsole.link.incident_source import Listed
from ppconsole.model.endings import clock_text, duration, outcome, where
from ppconsole.model.safe import clean
from ppconsole.model.units import wall_text
from ppconsole.view.cells import FLEX, Column, Row, Seg, header, place, row, table_row, width_of

BADGE_S = 3600.0
_COLUMNS = (
    Column("id", "ID", 9, 0),
    Column("begin", "BEGIN", 12, 0),
    Column("lasted", "LASTED", 6, 4, ">"),
    Column("stage", "STG", 4, 1),
    Column("cause", "CAUSE", 12, 1),
    Column("by", "BY", 8, 2),
    Column("summary", "FAULT", 14, 3, grow=FLEX),
    Column("end", "END", 16, 5, grow=14),
)
"""The widths are the largest; a column is as wide as its longest cell."""
_FAULT_WIDE, _WIDE_FROM = 30, 78


def _columns(cells: Sequence[dict[str, Seg]], width: int) -> list[Column]:
    """Return the columns, each as wide as its cells need; FAULT takes the rest."""
    found = []
    for column in _COLUMNS:
        size = max(len(column.title), *(width_of(each[column.key][0]) for each in cells))
        if column.grow == FLEX:
            size = most = _FAULT_WIDE if width >= _WIDE_FROM else column.width
        else:
            most = column.width
        found.append(column._replace(width=min(size, most)))
    return found


def none_kept(newest: IncidentInfo | None) -> list[Row]:
    """Return the row of an empty list. `newest`: the incident that the engine itself reports as its newest."""
    if newest is None:
        return [row(("  no incident was kept", "dim"))]
    text = f"incident {newest.number} of this engine is not in {state_dir()}"
    return [row((f"  {text}", "warn")), row(("  it may have been started with another XDG_STATE_HOME", "dim"))]


def rows(incidents: Sequence[Listed], chosen: str | None, now: float, width: int) -> list[Row]:
    """Return one row an incident under a head, the newest first. `chosen`: id of the selected one."""
    shown = [_cells(one, now) for one in incidents]
    placed = place(_columns(shown, width - 2), width - 2)
    lines = [Row((("  ", ""), *header(placed).segs), fill="head")]
    for one, cells in zip(incidents, shown, strict=True):
        body = table_row(placed, cells)
        mark = "> " if one.id == chosen else "  "
        lines.append(Row(((mark, "key"), *body.segs), "select" if one.id == chosen else ""))
    return lines


def _cells(one: Listed, now: float) -> dict[str, Seg]:
    info = one.info
    lasts = info.over_wall is None
    return {
        "id": (one.id, "strong"),
        "begin": (clock_text(info.wall, now), ""),
        "lasted": (duration(info, now), "bad" if lasts else ""),
        "stage": (where(info), ""),
        "cause": (info.cause, "warn"),
        "by": (clean(info.by) or "-", "dim"),
        "summary": (clean(info.summary), ""),
        "end": (clean(info.ended) or "it lasts", "bad" if lasts else "dim"),
    }


def badge(snapshot: Snapshot, room: int) -> str:
    """Return `last fault 02:34, healed in 1.9s` for an hour after it, in as much of its words as fit; else nothing."""
    info = snapshot.incident
    if info is None or info.over_wall is None or snapshot.sampled_at - info.over_wall > BADGE_S:
        return ""
    when = wall_text(info.wall, "%H:%M")
    forms = (f"last fault {when}, {_healed(info)} (I)", f"last fault {when}, {_healed(info)}", f"last fault {when}")
    return next((form for form in forms if len(form) <= room), "")


def _healed(info: IncidentInfo) -> str:
    return outcome(info, info.wall)
