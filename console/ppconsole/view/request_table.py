"""The request table: one row a request with the reason why it does not run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ppengine.protocol.snapshot import Latency, Queues, RequestInfo, SloInfo, Snapshot

from ppconsole.model.facts import may_submit
from ppconsole.model.safe import clean
from ppconsole.model.sorting import BY_ARRIVAL, Order
from ppconsole.model.state import ConsoleState
from ppconsole.model.units import age_text, count_text
from ppconsole.view import figures, wording
from ppconsole.view.cells import (
    DOWN,
    FLEX,
    UP,
    Cell,
    Column,
    Placed,
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
from ppconsole.view.marks import request_mark
from ppconsole.view.wording import FINISHED
from ppconsole.view.wording import REQUEST as TITLES

CURSOR = {(False, False): " ", (True, False): ">", (False, True): "*", (True, True): "»"}
"""Sign in front of a row by whether it is selected, and whether it is marked."""
COLUMNS = (
    Column("mark", "", 1, 0),
    Column("id", TITLES["id"], 10, 0, grow=8),
    Column("owner", TITLES["owner"], 8, 8, grow=6),
    Column("state", TITLES["state"], 5, 1),
    Column("age", TITLES["age"], 5, 5, ">"),
    Column("in", TITLES["in"], 5, 6, ">"),
    Column("out", TITLES["out"], 5, 2, ">"),
    Column("blk", TITLES["blk"], 5, 3, ">"),
    Column("swp", TITLES["swp"], 4, 7, ">"),
    Column("queue", FINISHED["queue"], 5, 13, ">"),
    Column("ttft", FINISHED["ttft"], 5, 9, ">"),
    Column("itl", FINISHED["itl"], 5, 10, ">"),
    Column("itl99", FINISHED["itl99"], 5, 11, ">"),
    Column("fill", "FILL", 4, 12, ">"),
    Column("hit", "HIT", 5, 15, ">"),
    Column("pre", FINISHED["pre"], 3, 14, ">"),
    Column("why", TITLES["why"], 23, 4, grow=FLEX),
)
"""Their keys are names of fields (`model.request_fields`), by which they sort."""
_WIDE_FROM = 100
_QUANTILES = "p50 p90 p99 "
_WORD = 8
_WORDS = re.compile(r"[\w-]+")
_ID_IN_WHY = 7
"""Cells of another request's id in a reason."""
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
    whys = _whys(snapshot)
    waits = (request for request in shown if request.state != "finished")  # a row of those goes after some seconds
    return any(width_of(clean(whys(request))) > room for request in waits)


def _whys(snapshot: Snapshot) -> Callable[[RequestInfo], str]:
    """Return a function for the reason of a row; another request in it by the end of its id, as in their column."""
    where, stuck = wording.locate(snapshot), wording.stuck_at(snapshot)
    return lambda request: _WORDS.sub(lambda found: id_text(found[0], _ID_IN_WHY), wording.why(request, where, stuck))


def rows(
    state: ConsoleState, arranged: Sequence[RequestInfo], width: int, selected: str | None = None,
    top: int = 0, height: int = 1000, why_least: int = 0, marked: frozenset[str] = frozenset(),
) -> list[Row]:  # fmt: skip
    """Return the header and the rows `[top, top + height)` of `arranged`. Only visible rows are formatted."""
    placed = place(columns(width, why_least), width)
    last = min(top + height, len(arranged))
    in_view = f"{top + 1}-{last}/{len(arranged)}" if last - top < len(arranged) else ""
    lines = [_title(placed, state, arranged, len(marked), in_view)]
    snapshot = state.snapshot
    if not arranged or snapshot is None:
        some = snapshot is not None and bool(snapshot.requests)
        text = "no request matches the filter; / changes it" if some else "no requests"
        if not some and may_submit(state):
            text += "; i writes a prompt"
        return [*lines, row((fit(f"  {text}", width), "dim"))]
    whys = _whys(snapshot)
    id_width = next(each.width for each in placed if each.column.key == "id")
    for request in arranged[top : top + height]:
        mine = request.id == selected
        sign = CURSOR[mine, request.id in marked]
        name = id_text(request.id, id_width)
        cells = _cells(request, name, whys(request), sign, width >= _WIDE_FROM, snapshot.latency.slo)
        lines.append(table_row(placed, cells, fill="select" if mine else ""))
    return lines


def _title(
    placed: Sequence[Placed], state: ConsoleState, arranged: Sequence[RequestInfo], marked: int, in_view: str
) -> Row:
    """Return the header row: how many there are, the sorted column, how many are `marked`, the filter.

    `in_view`: the rows in view, of all rows; empty if all are. They yield to marks and filter.
    """
    total = state.snapshot.requests_total if state.snapshot else 0
    live = sum(request.state != "finished" for request in arranged)
    shown = f"{live}/{total}" if live != total else f"{total}"
    marks, wanted = f"{marked} marked" if marked else "", f"/{state.filter}" if state.filter else ""
    why = [TITLES["why"], marks, hidden_sort(placed, state.order), wanted]
    text = "  ".join(part for part in why if part)
    room = next((each.width for each in placed if each.column.key == "why"), 0) - (state.order.column == "why")
    if in_view and width_of(text) + 2 + len(in_view) <= room:
        text += f"  {in_view}"
    titles = {"id": f"{TITLES['id']} {shown}", "why": text}
    return sorted_header(placed, *state.order, titles)


