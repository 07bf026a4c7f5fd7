"""Stage rows: state letter, memory bar, KV blocks, swap, queues, micro-batch, step time, current operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.ranks import place_of, several
from ppconsole.model.units import UNKNOWN, count_text, percent_text
from ppconsole.view import figures, wording
from ppconsole.view.cells import FLEX, Cell, Column, Row, Seg, fit, header, place, row, runs, table_row
from ppconsole.view.marks import CORDONED, STAGE, faulty_places, stage_mark, state_word
from ppconsole.view.stage_rows import NONE_OPENED, RowKey, StageRow, fold, name_width
from ppconsole.view.wording import STAGE as TITLES

MAX_ROWS = 8
OLD_SAMPLE_MS = 2000.0
"""A stage whose sample is older than this is shown as old, even if the link is up."""

COLUMNS = (
    Column("mark", "", 1, 0),
    Column("stage", TITLES["stage"], 3, 0, ">"),
    Column("state", "S", 1, 0),
    Column("memory", TITLES["memory"], 9, 2, grow=15),
    Column("used", "USED", 4, 3, ">"),
    Column("kv", TITLES["kv"], 15, 1, grow=3),
    Column("swap", TITLES["swap"], 4, 9, ">"),
    Column("io", TITLES["io"], 3, 7, ">", grow=2),
    Column("micro", TITLES["micro"], 4, 6, ">", grow=2),
    Column("step", TITLES["step"], 4, 4, ">"),
    Column("idle", TITLES["idle"], 4, 8, ">"),
    Column("ranks", TITLES["ranks"], 5, 6, ">"),
    Column("op", TITLES["op"], 11, 5, grow=FLEX),
    Column("p99", "P99", 4, 11, ">"),
    Column("layers", "LAYERS", 7, 10),
    Column("pid", "PID", 7, 12, ">"),
    Column("host", "HOST", 8, 13),
    Column("device", "DEVICE", 10, 14),
    Column("age", TITLES["age"], 4, 1, ">"),
)

_HOST_PRIORITY, _HOST_GROWS = 2, 12
_AFTER_STATE = 3
"""Priority and growth of the host's column where stages are on several hosts, and its place: behind the state."""
_HOST = next(place for place, column in enumerate(COLUMNS) if column.key == "host")
_WIDE_FROM = 100
_WIDER = {"op": 20, "state": 9}
_RANK_OP = 2
"""More cells for `main:reduce<0.1 m18411`."""
_WIDE_COLUMNS = tuple(
    column._replace(width=_WIDER.get(column.key, column.width), title=TITLES.get(column.key, column.title))
    for column in COLUMNS
)
"""With room the state's word and the whole operation come before columns that rarely change."""


def bar(stage: StageInfo, width: int) -> tuple[Seg, ...]:
    """Return the memory bar, 0 to the device's total: held and in use, mapped but free KV, room, limit mark."""
    memory, blocks = stage.memory, stage.kv_blocks
    if not memory.total or memory.used is None:
        return (("?".ljust(width, "·"), "dim"),)
    free = 0.0
    if memory.kv_mapped and blocks.mapped and blocks.free is not None:
        free = memory.kv_mapped * min(1.0, (blocks.free + (blocks.cached or 0)) / blocks.mapped)
    used = round(width * min(1.0, max(0.0, memory.used - free) / memory.total))
    shade = round(width * min(1.0, memory.used / memory.total))
    glyphs = ["█"] * used + ["▒"] * (shade - used) + ["·"] * (width - max(used, shade))
    styles = ["bar.used"] * used + ["bar.free"] * (shade - used) + ["bar.room"] * (width - max(used, shade))
    if memory.limit is not None:
        at = min(width - 1, round(width * memory.limit / memory.total))
        glyphs[at] = "│"
        styles[at] = "bar.limit" if memory.used <= memory.limit else "bar.over"
    return tuple(runs(zip(glyphs, styles, strict=True)))


def kv_figures(stage: StageInfo) -> Cell:
    """Return used/mapped/capacity; `*` marks the stage that sets the minimum."""
    kv = stage.kv_blocks
    text = "/".join(count_text(value) for value in (kv.used, kv.mapped, kv.capacity))
    full = kv.used is not None and kv.mapped is not None and kv.used + (kv.cached or 0) > 0.98 * kv.mapped
    return (text + ("*" if kv.binding else ""), "warn" if full and (kv.free or 0) == 0 else "")


def rows(
    snapshot: Snapshot, width: int, limit: int = MAX_ROWS, selected: RowKey | None = None,
    opened: Set[int] = NONE_OPENED,
) -> list[Row]:  # fmt: skip
    """Return the header, the rows and, if there are more than `limit`, one row for the rest.

    `opened`: stages with a row a rank.
    """
    shown, rest = fold(snapshot, limit, opened)
    lines = table(snapshot, shown, width, selected)
    if rest:
        faulty = faulty_places(snapshot)
        states = Counter(stage_mark(each.info, faulty).text for each in rest)
        known = "  ".join(f"{number} {letter}" for letter, number in sorted(states.items()))
        lines.append(row((fit(f"   … {len(rest)} more: {known}", width), "dim")))
    return lines


