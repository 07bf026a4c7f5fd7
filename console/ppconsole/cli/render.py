"""Snapshots and details as plain text: pure functions, no colour, unknown shown as `?`."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.discovery import EndedEngine, EngineRecord
from ppengine.protocol.finished import FinishedInfo, ending_text
from ppengine.protocol.incidents import Incident
from ppengine.protocol.inspection import RequestDetail, StacksDetail
from ppengine.protocol.severity import level_of
from ppengine.protocol.snapshot import ChecksInfo, EngineInfo, Event, Latency, RequestInfo, Snapshot, Verdict
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.endings import clock_text, consequences, ended_text, follows_from, incident_words
from ppconsole.model.facts import cordon_text, evidence_lines, fault_word, verdict_text
from ppconsole.model.ranks import any_other, place_of, short
from ppconsole.model.safe import clean
from ppconsole.model.stacks import grouped, notes, pids
from ppconsole.model.units import age_text, bytes_text, count_text, ms_text, percent_text, ratio, wall_text
from ppconsole.view import figures
from ppconsole.view.drilldown import sources_text
from ppconsole.view.wording import FINISHED, REQUEST, STAGE, locate, operation, stuck_at, why

BAR = 10
CELL_MOST = 300
"""Characters of a cell. Each row is as wide as the widest one: a name of megabytes would make gigabytes."""
HOST, _AFTER_STATE = "HOST", 2
"""Title and place of the column that a table of stages on several hosts has."""
_STAGE_HEAD = " ".join(
    [
        *(STAGE[key] for key in ("stage", "state", "memory")), "USED/LIMIT",
        *(STAGE[key] for key in ("kv", "swap", "io", "micro", "step", "idle", "age", "op")),
    ]
)  # fmt: skip
_REQUEST_HEAD = " ".join([*(title for key, title in REQUEST.items() if key != "why"), "REV", REQUEST["why"]])
_FINISHED_HEAD = " ".join(FINISHED.values())
_OPEN, _DONE = ("accepted", "deferred"), 4
"""States of operations that are under way, all of which are listed, and how many of the others are."""
_NUMBERS_MOST = 32
_TELLING = ("main thread at ", "GIL owner: ", "last words: ", "cgroup oom_kill +", "missing: ")
"""Beginnings of facts that say more than the first one does."""


def table(names: str, rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Return lines with columns as wide as their widest cell; those named in `right` are aligned right."""
    head = names.split()
    rows = [[cell if len(cell) <= CELL_MOST else f"{cell[: CELL_MOST - 1]}…" for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    flush = [name in right for name in head]
    return [
        " ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, flush, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]


def status_lines(snapshot: Snapshot, max_requests: int = 20) -> list[str]:
    """Return the whole picture: the engine, verdicts, stages, pool, requests, operations."""
    lines = [engine_line(snapshot)]
    if text := checks_text(snapshot.engine.checks):
        lines.append(f"  checks: {text}")
    if snapshot.engine.message:
        lines.append(f"  {clean(snapshot.engine.message)}")
    lines += [f"  {text}: no request begins" for text in map(cordon_text, snapshot.stages) if text]
    lines += [f"!{verdict_text(verdict)}" for verdict in snapshot.verdicts]
    if snapshot.stages:
        lines += ["", *stage_lines(snapshot.stages), pool_line(snapshot)]
    if text := latency_line(snapshot.latency):
        lines.append(text)
    if text := figures.slo_text(snapshot.latency):
        lines.append(text)
    if snapshot.requests:
        lines += ["", *request_lines(snapshot.requests[:max_requests], locate(snapshot), stuck_at(snapshot))]
        hidden = snapshot.requests_total - min(max_requests, len(snapshot.requests))
        if hidden > 0:
            lines.append(f"... and {hidden} more")
    done = [each for each in snapshot.operations if each.state not in _OPEN]
    if len(done) > _DONE:
        lines.append(f"... and {len(done) - _DONE} older operations (ppconsole events)")
    shown = done[-_DONE:]
    for each in (one for one in snapshot.operations if one.state in _OPEN or one in shown):
        line = f"OP {each.id} {each.verb} by {each.by}: {each.state} {each.progress}"
        lines.append(clean(line).rstrip())
    return lines


def checks_text(checks: ChecksInfo) -> str:
    """Return the live checks that are on, and what came of them; empty when none is."""
    names = [name for name in ("ledger", "strict", "finite") if getattr(checks, name)]
    if checks.shadow:
        names.append(
            f"shadow {checks.shadow:.2%} ({clean(checks.shadow_state)}, {checks.shadow_compared} tokens compared, "
            f"{checks.shadow_skipped} steps left out)"
        )
    elif checks.shadow_state:
        names.append(f"shadow {clean(checks.shadow_state)}")
    return f"{', '.join(names)}; {checks.findings} findings" if names else ""


def engine_line(snapshot: Snapshot) -> str:
    """Return the first line: name, state, and the figures of the whole engine.

    The state is the effect of a fault where there is one, as on the screen: a stuck engine serves as far as it knows.
    """
    engine = snapshot.engine
    rate, state = snapshot.throughput.output_tok_s, fault_word(snapshot) or engine.state
    return (
        f"{clean(engine.name)} ({clean(engine.id)}) {state.upper()}  model {clean(engine.model)}  "
        f"{_sizes(engine)}  "
        f"util {engine.memory_utilization:.2f} r{engine.memory_revision}  step {engine.step}  "
        f"{count_text(rate)} tok/s  up {age_text(engine.uptime_s)}  consoles {engine.consoles}"
    )


def _sizes(engine: EngineInfo) -> str:
    """Return the number of stages, and of their ranks if it is more than one."""
    stages = "1 stage" if engine.pipeline_parallel_size == 1 else f"{engine.pipeline_parallel_size} stages"
    return stages if engine.tensor_parallel_size == 1 else f"{stages} of {engine.tensor_parallel_size} ranks"


def stage_lines(stages: Sequence[StageInfo]) -> list[str]:
    """Return one line a stage, or a rank of it, under a head. `*`: this stage sets the number of blocks."""
    ranked = any_other(stages)
    right = [STAGE[key] for key in ("kv", "swap", "io", "step", "idle", "ranks", "age")]
    head, rows = _STAGE_HEAD.split(), [_stage_row(stage, ranked) for stage in stages]
    if ranked:
        at = head.index(STAGE["age"])
        head.insert(at, STAGE["ranks"])
        for row, stage in zip(rows, stages, strict=True):
            row.insert(at, percent_text(stage.rank_wait))
    if figures.several_hosts(stages):
        head.insert(_AFTER_STATE, HOST)
        for row, stage in zip(rows, stages, strict=True):
            row.insert(_AFTER_STATE, clean(stage.host) or "?")
    return table(" ".join(head), rows, right)


def _stage_row(stage: StageInfo, ranked: bool) -> list[str]:
    memory, blocks = stage.memory, stage.kv_blocks
    binding = "*" if blocks.binding else ""
    age = None if stage.progress_age_ms is None else stage.progress_age_ms / 1000
    return [
        short(place_of(stage), ranked),
        stage.state if stage.cordon is None else f"{stage.state},cordoned",
        memory_bar(ratio(memory.used, memory.total), ratio(memory.limit, memory.total)),
        f"{bytes_text(memory.used)}/{bytes_text(memory.limit)}",
        f"{_count(blocks.used)}/{_count(blocks.mapped)}/{_count(blocks.capacity)}{binding}",
        f"{_count(stage.swap_blocks.used)}/{_count(stage.swap_blocks.total)}",
        f"{_count(stage.inbox)}>{_count(stage.outbox)}",
        ",".join(f"m{number}" for number in stage.micro_batches) or "-",
        ms_text(stage.step_ms.p50),
        percent_text(stage.idle_fraction),
        age_text(age),
        clean(operation(stage)),
    ]


def memory_bar(used: float | None, limit: float | None) -> str:
    """Return `[####...|..]` of a fixed range, 0 to 100 % of the device; `|` is the limit."""
    if used is None:
        return f"[{'?' * BAR}]"
    cells = ["#" if cell < round(used * BAR) else "." for cell in range(BAR)]
    if limit is not None and limit < 1:
        cells[min(int(limit * BAR), BAR - 1)] = "|"
    return f"[{''.join(cells)}]"


def pool_line(snapshot: Snapshot) -> str:
    """Return the blocks that are cached and free, and the requests by state."""
    queues = snapshot.queues
    first = snapshot.stages[0].kv_blocks if snapshot.stages else None
    cached, free = (_count(first.cached), _count(first.free)) if first else ("?", "?")
    tiers = f" find {queues.finding} fetch {queues.fetching}" if queues.finding or queues.fetching else ""
    return (
        f"POOL cached {cached} free {free} | wait {queues.waiting} run {queues.running} swap {queues.swapped} "
        f"held {queues.held} load {queues.loading}{tiers} | preemptions {snapshot.preemptions_total}"
    )


def request_lines(requests: Sequence[RequestInfo], where: dict[int, int] | None = None, stuck: str = "") -> list[str]:
    """Return one line a request under a head. `where`: the stage of each micro-batch; `stuck`: see `wording.why`."""
    rows = [
        [
            clean(request.id), clean(request.owner), request.state, age_text(request.age_s),
            str(request.prompt_tokens), str(request.output_tokens), str(request.blocks), str(request.swap_blocks),
            str(request.revision), clean(why(request, where or {}, stuck)),
        ]
        for request in requests
    ]  # fmt: skip
    return table(_REQUEST_HEAD, rows, ("AGE", "IN", "OUT", "BLK", "SWP", "REV"))


def finished_lines(requests: Sequence[FinishedInfo]) -> list[str]:
    """Return one line a request that has ended, under a head."""
    rows = [
        [
            clean(request.id), clean(request.owner), age_text(request.ended_s), age_text(request.took_s),
            str(request.prompt_tokens), str(request.output_tokens), figures.latency(request.queue_s),
            figures.latency(request.ttft_s), figures.latency_ms(request.itl_ms), figures.latency_ms(request.itl_p99_ms),
            str(request.preemptions),
            clean(ending_text(request.reason, None, request.by)),
        ]
        for request in requests
    ]  # fmt: skip
    return table(_FINISHED_HEAD, rows, ("ENDED", "TOOK", "IN", "OUT", "QUEUE", "TTFT", "ITL", "PRE"))


def latency_line(latency: Latency) -> str:
    """Return the quantiles of the last five minutes; empty while there are none."""
    parts = [
        f"{name} {' '.join(figures.quantiles(each, scale))}"
        for name, each, scale in (
            ("ttft", latency.ttft_s, 1e3), ("itl", latency.itl_ms, 1), ("queue", latency.queue_s, 1e3),
            ("prepare", latency.prepare_s, 1e3),
        ) if each.count
    ]  # fmt: skip
    return f"LATENCY p50 p90 p99 of {latency.window_s / 60:.0f} min: {' | '.join(parts)}" if parts else ""


def event_line(event: Event) -> str:
    """Return one event as a line with its local time and its level."""
    clock = wall_text(event.wall) if event.wall else "--:--:--"
    by = f" [{clean(event.by)}]" if event.by else ""
    return f"{clock} {event.seq:>6} {level_of(event).upper():<7} {clean(event.kind)}{by} {clean(event.text)}"


def explain_lines(snapshot: Snapshot) -> list[str]:
    """Return a sentence for each root with its evidence, then the affected stages, then the waits."""
    roots = [verdict for verdict in snapshot.verdicts if verdict.root]
    lines = [line for verdict in roots for line in (verdict_sentence(verdict), *_facts(verdict))]
    lines += [verdict_text(verdict) for verdict in snapshot.verdicts if not verdict.root]
    if snapshot.waits:
        lines.append("waits:")
    for wait in snapshot.waits:
        lines.append(clean(f"    {wait.waiter} waits for {wait.on}: {wait.what}, {age_text(wait.since_s)}"))
    return lines


def end_lines(ended: EndedEngine, incident: Incident | None, now: float) -> list[str]:
    """Return how an engine ended: the end, the incident that it ended in, the consequences folded under it."""
    lines = [ended_text(ended, now)]
    if incident is not None and not incident.info.over_wall:
        if follows_from(incident, ended.end):
            lines.append(f"    then: {clean(incident.fault.verdict.summary)}")
        else:
            lines += [verdict_text(incident.fault.verdict), *_facts(incident.fault.verdict)]
        lines += [f"    then: {text}" for text in consequences(incident)]
    elif incident is not None:
        lines.append(f"the last fault before, {incident_words(incident.info, now)}")
    return [*lines, f"log lines: ppconsole -e {ended.record.id} logs"]


def verdict_sentence(verdict: Verdict, *, over: bool = False) -> str:
    """Return stage, cause, summary, the most specific fact, and the suggested fix. `over`: of a fault that was."""
    best = next((fact for fact in verdict.evidence if fact.startswith(_TELLING)), next(iter(verdict.evidence), ""))
    known = f"; {clean(best)}" if best else ""
    return f"{verdict_text(verdict, over=over)}{known}" + (
        f"; try: {clean(verdict.suggest)}" if verdict.suggest else ""
    )


def _facts(verdict: Verdict) -> list[str]:
    return [f"    {clean(line)}" for line in evidence_lines(verdict)]


def stacks_lines(detail: StacksDetail) -> list[str]:
    """Return stacks, those that are the same in several stages once, the outlier first."""
    lines = [
        "pids: " + ", ".join(f"{who} {_count(pid)}" for who, pid in pids(detail)),
        *notes(detail),
    ]
    for group in grouped(detail):
        lines += ["", group.title, *(f"    {frame.strip()}" for frame in group.frames)]
    return lines


def detail_lines(detail: RequestDetail) -> list[str]:
    """Return the drill-down of one request."""
    per_token = ms_text(detail.inter_token_ms)
    rows = [
        ("request", clean(detail.id)),
        ("owner", clean(detail.owner)),
        ("state", f"{detail.state}{f': {clean(detail.why)}' if detail.why else ''}"),
        ("age", age_text(detail.age_s)),
        ("tokens", f"{detail.prompt_tokens} in, {detail.output_tokens} out, {detail.computed_tokens} computed, "
                   f"{detail.cached_tokens} from the prefix cache"),
        ("timing", f"prepared {figures.latency(detail.prepared_s)}, queued {figures.latency(detail.queued_s)}, "
                   f"first token {figures.latency(detail.first_token_s)}, "
                   f"per token {per_token}{_quantiles(detail)}, finished {age_text(detail.finished_s)}"),
        *([("from", sources_text(detail.sources, detail.prompt_tokens))] if detail.sources is not None else []),
        ("blocks", _numbers(detail.block_table)),
        ("shared", _numbers(detail.shared_blocks)),
        ("host", _numbers(detail.host_blocks)),
        ("in flight", _numbers(detail.in_flight, "m")),
        ("preempted", f"{detail.preemptions} times, swapped {detail.swaps} times"),
        ("priority", str(detail.priority)),
        ("revision", str(detail.revision)),
    ]  # fmt: skip
    lines = [f"{name:<10}{text}" for name, text in rows]
    lines += [f"{'history' if index == 0 else '':<10}{clean(line)}" for index, line in enumerate(detail.history)]
    if detail.prompt_text:
        lines += ["", f"> {clean(detail.prompt_text, newlines=True)}"]
    if detail.output_text:
        lines += ["", clean(detail.output_text, newlines=True)]
    return lines


def _quantiles(detail: RequestDetail) -> str:
    """Return median and 99th percentile between tokens, in words; empty before the second token."""
    if detail.itl_p50_ms is None:
        return ""
    return f" (p50 {figures.latency_ms(detail.itl_p50_ms)}, p99 {figures.latency_ms(detail.itl_p99_ms)})"


def engine_lines(rows: Sequence[tuple[EngineRecord, str]], now: float) -> list[str]:
    """Return one line an engine with its state under a head. `now`: Unix seconds."""
    head = "ID NAME STATE MODEL STAGES PID UP"
    body = [
        [
            record.id, clean(record.name), state, clean(record.model), str(record.pipeline_parallel_size),
            str(record.pid), age_text(now - record.started_wall),
        ]
        for record, state in rows
    ]  # fmt: skip
    return table(head, body, ("STAGES", "PID", "UP"))


def ended_lines(engines: Sequence[EndedEngine], now: float) -> list[str]:
    """Return one line an ended engine under a head: its end and the reason. `now`: Unix seconds."""
    body = [
        [
            one.record.id, clean(one.record.name), clean(one.record.model), str(one.record.pipeline_parallel_size),
            age_text(one.end.wall - one.record.started_wall), clock_text(one.end.wall, now).replace(" ", "-"),
            clean(one.end.reason),
        ]
        for one in engines
    ]  # fmt: skip
    return table("ID NAME MODEL STAGES UP ENDED REASON", body, ("STAGES", "UP"))


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


def _numbers(values: Sequence[int], prefix: str = "") -> str:
    shown = " ".join(f"{prefix}{value}" for value in values[:_NUMBERS_MOST])
    more = f" ... ({len(values)} in all)" if len(values) > _NUMBERS_MOST else ""
    return f"{shown}{more}" or "-"
