"""Drill-downs: one request, one stage, stacks, logs. Long rows are wrapped to the width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppengine.protocol.clients import route_of
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.inspection import LogsDetail, RequestDetail, StacksDetail
from ppengine.protocol.snapshot import RequestInfo
from ppengine.protocol.tiers import PromptSources

from ppconsole.model.safe import clean
from ppconsole.model.stacks import grouped, notes
from ppconsole.model.units import age_text, wall_text
from ppconsole.view import figures
from ppconsole.view.cells import EMPTY, Row, Seg, fit, row, wrap
from ppconsole.view.marks import request_mark

_PROMPT_ROWS = 8
"""Most rows of a prompt above its answer."""
_CELL = 38
"""Columns of a labelled short value."""


def heading(text: str, width: int) -> Row:
    """Return a section header."""
    return row((fit(f" {text}", width), ""), fill="head")


def field(name: str, value: str, style: str = "", width: int = 80) -> list[Row]:
    """Return a labelled value, wrapped under itself."""
    parts = wrap(value, max(10, width - 16))
    first = row((f"  {name:<13} ", "dim"), (parts[0], style))
    return [first, *(row((" " * 16, ""), (part, style)) for part in parts[1:])]


def grid(pairs: Iterable[tuple[str, str]], width: int) -> list[Row]:
    """Return labelled short values in as many columns as fit."""
    across = max(1, width // _CELL)
    items = list(pairs)
    rows = []
    for start in range(0, len(items), across):
        segs: list[Seg] = []
        for name, value in items[start : start + across]:
            segs += [(f"  {name:<13} ", "dim"), (fit(value, _CELL - 16), "")]
        rows.append(Row(tuple(segs)))
    return rows


def request_rows(info: RequestInfo | None, detail: RequestDetail | None, problem: str, width: int) -> list[Row]:
    """Return everything about one request. `detail` None: not fetched yet, or `problem` says why not."""
    rows: list[Row] = []
    if problem:
        rows += [*field("problem", problem, "bad", width)]
    if detail is None:
        if info is None:
            return [*rows, row(("  this request is not in the engine any more", "warn"))]
        return [*rows, *_request_basics(info, width)]
    mark = request_mark(detail.state)
    rows += [heading("STATE", width), row(("  state         ", "dim"), (f"{detail.state} ", mark.style))]
    if detail.why:
        rows += field("why", detail.why, "warn" if detail.state != "running" else "", width)
    flight = " ".join(f"m{number}" for number in detail.in_flight) or "nothing in flight"
    rows += field("steps", flight, "", width)
    rows += grid(_request_numbers(detail), width)
    if detail.bad_words:
        rows += field("bad words", " ".join(f'"{clean(text)}"' for text in detail.bad_words), "", width)
    if detail.sources is not None:
        rows += field("came from", sources_text(detail.sources, detail.prompt_tokens), "", width)
    rows += [EMPTY, heading("TIMING", width), *grid(_request_timing(detail), width)]
    rows += [EMPTY, heading(f"BLOCK TABLE  {len(detail.block_table)} on the device", width)]
    rows += block_rows(detail.block_table, set(detail.shared_blocks), width)
    if detail.host_blocks:
        rows += field("host blocks", ranges(detail.host_blocks), "swap", width)
    if detail.prompt_text:
        asked = wrap(detail.prompt_text, width - 6)
        more = [] if len(asked) <= _PROMPT_ROWS else [row((f"    {len(asked) - _PROMPT_ROWS} more rows", "dim"))]
        rows += [EMPTY, heading("PROMPT", width)]
        rows += [
            row(("  › " if not at else "    ", "accent"), (line, "")) for at, line in enumerate(asked[:_PROMPT_ROWS])
        ]
        rows += more
    rows += [EMPTY, heading("OUTPUT", width)]
    rows += [row(("  ", ""), (line, "out")) for line in wrap(detail.output_text or "nothing yet", width - 4)]
    if detail.history:
        rows += [EMPTY, heading("HISTORY", width)]
        rows += [row(("  ", ""), (part, "")) for line in detail.history for part in wrap(line, width - 4)]
    if detail.prompt_token_ids:
        rows += [EMPTY, heading("TOKENS", width)]
        rows += field("prompt ids", _ids(detail.prompt_token_ids), "dim", width)
        rows += field("output ids", _ids(detail.output_token_ids) or "-", "dim", width)
    return rows


def finished_rows(ended: FinishedInfo, problem: str, width: int) -> list[Row]:
    """Return the figures that stay of a request that has ended. `problem`: why there are no more."""
    rows = [heading("STATE", width), row(("  state         ", "dim"), ("finished ", request_mark("finished").style))]
    rows += field("why", ended.ending, "", width)
    rows += grid(
        [
            ("owner", ended.owner), ("preemptions", str(ended.preemptions)),
            ("prompt", f"{ended.prompt_tokens} tokens"), ("output", f"{ended.output_tokens} tokens"),
            *_came(ended.client, ended.route),
        ],
        width,
    )  # fmt: skip
    if ended.sources is not None:
        rows += field("came from", sources_text(ended.sources, ended.prompt_tokens), "", width)
    between = "-" if ended.itl_ms is None else f"{figures.latency_ms(ended.itl_ms)} a token"
    quantiles = _pair(ended.itl_p50_ms, ended.itl_p99_ms)
    times = [
        ("ended", f"{wall_text(ended.wall)}, {age_text(ended.ended_s)} ago"),
        ("finished", age_text(ended.took_s)), ("prepared", figures.latency(ended.prepare_s)),
        ("queued", figures.latency(ended.queue_s)),
        ("first token", figures.latency(ended.ttft_s)), ("between", between), ("itl p50 p99", quantiles),
    ]  # fmt: skip
    rows += [EMPTY, heading("TIMING", width), *grid(times, width), EMPTY]
    if not problem:
        return [*rows, row(("  asking for the rest…", "dim"))]
    return [*rows, *field("the rest", f"is not kept: {problem}", "warn", width)]


def sources_text(sources: PromptSources, prompt_tokens: int) -> str:
    """Return the tokens of a start by their source: `prompt 8192: device 1024 · nvme0 2048 · computed 5120`."""
    parts = [("device", sources.device), ("host", sources.host), *sources.backends.items()]
    parts.append(("computed", sources.computed))
    total = sum(count for _, count in parts)
    word = "prompt" if total == prompt_tokens else "start"
    return f"{word} {total}: {' · '.join(f'{clean(name)} {count}' for name, count in parts if count) or 'nothing yet'}"


def _request_basics(info: RequestInfo, width: int) -> list[Row]:
    """Return the facts of the snapshot, until the detail arrives."""
    mark = request_mark(info.state)
    rows = [heading("STATE", width), row(("  state         ", "dim"), (info.state, mark.style))]
    if info.why:
        rows += field("why", info.why.text or info.why.code, "warn", width)
    pairs = [("owner", info.owner), ("age", age_text(info.age_s)), ("blocks", str(info.blocks))]
    return [*rows, *grid(pairs, width), row(("  asking for the rest…", "dim"))]


def _request_numbers(detail: RequestDetail) -> list[tuple[str, str]]:
    """Return counts of a request."""
    sampling = detail.sampling
    how = "greedy" if sampling.greedy else f"T {sampling.temperature:g} p {sampling.top_p:g} k {sampling.top_k}"
    how += ", adjusted" if sampling.adjusts else ""
    limit = "model length" if sampling.max_tokens is None else str(sampling.max_tokens)
    return [
        ("owner", detail.owner), ("revision", str(detail.revision)),
        ("prompt", f"{detail.prompt_tokens} tokens"), ("output", f"{detail.output_tokens} of {limit}"),
        ("computed", f"{detail.computed_tokens} tokens"), ("prefix hit", f"{detail.cached_tokens} tokens"),
        ("preemptions", str(detail.preemptions)), ("swaps", str(detail.swaps)),
        ("sampling", how), ("seed", "-" if sampling.seed is None else str(sampling.seed)),
        ("priority", str(detail.priority)), *_came(detail.client, route_of(detail.id, detail.client)),
    ]  # fmt: skip


def _came(client: str, route: str) -> list[tuple[str, str]]:
    """Return the API key of a request, and its route if it came over HTTP."""
    return [("client", client or "-"), *([("route", route)] if route else [])]


def _request_timing(detail: RequestDetail) -> list[tuple[str, str]]:
    """Return times of a request; the total counts from its arrival at the engine."""
    return [
        ("age", age_text(detail.age_s)), ("prepared", figures.latency(detail.prepared_s)),
        ("queued", figures.latency(detail.queued_s)),
        ("first token", figures.latency(detail.first_token_s)),
        ("between", figures.latency_ms(detail.inter_token_ms) + " a token" if detail.inter_token_ms else "-"),
        ("itl p50 p99", _pair(detail.itl_p50_ms, detail.itl_p99_ms)),
        ("finished", "-" if detail.finished_s is None else age_text(detail.finished_s)),
    ]  # fmt: skip


def _pair(median: float | None, high: float | None) -> str:
    """Return two quantiles in milliseconds; `-` before the second token."""
    return "-" if median is None else f"{figures.latency_ms(median)} {figures.latency_ms(high)}"


def _ids(ids: Sequence[int], most: int = 400) -> str:
    """Return token ids; of very many the newest."""
    text = " ".join(map(str, ids[-most:]))
    return f"… {text}" if len(ids) > most else text


def block_rows(blocks: Sequence[int], shared: set[int], width: int) -> list[Row]:
    """Return a block table as numbers in columns, with the position of the first of each row; shared ones marked."""
    if not blocks:
        return [row(("  no device blocks", "dim"))]
    size = max(4, max(len(str(block)) for block in blocks) + 1)
    across = max(1, (width - 10) // (size + 1))
    across = across // 8 * 8 or across
    rows = []
    for start in range(0, len(blocks), across):
        segs: list[Seg] = [(f"{start:>7}  ", "dim")]
        for block in blocks[start : start + across]:
            mine = block in shared
            segs.append((f"{str(block) + ('°' if mine else ''):>{size}} ", "kv.shared" if mine else ""))
        rows.append(Row(tuple(segs)))
    if shared:
        rows.append(row(("         ° shared with another request through the prefix cache", "dim")))
    return rows


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as runs: 3-7 9 12-13."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)


def stacks_rows(detail: StacksDetail | None, problem: str, width: int) -> list[Row]:
    """Return stacks of stages and core, a section for each group of threads with the same frames."""
    if detail is None:
        text = clean(problem) or "taking stacks…"
        return [row((f"  {text}", "bad" if problem else "dim"))]
    rows: list[Row] = []
    for note in notes(detail):
        rows += field("note", note, "warn", width)
    for group in grouped(detail):
        rows.append(heading(group.title, width))
        # Frames of libraries step back.
        rows += [row(("  " + fit(line, width - 2), "" if "ppengine" in line else "dim")) for line in group.frames]
    return rows


def log_rows(detail: LogsDetail | None, problem: str, width: int) -> list[Row]:
    """Return log lines; warnings and errors are coloured."""
    if detail is None:
        return [row((f"  {problem or 'asking for the logs…'}", "bad" if problem else "dim"))]
    rows = []
    for line in detail.lines:
        low = line.lower()
        style = "bad" if "error" in low or "traceback" in low else "warn" if "warn" in low else ""
        rows += [row((part, style)) for part in wrap(line, max(10, width))]
    return rows or [row(("  the logs are empty", "dim"))]


def moment_row(wall: float, width: int) -> Row:
    """Return the row behind the log lines of a past: the moment in view. `wall`: Unix seconds."""
    text = f"── {wall_text(wall)} the moment in view "
    return row((fit(text.ljust(width, "─"), width), "accent"))
