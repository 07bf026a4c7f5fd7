"""Drill-downs: one request, one stage, stacks, logs. Long rows are wrapped to the width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.gpu import GpuInfo
from ppengine.protocol.inspection import LogsDetail, RequestDetail, StacksDetail
from ppengine.protocol.snapshot import RequestInfo, Snapshot, StageInfo

from ppconsole.model.facts import cordon_text
from ppconsole.model.safe import clean
from ppconsole.model.stacks import grouped, notes
from ppconsole.model.state import SPAN_MS
from ppconsole.model.units import age_text, bytes_text, count_text, percent_text, wall_text
from ppconsole.view import events, figures, stage_requests, stage_table, timeline, wording
from ppconsole.view.cells import EMPTY, Row, Seg, fit, row, wrap
from ppconsole.view.marks import STAGE_WORDS, faulty_stages, request_mark, stage_mark

_PROMPT_ROWS = 8
"""Most rows of a prompt above its answer."""


def heading(text: str, width: int) -> Row:
    """Return a section header."""
    return row((fit(f" {text}", width), ""), fill="head")


def field(name: str, value: str, style: str = "", width: int = 80) -> list[Row]:
    """Return a labelled value, wrapped under itself."""
    parts = wrap(value, max(10, width - 16))
    first = row((f"  {name:<13} ", "dim"), (parts[0], style))
    return [first, *(row((" " * 16, ""), (part, style)) for part in parts[1:])]


def grid(pairs: Iterable[tuple[str, str]], width: int, cell: int = 38) -> list[Row]:
    """Return labelled short values in as many columns as fit."""
    across = max(1, width // cell)
    items = list(pairs)
    rows = []
    for start in range(0, len(items), across):
        segs: list[Seg] = []
        for name, value in items[start : start + across]:
            segs += [(f"  {name:<13} ", "dim"), (fit(value, cell - 16), "")]
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
        ],
        width,
    )  # fmt: skip
    between = "-" if ended.itl_ms is None else f"{figures.latency_ms(ended.itl_ms)} a token"
    quantiles = _pair(ended.itl_p50_ms, ended.itl_p99_ms)
    times = [
        ("ended", f"{wall_text(ended.wall)}, {age_text(ended.ended_s)} ago"),
        ("finished", age_text(ended.took_s)), ("queued", figures.latency(ended.queue_s)),
        ("first token", figures.latency(ended.ttft_s)), ("between", between), ("itl p50 p99", quantiles),
    ]  # fmt: skip
    rows += [EMPTY, heading("TIMING", width), *grid(times, width), EMPTY]
    if not problem:
        return [*rows, row(("  asking for the rest…", "dim"))]
    return [*rows, *field("the rest", f"is not kept: {problem}", "warn", width)]


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
    limit = "model length" if sampling.max_tokens is None else str(sampling.max_tokens)
    return [
        ("owner", detail.owner), ("revision", str(detail.revision)),
        ("prompt", f"{detail.prompt_tokens} tokens"), ("output", f"{detail.output_tokens} of {limit}"),
        ("computed", f"{detail.computed_tokens} tokens"), ("prefix hit", f"{detail.cached_tokens} tokens"),
        ("preemptions", str(detail.preemptions)), ("swaps", str(detail.swaps)),
        ("sampling", how), ("seed", "-" if sampling.seed is None else str(sampling.seed)),
        ("priority", str(detail.priority)),
    ]  # fmt: skip


def _request_timing(detail: RequestDetail) -> list[tuple[str, str]]:
    """Return times of a request; the total counts from its submission."""
    return [
        ("age", age_text(detail.age_s)), ("queued", figures.latency(detail.queued_s)),
        ("first token", figures.latency(detail.first_token_s)),
        ("between", figures.latency_ms(detail.inter_token_ms) + " a token" if detail.inter_token_ms else "-"),
        ("itl p50 p99", _pair(detail.itl_p50_ms, detail.itl_p99_ms)), ("finished", age_text(detail.finished_s)),
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


def stage_rows(snapshot: Snapshot, stage: StageInfo, width: int, span: float = SPAN_MS) -> list[Row]:
    """Return everything about one stage: state, memory parts, streams, timeline of `span` milliseconds."""
    faulty = faulty_stages(snapshot)
    mark = stage_mark(stage, faulty)
    rows = [heading("STATE", width)]
    rows.append(
        row(("  state         ", "dim"), (f"{mark.text} {STAGE_WORDS.get(mark.text, stage.state)}", mark.style))
    )
    for verdict in snapshot.verdicts:
        if verdict.stage == stage.index:
            rows += field(verdict.cause, verdict.summary, "bad" if verdict.root else "warn", width)
    if text := cordon_text(stage):
        rows += field("cordon", f"{text}: no request begins", "warn", width)
    rows += field("operation", f"{wording.operation(stage)}", "", width)
    waiting = stage.waiting_on
    if waiting is not None:
        peer = "the core" if waiting.stage is None else f"stage {waiting.stage}"
        rows += field("waits for", f"{waiting.what} of {peer}, {figures.age(waiting.since_ms)}", "warn", width)
    rows += grid(_stage_numbers(stage), width)
    rows += [EMPTY, *stage_requests.rows(snapshot, stage, width)]
    rows += [EMPTY, heading("MEMORY", width), *memory_rows(stage, width)]
    if stage.gpu is not None:
        rows += [EMPTY, heading("GPU", width), *gpu_rows(stage.gpu, width)]
        rows += process_rows(snapshot, stage.gpu, width)
    rows += [EMPTY, *events.streams(stage, width)]
    rows += [EMPTY, *timeline.rows(snapshot, [stage], width, span), timeline.legend(width)]
    return rows


def _stage_numbers(stage: StageInfo) -> list[tuple[str, str]]:
    """Return the short facts of a stage."""
    layers = f"{stage.layers[0]} to {stage.layers[1] - 1}" if len(stage.layers) == 2 else "-"
    idle = "-" if stage.idle_fraction is None else f"{100 * stage.idle_fraction:.0f}%"
    return [
        ("process", "-" if stage.pid is None else f"pid {stage.pid} on {stage.host}"),
        ("device", f"{stage.device.kind} {stage.device.name}"),
        ("layers", layers), ("micro-batches", " ".join(f"m{number}" for number in stage.micro_batches) or "-"),
        ("sample age", figures.age(stage.sample_age_ms)), ("progress age", figures.age(stage.progress_age_ms)),
        ("step p50 p99", f"{figures.millis(stage.step_ms.p50)} {figures.millis(stage.step_ms.p99)}"), ("idle", idle),
        ("inbox", count_text(stage.inbox)), ("outbox", count_text(stage.outbox)),
    ]  # fmt: skip


def memory_rows(stage: StageInfo, width: int) -> list[Row]:
    """Return the memory bar at full width and every part with its share of the total."""
    memory, blocks = stage.memory, stage.kv_blocks
    rows = [Row((("  ", ""), *stage_table.bar(stage, max(10, width - 4))))]
    rows.append(row(("  ", ""), ("█", "bar.used"), (" in use  ", "dim"), ("▒", "bar.free"), (" mapped, free  ", "dim"),
                    ("│", "bar.limit"), (" limit", "dim")))  # fmt: skip
    parts = [
        ("total", memory.total), ("limit", memory.limit), ("used", memory.used), ("weights", memory.weights),
        ("kv mapped", memory.kv_mapped), ("kv reserved", memory.kv_reserved), ("kv resident", memory.kv_resident),
        ("other", memory.other),
    ]  # fmt: skip
    rows += grid(((name, f"{bytes_text(value):>7} {figures.percent(value, memory.total):>5}") for name, value in parts),
                 width)  # fmt: skip
    names = ("used", "cached", "free", "mapped", "capacity")
    kv = " ".join(f"{name} {count_text(getattr(blocks, name))}" for name in names)
    rows += field("kv blocks", kv + ("  (sets the minimum of all stages)" if blocks.binding else ""), "", width)
    swap = stage.swap_blocks
    return [*rows, *field("host blocks", f"{count_text(swap.used)} of {count_text(swap.total)} used", "", width)]


def gpu_rows(gpu: GpuInfo, width: int) -> list[Row]:
    """Return NVML's figures of the whole card; missing ones are unknown."""
    rows = field("no answer", gpu.problem, "bad", width) if gpu.problem else []
    power = f"{count_text(gpu.power_w)} of {count_text(gpu.power_limit_w)} W"
    pcie = f"out {bytes_text(gpu.pcie_tx_bytes_s)}/s in {bytes_text(gpu.pcie_rx_bytes_s)}/s"
    nvlink = f"out {bytes_text(gpu.nvlink_tx_bytes_s)}/s in {bytes_text(gpu.nvlink_rx_bytes_s)}/s"
    rows += grid(
        [
            ("memory", f"{bytes_text(gpu.memory_used)} of {bytes_text(gpu.memory_total)}"),
            ("busy", percent_text(gpu.busy)), ("SM clock", f"{count_text(gpu.sm_clock_mhz)} MHz"), ("power", power),
            ("temperature", f"{count_text(gpu.temperature_c)} °C"),
            ("ECC errors", f"{count_text(gpu.ecc_corrected)} corrected, {count_text(gpu.ecc_uncorrected)} not"),
            ("PCIe", pcie), ("NVLink", nvlink), ("figures' age", figures.age(gpu.age_ms)),
        ],
        width,
    )  # fmt: skip
    if gpu.throttle:
        rows += field("held down by", ", ".join(gpu.throttle), "warn", width)
    for xid in gpu.xids:
        rows += field("XID", f"{xid.code}, {figures.age(xid.age_ms)} ago", "bad", width)
    return rows


def process_rows(snapshot: Snapshot, gpu: GpuInfo, width: int) -> list[Row]:
    """Return the processes on a card, the engine's stages by their number."""
    stages = {stage.pid: f"stage {stage.index} (pid {stage.pid})" for stage in snapshot.stages}
    rows: list[Row] = []
    for process in gpu.processes or ():
        use = "" if process.sm is None else f", {percent_text(process.sm)} of the SMs"
        own = stages.get(process.pid)
        text = f"{own or clean(process.text)}: {bytes_text(process.bytes)}{use}"
        rows += field("on the card", text, "" if own else "warn", width)
    return rows


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
