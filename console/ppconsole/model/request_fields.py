"""The fields of a request, as filters and sorting know them; their names are the heads of the columns."""

from __future__ import annotations

from ppengine.protocol.snapshot import RequestInfo

from ppconsole.model.filters import Field, Filter, parse
from ppconsole.model.sorting import ARRIVAL, letters

_STATES = ("running", "loading", "swapped", "held", "fetching", "finding", "waiting", "finished")
"""States in the order of the sorted table."""


def _why(request: RequestInfo) -> str:
    return f"{request.why.code} {request.why.text}" if request.why else ""


def _fill(request: RequestInfo) -> float | None:
    """Return the percentage of its tokens that is computed; None if it has none."""
    goal = request.prompt_tokens + request.output_tokens
    return 100.0 * min(request.computed_tokens, goal) / goal if goal else None


FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("id", "text", lambda request: request.id, "id"),
        Field("owner", "text", lambda request: request.owner, "user or session"),
        Field("state", "text", lambda request: request.state, "waiting, finding, fetching, running, ...",
              lambda request: _STATES.index(request.state)),
        Field("age", "seconds", lambda request: request.age_s, "time since its arrival"),
        Field("in", "count", lambda request: request.prompt_tokens, "prompt tokens"),
        Field("out", "count", lambda request: request.output_tokens, "output tokens"),
        Field("blk", "count", lambda request: request.blocks, "device blocks"),
        Field("swp", "count", lambda request: request.swap_blocks, "host blocks"),
        Field("fill", "percent", _fill, "computed share of its tokens so far"),
        Field("hit", "count", lambda request: request.cached_tokens, "tokens found in the prefix cache"),
        Field("pre", "count", lambda request: request.preemptions, "preemptions"),
        Field("pri", "count", lambda request: request.priority, "priority", smallest_first=True),
        Field("queue", "seconds", lambda request: request.queue_s, "time in the queue until it first got blocks"),
        Field("ttft", "seconds", lambda request: request.ttft_s, "time to its first token"),
        Field("itl", "milliseconds", lambda request: request.itl_ms, "mean time between its tokens"),
        Field("itl99", "milliseconds", lambda request: request.itl_p99_ms, "99th percentile of it"),
        Field("why", "phrase", _why, "why it does not run, anywhere in the text"),
        Field("reason", "text", lambda request: request.finish_reason or "", "how it ended: stop, length, abort"),
        Field("client", "text", lambda request: request.client, "API key of the HTTP port"),
    )
}  # fmt: skip
FIELDS["stat"] = FIELDS["state"]
FIELDS["done"] = FIELDS["fill"]
"""Fields of a request by name; `stat` is short for `state`, `done` the earlier name of `fill`."""

FINISHED_FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        *(FIELDS[name] for name in ("id", "owner")),
        Field("ended", "seconds", lambda request: request.ended_s, "time since its end", smallest_first=True),
        Field("took", "seconds", lambda request: request.took_s, "time from its arrival to the end"),
        *(FIELDS[name] for name in ("in", "out")),
        Field("prepare", "seconds", lambda request: request.prepare_s, "time from its arrival to the queue"),
        *(FIELDS[name] for name in ("queue", "ttft", "itl", "itl99", "pre")),
        Field("reason", "text", lambda request: request.reason, "how it ended: stop, length, abort"),
        FIELDS["client"],
    )
}
"""Fields of a request that has ended, by name."""

COLUMN_HELP = {ARRIVAL: "order of submission"} | {
    field.name: field.help for field in (*FIELDS.values(), *FINISHED_FIELDS.values())
}
"""Meaning of each column that sorts a table of requests."""
SHORT_HELP = COLUMN_HELP | {
    "state": "its state", "fill": "computed share", "hit": "prefix cache tokens", "queue": "time to first blocks",
    "ttft": "time to first token", "itl": "mean time of a token", "why": "why it does not run",
    "reason": "how it ended", "client": "API key", "took": "arrival to end",
    "prepare": "arrival to the queue",
}  # fmt: skip
"""The meanings in at most 22 cells."""
LETTERS = letters(tuple(COLUMN_HELP))
"""Letter of each of them in the menu of `S`; the same one in every table."""


def request_filter(text: str) -> Filter:
    """Return the filter of requests that `text` writes. Raises FilterError."""
    return parse(text, FIELDS)


def finished_filter(text: str) -> Filter:
    """Return the filter of ended requests that `text` writes. Raises FilterError."""
    return parse(text, FINISHED_FIELDS)
