"""The table of requests that have ended, and the line above it."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.finished import FinishedInfo, ending_text
from ppengine.protocol.inspection import FinishedDetail
from ppengine.protocol.snapshot import Snapshot

from ppconsole.model.endings import record_limits
from ppconsole.model.sorting import Order
from ppconsole.model.units import age_text, count_text
from ppconsole.view import figures
from ppconsole.view.cells import (
    FLEX,
    Cell,
    Column,
    Row,
    Seg,
    fit,
    id_text,
    place,
    row,
    sorted_header,
    spread,
    table_row,
    width_of,
)
from ppconsole.view.request_table import latency_segs
from ppconsole.view.wording import FINISHED as TITLES

Key = tuple[str, float]
"""Id and end of a request: a later one may have the same id."""
COLUMNS = (
    Column("mark", "", 1, 0),
    Column("id", TITLES["id"], 10, 0, grow=8),
    Column("owner", TITLES["owner"], 8, 8, grow=6),
    Column("ended", TITLES["ended"], 6, 1, ">"),
    Column("took", TITLES["took"], 5, 7, ">"),
    Column("in", TITLES["in"], 5, 6, ">"),
    Column("out", TITLES["out"], 5, 5, ">"),
    Column("queue", TITLES["queue"], 6, 4, ">"),
    Column("ttft", TITLES["ttft"], 5, 2, ">"),
    Column("itl", TITLES["itl"], 5, 3, ">"),
    Column("itl99", TITLES["itl99"], 5, 10, ">"),
    Column("pre", TITLES["pre"], 4, 9, ">"),
    Column("reason", TITLES["reason"], 7, 1, grow=FLEX),
)
"""Their keys are names of fields (`model.request_fields`), by which they sort."""
_USUAL = ("stop", "length")


def key_of(request: FinishedInfo) -> Key:
    """Return the key of a request for the cursor."""
    return request.id, request.wall


def rows(
    arranged: Sequence[FinishedInfo], order: Order, selected: Key | None, width: int, top: int, height: int
) -> list[Row]:
    """Return the header and the rows `[top, top + height)` of `arranged`. Only visible rows are formatted."""
    placed = place(COLUMNS, width)
    lines = [sorted_header(placed, *order, {})]
    id_width = next(each.width for each in placed if each.column.key == "id")
    for request in arranged[top : top + height]:
        mine = key_of(request) == selected
        cells = _cells(request, id_text(request.id, id_width), mine)
        lines.append(table_row(placed, cells, fill="select" if mine else ""))
    return lines


def _cells(request: FinishedInfo, name: str, selected: bool) -> dict[str, Cell]:
    return {
        "mark": (">" if selected else " ", "accent"),
        "id": (name, "strong"),
        "owner": (request.owner, "dim"),
        "ended": (age_text(request.ended_s), ""),
        "took": (age_text(request.took_s), ""),
        "in": (count_text(request.prompt_tokens), ""),
        "out": (count_text(request.output_tokens), ""),
        "queue": (figures.latency(request.queue_s), ""),
        "ttft": (figures.latency(request.ttft_s), ""),
        "itl": (figures.latency_ms(request.itl_ms), ""),
        "itl99": (figures.latency_ms(request.itl_p99_ms), ""),
        "pre": (count_text(request.preemptions), "warn" if request.preemptions else "dim"),
        "reason": (ending_text(request.reason, None, request.by), "" if request.reason in _USUAL else "warn"),
    }


def summary(known: FinishedDetail | None, snapshot: Snapshot | None, place_text: str, problem: str, width: int) -> Row:
    """Return the line above the table: a problem, the limits of a record, or the quantiles of all requests.

    `place_text`: the rows that are in view.
    """
    right: list[Seg] = [(f"{place_text} ", "dim")] if place_text else []
    room = width - 3 - sum(width_of(text) for text, _ in right)
    limits = "" if known is None else record_limits(known)
    if problem:
        return spread([(fit(f"  {problem}", room), "warn")], right, width)
    if limits:
        return spread([(f"  {limits}", "warn")], right, width)
    times = latency_segs(snapshot.latency, room) if snapshot is not None else []
    return spread([("  ", ""), *times], right, width)


def nothing(known: FinishedDetail | None, problem: str, width: int) -> Row:
    """Return the row in place of an empty table."""
    if known is None:
        text = "the list is not known" if problem else "asking for the list…"
    elif known.requests:
        text = "no request matches the filter; / changes it"
    else:
        text = "no request has ended"
    return row((fit(f"  {text}", width), "dim"))