def hidden_sort(placed: Sequence[Placed], order: Order) -> str:
    """Return the sorted column, if no column of the table shows it; otherwise nothing."""
    column, descending = order
    if any(each.column.key == column for each in placed) or order == BY_ARRIVAL:
        return ""
    return f"{column.upper()}{DOWN if descending else UP}"


def late(slo: SloInfo | None, ttft_s: float | None, itl_ms: float | None) -> tuple[bool, bool]:
    """Return whether a request misses the objective of the first token, and that of the time between tokens."""
    slo = slo or SloInfo()
    late = ttft_s is not None and slo.ttft_ms is not None and ttft_s * 1e3 > slo.ttft_ms
    return late, itl_ms is not None and slo.itl_ms is not None and itl_ms > slo.itl_ms


def _cells(
    request: RequestInfo, name: str, why: str, sign: str, in_words: bool, slo: SloInfo | None
) -> dict[str, Cell]:
    """Return the cells of one request row.

    `name`: its id as it fits. `sign`: of `CURSOR`. `in_words`: the state as a whole word.
    """
    first_late, slow = late(slo, request.ttft_s, request.itl_ms)
    mark = request_mark(request.state)
    faint = "dim" if request.state == "finished" else ""
    goal = request.prompt_tokens + request.output_tokens
    fill = figures.percent(min(request.computed_tokens, goal), goal) if request.computed_tokens else figures.NOTHING
    waits = request.state in ("waiting", "swapped") and request.why is not None
    return {
        "mark": (sign, "accent"),
        "id": (name, faint or "strong"),
        "owner": (request.owner, "dim"),
        "state": (request.state, mark.style) if in_words else mark,
        "age": (age_text(request.age_s), faint),
        "in": (count_text(request.prompt_tokens), faint),
        "out": (count_text(request.output_tokens), faint),
        "blk": (count_text(request.blocks), faint if request.blocks else "dim"),
        "swp": (count_text(request.swap_blocks), "swap" if request.swap_blocks else "dim"),
        "fill": (fill, "dim"),
        "queue": (figures.latency(request.queue_s), faint),
        "ttft": (figures.latency(request.ttft_s), "warn" if first_late else faint),
        "itl": (figures.latency_ms(request.itl_ms), "warn" if slow else faint),
        "itl99": (figures.latency_ms(request.itl_p99_ms), faint),
        "hit": (count_text(request.cached_tokens), "dim"),
        "pre": (count_text(request.preemptions), "warn" if request.preemptions else "dim"),
        "why": (why, "warn" if waits else faint),
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
    segs += [(" │", "dim"), (" fly ", "dim")]
    room = max(1, width - sum(len(text) for text, _ in segs))
    segs.append((figures.micro_batches(wording.flying(snapshot), room) or figures.NOTHING, ""))
    extra: list[Seg] = []
    if snapshot.preemptions_total:
        extra = [("preempted ", "dim"), (count_text(snapshot.preemptions_total), "warn")]
    used = sum(len(text) for text, _ in segs)
    room = width - used - sum(len(text) for text, _ in extra) - 3
    if times := latency_segs(snapshot.latency, room):
        extra = [*times, *([("  ", ""), *extra] if extra else [])]
    return spread(segs, extra, width)


def latency_segs(latency: Latency, room: int) -> list[Seg]:
    """Return the quantiles of all requests, as many as `room` cells have; nothing while there are none."""
    known = [
        (title, figures.quantiles(found, scale))
        for title, found, scale in (
            (FINISHED["ttft"], latency.ttft_s, 1e3), (FINISHED["itl"], latency.itl_ms, 1.0),
            (FINISHED["queue"], latency.queue_s, 1e3),
        )
        if found.count
    ]  # fmt: skip
    for most, head in ((3, _QUANTILES), (2, _QUANTILES), (1, _QUANTILES), (1, "")):
        texts = [f"{title} {' '.join(values)}" for title, values in known[:most]]
        if known and len(f"{head}{' '.join(texts)}") <= room:
            return [(head, "dim"), (" ".join(texts), "")]
    p99 = f"{known[0][0]} p99 {known[0][1][2]}" if known else ""
    return [(p99, "")] if p99 and len(p99) <= room else []


def _queues(queues: Queues) -> list[tuple[str, int]]:
    """Return the queues in the order of the pool line; those that wait for backends while there are some."""
    tiers = [(name, count) for name, count in (("finding", queues.finding), ("fetching", queues.fetching)) if count]
    return [
        ("waiting", queues.waiting), ("running", queues.running), ("swapped", queues.swapped),
        ("held", queues.held), ("loading", queues.loading),
        *tiers,
    ]  # fmt: skip
