"""The request table: one row a request with the reason why it does not run."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.snapshot import Queues, RequestInfo, Snapshot

from ppconsole.model.safe import clean
from ppconsole.model.state import ConsoleState
from ppconsole.model.units import age_text, count_text
from ppconsole.view import figures, wording
from ppconsole.view.cells import FLEX, Cell, Column, Placed, Row, Seg, cut, fit, place, row, spread, table_row, width_of
from ppconsole.view.marks import request_mark
from ppconsole.view.wording import REQUEST as TITLES

UP, DOWN = "▲", "▼"
"""Marks of the sorted column: the smallest first, the largest first."""
COLUMNS = (
    Column("mark", "", 1, 0),
    Column("id", TITLES["id"], 10, 0, grow=8),
    Column("owner", TITLES["owner"], 8, 8, grow=6),
    Column("state", TITLES["state"], 5, 1),
    Column("age", TITLES["age"], 5, 5, ">"),
    Column("in", TITLES["in"], 5, 6, ">"),
    Column("out", TITLES["out"], 5, 2, ">"),
    Column("blocks", TITLES["blocks"], 5, 3, ">"),
    Column("swap", TITLES["swap"], 4, 7, ">"),
    Column("done", "DONE", 4, 9, ">"),
    Column("cached", "HIT", 5, 10, ">"),
    Column("preempted", "PRE", 3, 11, ">"),
    Column("why", TITLES["why"], 23, 4, grow=FLEX),
)
"""Keys that are also keys of `model.state.SortKey` mark the sorted column."""
_WIDE_FROM = 100
_WORD = 8
_WIDE_COLUMNS = tuple(column._replace(width=_WORD) if column.key == "state" else column for column in COLUMNS)
"""With room the state is a whole word."""


def columns(width: int, why_least: int = 0) -> list[Column]:
    """Return the columns to place in `width` cells, WHY with at least `why_least`.

    Those behind it in priority drop out for it.
    """
    found = COLUMNS if width < _WIDE_FROM else _WIDE_COLUMNS
    return [each._replace(width=max(each.width, why_least)) if each.key == "why" else each for each in found]


def is_cut(snapshot: Snapshot, shown: Sequence[RequestInfo], width: int) -> bool:
    """Whether the WHY of one of the requests `shown` does not fit a table of `width`."""
    room = next((each.width for each in place(columns(width), width) if each.column.key == "why"), 0)
    where = wording.locate(snapshot)
    return any(width_of(clean(wording.why(request, where))) > room for request in shown)


def rows(
    state: ConsoleState, arranged: Sequence[RequestInfo], width: int, selected: str | None = None,
    top: int = 0, height: int = 1000, why_least: int = 0,
) -> list[Row]:  # fmt: skip
    """Return the header and the rows `[top, top + height)` of `arranged`. Only visible rows are formatted."""
    placed = place(columns(width, why_least), width)
    lines = [_title(placed, state, arranged)]
    snapshot = state.snapshot
    if not arranged or snapshot is None:
        some = snapshot is not None and bool(snapshot.requests)
        text = "no request matches the filter; / changes it" if some else "no requests; i writes a prompt"
        return [*lines, row((fit(f"  {text}", width), "dim"))]
    where = wording.locate(snapshot)
    for request in arranged[top : top + height]:
        mine = request.id == selected
        cells = _cells(request, where, mine, width >= _WIDE_FROM)
        lines.append(table_row(placed, cells, fill="select" if mine else ""))
    return lines


def _title(placed: Sequence[Placed], state: ConsoleState, arranged: Sequence[RequestInfo]) -> Row:
    """Return the header row: how many there are, the sorted column marked, the filter."""
    segs: list[Seg] = []
    total = state.snapshot.requests_total if state.snapshot else 0
    for each in placed:
        column, mine = each.column, state.sort == each.column.key
        name = column.title
        if column.key == "id":
            name = f"{name} {len(arranged)}/{total}" if len(arranged) != total else f"{name} {total}"
        if column.key == "why" and state.filter:
            name = f"{name}  /{state.filter}"
        if mine:  # always visible: a title without room for it loses its last letter
            name = cut(name, each.width)[: each.width - 1] + (DOWN if state.descending else UP)
        segs.append((fit(name, each.width, column.align), "head.on" if mine else ""))
        segs.append((" ", ""))
    return Row(tuple(segs[:-1]), "head")


def _cells(request: RequestInfo, where: dict[int, int], selected: bool, in_words: bool) -> dict[str, Cell]:
    """Return the cells of one request row. `in_words`: the state as a whole word."""
    mark = request_mark(request.state)
    faint = "dim" if request.state == "finished" else ""
    goal = request.prompt_tokens + request.output_tokens
    done = figures.percent(min(request.computed_tokens, goal), goal) if request.computed_tokens else figures.NOTHING
    waits = request.state in ("waiting", "swapped") and request.why is not None
    return {
        "mark": (">" if selected else " ", "accent"),
        "id": (request.id, faint or "strong"),
        "owner": (request.owner, "dim"),
        "state": (request.state, mark.style) if in_words else mark,
        "age": (age_text(request.age_s), faint),
        "in": (count_text(request.prompt_tokens), faint),
        "out": (count_text(request.output_tokens), faint),
        "blocks": (count_text(request.blocks), faint if request.blocks else "dim"),
        "swap": (count_text(request.swap_blocks), "swap" if request.swap_blocks else "dim"),
        "done": (done, "dim"),
        "cached": (count_text(request.cached_tokens), "dim"),
        "preempted": (count_text(request.preemptions), "warn" if request.preemptions else "dim"),
        "why": (wording.why(request, where), "warn" if waits else faint),
    }


def pool(snapshot: Snapshot, width: int) -> Row:
    """Return the pool line: blocks that are cached and free, requests by state, micro-batches in flight."""
    kv = [stage.kv_blocks for stage in snapshot.stages]
    cached = [each.cached for each in kv if each.cached is not None]
    free = [each.free for each in kv if each.free is not None]
    segs: list[Seg] = [("POOL ", "head.word"), ("cached ", "dim"), (count_text(min(cached, default=None)), "")]
    segs += [(" free ", "dim"), (count_text(min(free, default=None)), "")]
    segs += [(" │", "dim")]
    for name, number in _queues(snapshot.queues):
        mark = request_mark(name)
        segs += [(f" {mark.text} ", "dim"), (count_text(number), mark.style if number else "dim")]
    flying = [number for stage in snapshot.stages for number in stage.micro_batches]
    names = figures.micro_batches(flying) or figures.NOTHING
    segs += [(" │", "dim"), (" fly ", "dim"), (names, "")]
    extra: list[Seg] = []
    if snapshot.preemptions_total:
        extra = [("preempted ", "dim"), (count_text(snapshot.preemptions_total), "warn")]
    used = sum(len(text) for text, _ in segs)
    if used > width:
        segs[-1] = (cut(names, max(1, width - used + len(names))), "")
    return spread(segs, extra, width)


def _queues(queues: Queues) -> list[tuple[str, int]]:
    """Return the queues in the order of the pool line."""
    return [
        ("waiting", queues.waiting), ("running", queues.running), ("swapped", queues.swapped),
        ("held", queues.held), ("loading", queues.loading),
    ]  # fmt: skip
