"""The detail of a stage: its ranks side by side, then state, memory, card and streams of each of them."""

from __future__ import annotations

from ppengine.protocol.gpu import GpuInfo
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.facts import cordon_text
from ppconsole.model.ranks import several, words_of
from ppconsole.model.safe import clean
from ppconsole.model.state import SPAN_MS
from ppconsole.model.units import bytes_text, count_text, percent_text
from ppconsole.view import events, figures, stage_requests, stage_table, timeline, wording
from ppconsole.view.cells import EMPTY, Row, row
from ppconsole.view.drilldown import field, grid, heading
from ppconsole.view.marks import faulty_places, stage_mark, state_word
from ppconsole.view.stage_rows import RowKey, rows_of_ranks


def rows(snapshot: Snapshot, stage: int, rank: int | None, width: int, span: float = SPAN_MS) -> list[Row]:
    """Return everything about one stage, with a timeline of `span` milliseconds; nothing if it is not known.

    `rank`: the rank whose details follow the comparison of all; None: those of all follow.
    """
    ranks = rows_of_ranks(snapshot, stage)
    shown = [each.info for each in ranks if rank in (None, each.info.tensor_rank)]
    lanes = [*timeline.rows(snapshot, ranks, width, span), timeline.legend(width, several(snapshot))]
    if not shown:
        return []
    if not several(snapshot):
        return [*_state(snapshot, shown[0], width), EMPTY, *stage_requests.rows(snapshot, shown[0], width),
                *_parts(snapshot, shown[0], width), EMPTY, *lanes]  # fmt: skip
    found = [*stage_table.table(snapshot, ranks, width, RowKey(stage, rank)), EMPTY, *lanes]
    for each in shown:
        found += [EMPTY, *_state(snapshot, each, width), *_parts(snapshot, each, width)]
    living = next((each for each in shown if each.memory.kv_mapped), shown[0])
    return [*found, EMPTY, *stage_requests.rows(snapshot, living, width)]


def _state(snapshot: Snapshot, stage: StageInfo, width: int) -> list[Row]:
    """Return state, verdicts, operation and short facts of one rank."""
    mark = stage_mark(stage, faulty_places(snapshot))
    found = [heading(f"STATE{_of_rank(snapshot, stage)}", width)]
    found.append(row(("  state         ", "dim"), (f"{mark.text} {state_word(stage.state, mark)}", mark.style)))
    for verdict in snapshot.verdicts:
        if verdict.stage == stage.index and verdict.rank in (None, stage.tensor_rank):
            found += field(verdict.cause, verdict.summary, "bad" if verdict.root else "warn", width)
    if text := cordon_text(stage):
        found += field("cordon", f"{text}: no request begins", "warn", width)
    found += field("operation", f"{wording.operation(stage)}", "", width)
    if (waiting := stage.waiting_on) is not None:
        text = f"{waiting.what} of {wording.peer(stage, waiting)}, {figures.age(waiting.since_ms)}"
        found += field("waits for", text, "warn", width)
    numbers = _stage_numbers(stage)
    if several(snapshot):
        numbers.append(("rank wait", percent_text(stage.rank_wait)))
    return [*found, *grid(numbers, width)]


def _parts(snapshot: Snapshot, stage: StageInfo, width: int) -> list[Row]:
    """Return memory, card and streams of one rank."""
    of = _of_rank(snapshot, stage)
    found = [EMPTY, heading(f"MEMORY{of}", width), *memory_rows(stage, width)]
    if stage.gpu is not None:
        found += [EMPTY, heading(f"GPU{of}", width), *gpu_rows(stage.gpu, width)]
        found += process_rows(snapshot, stage.gpu, width)
    return [*found, EMPTY, *events.streams(stage, width, several(snapshot))]


def _of_rank(snapshot: Snapshot, stage: StageInfo) -> str:
    """Return `  stage 1 rank 0` for a heading; empty if stages have one rank."""
    return f"  {words_of(snapshot, stage)}" if several(snapshot) else ""


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
    stages = {stage.pid: f"{words_of(snapshot, stage)} (pid {stage.pid})" for stage in snapshot.stages}
    rows: list[Row] = []
    for process in gpu.processes or ():
        use = "" if process.sm is None else f", {percent_text(process.sm)} of the SMs"
        own = stages.get(process.pid)
        text = f"{own or clean(process.text)}: {bytes_text(process.bytes)}{use}"
        rows += field("on the card", text, "" if own else "warn", width)
    return rows