def table(snapshot: Snapshot, shown: Sequence[StageRow], width: int, selected: RowKey | None = None) -> list[Row]:
    """Return the header and the rows `shown`."""
    placed = place(_columns(snapshot, width), width)
    faulty = faulty_places(snapshot)
    lines = [header(placed)]
    in_words = width >= _WIDE_FROM
    widths = {each.column.key: each.width for each in placed}
    for each in shown:
        old = (each.info.sample_age_ms or 0.0) > OLD_SAMPLE_MS
        mine = each.key == selected
        cells = _cells(each, faulty, widths, mine, in_words)
        line = table_row(placed, cells, fill="select" if mine else "")
        lines.append(_as_old(line) if old else line)
    return lines


def _end_of(host: str, width: int) -> str:
    """Return a host's name, or as much of its end as there is room for: hosts of a cluster begin alike."""
    return host if len(host) <= width else f"…{host[len(host) - width + 1 :]}"


def _columns(snapshot: Snapshot, width: int) -> Sequence[Column]:
    """Return the columns for `width`; the state has room for a mark where a stage is cordoned."""
    columns = COLUMNS if width < _WIDE_FROM else _WIDE_COLUMNS
    if figures.several_hosts(snapshot.stages):
        host = columns[_HOST]._replace(priority=_HOST_PRIORITY, grow=_HOST_GROWS)
        columns = (*columns[:_AFTER_STATE], host, *(one for one in columns[_AFTER_STATE:] if one.key != host.key))
    wider = {"state": int(any(stage.cordon is not None for stage in snapshot.stages))}
    if several(snapshot):
        wider["stage"] = max(0, name_width(snapshot) - columns[1].width)
        wider["op"] = _RANK_OP if width >= _WIDE_FROM else 0
    else:
        columns = tuple(one for one in columns if one.key != "ranks")
    return [column._replace(width=column.width + wider.get(column.key, 0)) for column in columns]


def _as_old(line: Row) -> Row:
    """Return a row whose sample is old: `~` in front, everything grey."""
    return Row((("~", "warn"), *((text, "dim") for text, _ in line.segs[1:])), line.fill)


def _cells(
    shown: StageRow, faulty: Set[Place], widths: Mapping[str, int], selected: bool, in_words: bool
) -> dict[str, Cell]:
    """Return the cells of one stage row. `widths`: by column; `in_words`: the state as a word, else its letter."""
    stage = shown.info
    mark = stage_mark(stage, faulty)
    state = state_word(stage.state, mark) if in_words else mark.text
    bad = place_of(stage) in faulty
    first = next(iter(stage.micro_batches), None)
    micro = figures.NOTHING if first is None else figures.micro_batch(first, widths.get("micro", 0))
    flow = f"{count_text(stage.inbox)}>{count_text(stage.outbox)}"
    idle = None if stage.idle_fraction is None else 100 * stage.idle_fraction
    slow = (stage.progress_age_ms or 0) > 2000 and stage.state not in ("idle", "loading")
    layers = f"{stage.layers[0]}-{stage.layers[1] - 1}" if len(stage.layers) == 2 else UNKNOWN
    style = "bad" if bad else ""
    over = stage.memory.used is not None and stage.memory.limit is not None and stage.memory.used > stage.memory.limit
    return {
        "mark": ("!", "bad") if bad else (">" if selected else " ", "accent"),
        "stage": (shown.name, style or "strong"),
        "state": ((state, mark.style), (CORDONED, "warn")) if stage.cordon else (state, mark.style),
        "memory": bar(stage, widths.get("memory", 0)),
        "used": (figures.percent(stage.memory.used, stage.memory.total), "bad" if over else ""),
        "kv": kv_figures(stage),
        "swap": (count_text(stage.swap_blocks.used), "swap" if stage.swap_blocks.used else "dim"),
        "io": (flow, ""),
        "micro": (micro, ""),
        "step": (figures.millis(stage.step_ms.p50), ""),
        "p99": (figures.millis(stage.step_ms.p99), "dim"),
        "idle": (UNKNOWN if idle is None else f"{idle:.0f}%", "dim"),
        "ranks": (percent_text(stage.rank_wait), "dim"),
        "op": (wording.operation(stage, brief=widths.get("op", 0) < 16), style or STAGE.get(stage.state, mark).style),
        "layers": (layers, "dim"),
        "pid": (UNKNOWN if stage.pid is None else str(stage.pid), "dim"),
        "host": (_end_of(stage.host, widths.get("host", 0)), "dim"),
        "device": (stage.device.name or stage.device.kind, "dim"),
        "age": (figures.age(stage.progress_age_ms), style or ("warn" if slow else "dim")),
    }
