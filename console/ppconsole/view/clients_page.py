"""The Clients screen as rows: one for each API key and route of the HTTP port, the busiest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppengine.protocol.clients import ClientInfo, KeyLimit, limits_text
from ppengine.protocol.snapshot import Latency

from ppconsole.model.safe import clean
from ppconsole.model.units import count_text
from ppconsole.view import figures
from ppconsole.view.cells import (
    EMPTY,
    Cell,
    Column,
    Row,
    clip,
    fitted,
    header,
    place,
    row,
    table_row,
    text_of,
    width_of,
    wrap,
)

NO_CLIENTS = "no HTTP clients: serve PROFILE --http, or no HTTP process reports now"
_NOTHING = figures.NOTHING
_INDENT = 1
COLUMNS = (
    Column("key", "KEY", 7, 0),
    Column("route", "ROUTE", 8, 1),
    Column("limit", "LIMIT", 5, 2),
    Column("open", "OPEN", 4, 2, ">"),
    Column("slow", "SLOW", 4, 8, ">"),
    Column("requests_s", "REQ/S", 5, 5, ">"),
    Column("tokens_s", "TOK/S", 5, 3, ">"),
    Column("ttft50", "TTFT", 5, 4, ">"),
    Column("ttft90", "TTFT90", 6, 12, ">"),
    Column("ttft99", "TTFT99", 6, 9, ">"),
    Column("itl50", "ITL", 5, 4, ">"),
    Column("itl90", "ITL90", 5, 13, ">"),
    Column("itl99", "ITL99", 5, 10, ">"),
    Column("errors", "ERR", 3, 6, ">"),
    Column("refused", "429", 3, 7, ">"),
    Column("left", "LEFT", 4, 11, ">"),
    Column("requests", "REQS", 5, 14, ">"),
    Column("tokens", "TOKENS", 6, 15, ">"),
)
_COUNTS = ("limit", "open", "slow", "errors", "refused", "left")
"""Columns as wide as their longest figure. Rates and latencies keep one width, so that columns do not jump."""
_WIDE = {"ttft90", "itl90", "requests", "tokens"}
"""Columns of a wide terminal."""
_WIDE_FROM = 120
_MOST = {"key": 40, "route": 16}
"""Most cells of the names, which yield first when it is narrow."""
_CHAT = "/v1/chat/completions"


def rows(clients: Sequence[ClientInfo], width: int, selected: str | None = None) -> list[Row]:
    """Return titles, the sum if there are several rows, and a row a client, in the order of `clients`.

    The rows of the API key `selected` are marked.
    """
    if not clients:
        return [clip(row((f"  {NO_CLIENTS}", "dim")), width)]
    sums = [_sum(clients)] if len(clients) > 1 else []
    cells = [*sums, *map(_cells, clients)]
    placed = place(_columns(cells, width), width - _INDENT)
    titles = row((" " * _INDENT + text_of(header(placed)), ""), fill="head")
    mine = [*(False for _ in sums), *(client.key == selected for client in clients)]
    return [
        titles,
        *(
            Row(((">" if chosen else " ", "accent"), *table_row(placed, each).segs), "select" if chosen else "")
            for each, chosen in zip(cells, mine, strict=True)
        ),
    ]


def slo_rows(latency: Latency, width: int) -> list[Row]:
    """Return a blank row and the objectives of the profile, in two rows if need be; nothing without an objective."""
    text = figures.slo_text(latency)
    return [EMPTY, *(row((f"  {line}", "dim")) for line in wrap(text, width - 2))] if text else []


def row_of(clients: Sequence[ClientInfo], key: str | None) -> int:
    """Return the number of the first row of an API key; 0 without one."""
    above = 2 if len(clients) > 1 else 1
    return next((above + at for at, client in enumerate(clients) if client.key == key), 0)


def _columns(cells: Sequence[dict[str, Cell]], width: int) -> list[Column]:
    """Return the columns for these cells: names yield to figures, and get the room that is left."""
    left_out = set() if width >= _WIDE_FROM else set(_WIDE)
    if not any(each["limit"][0] for each in cells):
        left_out.add("limit")
    shown = [column for column in COLUMNS if column.key not in left_out]
    found = fitted(shown, {key: [str(each[key][0]) for each in cells] for key in _COUNTS})
    return [_named(column, [str(each[column.key][0]) for each in cells]) for column in found]


def _named(column: Column, texts: Iterable[str]) -> Column:
    """Return a column of names with as much growth as its longest text needs; another as it is."""
    if column.key not in _MOST:
        return column
    full = min(_MOST[column.key], max(map(width_of, (column.title, *texts))))
    least = min(full, column.width)
    return column._replace(width=least, grow=full - least)


def _cells(client: ClientInfo) -> dict[str, Cell]:
    """Return the cells of one client."""
    ttft, itl = figures.quantiles(client.ttft_ms, 1), figures.quantiles(client.itl_ms, 1)
    return {
        "key": (clean(client.key) or _NOTHING, "strong"), "route": (_route(client.route), ""), **_figures([client]),
        "limit": _limits(client),
        "ttft50": (ttft[0], ""), "ttft90": (ttft[1], ""), "ttft99": (ttft[2], ""),
        "itl50": (itl[0], ""), "itl90": (itl[1], ""), "itl99": (itl[2], ""),
    }  # fmt: skip


def _limits(client: ClientInfo) -> Cell:
    """Return the limits of a key: of two of a kind, by `limit` and by the file of keys, the smaller one.

    They are yellow if an operator has set one: those of the file are there all the time.
    """
    rule = limits_text(client.most_open, client.per_minute, draining=client.draining)
    file = client.key_limit or KeyLimit()
    tokens = "" if file.tokens_per_minute is None else f"{count_text(file.tokens_per_minute)} tok/min"
    most_open = _least(client.most_open, file.concurrent)
    per_minute = _least(client.per_minute, file.requests_per_minute)
    least = limits_text(most_open, per_minute, draining=client.draining)
    return " ".join(filter(None, [least, tokens])), "warn" if rule else ""


def _least(*limits: int | None) -> int | None:
    return min((each for each in limits if each is not None), default=None)


def _sum(clients: Sequence[ClientInfo]) -> dict[str, Cell]:
    """Return the cells of all clients together. Quantiles have no sum."""
    blank: dict[str, Cell] = {column.key: ("", "") for column in COLUMNS}
    return {**blank, "key": ("all", "dim"), **_figures(clients)}


def _figures(clients: Sequence[ClientInfo]) -> dict[str, Cell]:
    """Return the cells of counts and rates, summed over `clients`."""
    return {
        "open": _count(each.open for each in clients),
        "slow": _trouble(each.slow for each in clients),
        "requests_s": (_rate([each.requests_s for each in clients]), ""),
        "tokens_s": (_rate([each.tokens_s for each in clients]), ""),
        "errors": _trouble(each.errors_total + each.failed_total for each in clients),
        "refused": _trouble(each.refused_total for each in clients),
        "left": _count(each.left_total for each in clients),
        "requests": _count(each.requests_total for each in clients),
        "tokens": _count(each.tokens_total for each in clients),
    }


def _count(counts: Iterable[int]) -> Cell:
    """Return the sum of counts, dim if it is 0."""
    total = sum(counts)
    return count_text(total), "" if total else "dim"


def _trouble(counts: Iterable[int]) -> Cell:
    """Return the sum of counts that should be 0."""
    total = sum(counts)
    return count_text(total), "warn" if total else "dim"


def _rate(rates: Sequence[float | None]) -> str:
    """Return the sum of the rates that are known; `-` while none is."""
    known = [each for each in rates if each is not None]
    return figures.rate(sum(known)) if known else _NOTHING


def _route(path: str) -> str:
    """Return the short name of a route: `chat`, or the end of its path."""
    text = clean(path)
    return "chat" if text == _CHAT else text.rstrip("/").rpartition("/")[2] or text or _NOTHING
