"""The Tiers screen as rows: device, host and backends of KV blocks, the stores, and requests that wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.tiers import BackendInfo, StoreInfo, TiersInfo

from ppconsole.model.safe import clean
from ppconsole.model.tier_rates import HostRates
from ppconsole.model.units import UNKNOWN, bytes_text, count_text, percent_text, ratio
from ppconsole.view import figures
from ppconsole.view.cells import EMPTY, FLEX, Cell, Column, Placed, Row, Seg, clip, fit, fitted, header, place, row
from ppconsole.view.cells import table_row as made_row
from ppconsole.view.tier_bars import backend_bar, device_bar, host_bar

NO_TIERS = "no KV tiers: set tiers.host to true in the profile and start the engine again"
NO_BACKENDS = "no backends: store add, or tiers.backends of the profile, names one"
_NOTHING = figures.NOTHING
STATE_STYLES = {
    "opening": "info", "open": "ok", "broken": "bad", "paused": "warn", "draining": "warn", "unknown": "warn",
}  # fmt: skip
BREAKER_STYLES = {"closed": "dim", "half-open": "warn", "open": "bad"}
TIERS = (
    Column("name", "TIER", 8, 0),
    Column("state", "STATE", 8, 3),
    Column("bar", "USE", 10, 7, grow=30),
    Column("used", "USED", 5, 2, ">"),
    Column("size", "SIZE", 5, 2, ">"),
    Column("hit", "HIT", 4, 1, ">"),
    Column("tokens", "TOKENS", 6, 5, ">"),
    Column("in", "IN/S", 5, 4, ">"),
    Column("out", "OUT/S", 5, 4, ">"),
    Column("in_total", "IN", 5, 8, ">"),
    Column("out_total", "OUT", 5, 9, ">"),
)
BACKENDS = (
    Column("name", "BACKEND", 8, 0),
    Column("breaker", "R-BREAKER", 9, 1),
    Column("write_breaker", "W-BREAKER", 9, 1),
    Column("r50", "R50", 5, 3, ">"),
    Column("r99", "R99", 5, 2, ">"),
    Column("w50", "W50", 5, 5, ">"),
    Column("w99", "W99", 5, 4, ">"),
    Column("queue", "QUEUE", 5, 6, ">"),
    Column("errors", "ERR", 4, 1, ">"),
    Column("corrupt", "BAD", 4, 1, ">"),
    Column("declined", "DECL", 4, 7, ">"),
    Column("evicted", "EVICT", 5, 8, ">"),
    Column("write", "WRITE", 7, 9),
    Column("kind", "KIND", 6, 10),
    Column("url", "URL", 8, 11, grow=FLEX),
)
STORES = (
    Column("place", "STORE", 5, 0),
    Column("age", "AGE", 5, 0, ">"),
    Column("jobs", "JOBS", 4, 0, ">"),
    Column("lag", "LAG", 5, 0, ">"),
)
_STORE_CELLS = 26
"""Cells of one store; as many stand side by side as fit."""
_OLD_MS = 1500.0
"""A store sends its figures twice a second."""
_LATE_MS = 2000.0
_NAME_MOST = 20
_WIDE_FROM = 100
_WIDE = {"in_total", "out_total", "evicted", "write", "kind", "url"}


def rows(
    snapshot: Snapshot | None, width: int, selected: str | None = None, rates: HostRates | None = None
) -> list[Row]:
    """Return the page. Both rows of the backend `selected` are marked. `rates`: of the host, from several snapshots."""
    if snapshot is None:
        return [row(("  waiting for the first sample", "dim"))]
    tiers = snapshot.tiers
    if tiers is None and snapshot.engine.state == "loading":
        return [row(("  the engine is loading: its KV tiers are not known yet", "dim"))]
    if tiers is None:
        return [clip(row((f"  {NO_TIERS}", "dim")), width)]
    found = [*_head(tiers, width), *_tier_rows(snapshot, tiers, width, selected, rates or HostRates()), EMPTY]
    if tiers.backends:
        found += [*_backend_rows(tiers.backends, width, selected), EMPTY]
    else:
        found.append(clip(row((f"  {NO_BACKENDS}", "dim")), width))
    if tiers.stores:
        found += store_rows(tiers.stores, width)
    return found


def row_of(tiers: TiersInfo, name: str | None) -> int:
    """Return the number of the first row of a backend; 0 without one."""
    names = [backend.name for backend in tiers.backends]
    return _above(tiers) + names.index(name) if name in names else 0


def _above(tiers: TiersInfo) -> int:
    """Return the rows above the first backend: the head, the titles, device and host."""
    return len(_head(tiers, _WIDE_FROM)) + 3


def _head(tiers: TiersInfo, width: int) -> list[Row]:
    """Return the slots of the host, the requests that wait for chunks, and why backends are not used."""
    segs: list[Seg] = [(" slots ", "dim"), (count_text(tiers.slots), "")]
    free = max(0, tiers.slots - tiers.slots_swapped - tiers.slots_cached - tiers.slots_moving)
    for name, count, style in (
        ("swapped", tiers.slots_swapped, "swap"), ("cached", tiers.slots_cached, ""),
        ("moving", tiers.slots_moving, "info"), ("free", free, ""),
    ):  # fmt: skip
        segs += [(f" {name} ", "dim"), (count_text(count), style if count else "dim")]
    if tiers.slots_quarantined:
        segs += [(" quarantined ", "dim"), (count_text(tiers.slots_quarantined), "warn")]
    requests: list[Seg] = []
    for name, count, style in (
        ("finding", tiers.finding, "info"), ("fetching", tiers.fetching, "info"),
        ("short fetches", tiers.failed_fetches_total, "warn"), ("evicted", tiers.evicted_total, ""),
        ("dropped", tiers.dropped_total, "warn"),
    ):  # fmt: skip
        requests += [(f" {name} ", "dim"), (count_text(count), style if count else "dim")]
    found = [clip(Row(tuple(segs)), width), clip(Row(tuple(requests)), width)]
    if tiers.backends and not tiers.ready:
        why = clean(tiers.why_not_ready) or "the reason is not known"
        found.append(clip(row((" backends are not used: ", "warn"), (why, "warn")), width))
    return [*found, EMPTY]


def _tier_rows(snapshot: Snapshot, tiers: TiersInfo, width: int, selected: str | None, rates: HostRates) -> list[Row]:
    """Return a row a tier, and rows of tokens of removed backends and of computed ones; shares add up to 100 %."""
    names = ["computed", *(clean(backend.name) for backend in tiers.backends)]
    placed = _placed(TIERS, names, width)
    bar = next((each.width for each in placed if each.column.key == "bar"), 0)
    total = tiers.prompt_tokens_total
    blank: dict[str, Cell] = {column.key: ("", "") for column in TIERS}
    device = {
        **blank, "name": ("device", "strong"), **_device(snapshot, bar), **_share(tiers.device_hit_tokens_total, total),
    }  # fmt: skip
    held = tiers.slots_swapped + tiers.slots_cached + tiers.slots_moving
    host = {
        **blank, "name": ("host", "strong"), "bar": host_bar(tiers, bar),
        "used": (bytes_text(held * tiers.slot_bytes), ""), "size": (bytes_text(tiers.slots * tiers.slot_bytes), ""),
        **_share(tiers.host_hit_tokens_total, total), **_bytes(rates.in_s, rates.out_s),
        "in_total": (bytes_text(tiers.in_bytes_total), "dim"), "out_total": (bytes_text(tiers.out_bytes_total), "dim"),
    }  # fmt: skip
    computed = {**blank, "name": ("computed", "dim"), **_share(tiers.computed_tokens_total, total)}
    lines = [_titles(placed), _line(placed, device), _line(placed, host)]
    for backend in tiers.backends:
        state = clean(backend.state)
        cells = {
            **blank, "name": (clean(backend.name), "strong"), "state": (state, STATE_STYLES.get(state, "info")),
            "bar": backend_bar(backend, bar), "used": (bytes_text(backend.used_bytes), ""),
            "size": (bytes_text(backend.quota_bytes), ""), **_share(backend.hit_tokens_total, total),
            **_bytes(backend.read_bytes_s, backend.write_bytes_s),
            "in_total": (bytes_text(backend.read_bytes_total), "dim"),
            "out_total": (bytes_text(backend.written_bytes_total), "dim"),
        }  # fmt: skip
        lines.append(_line(placed, cells, chosen=backend.name == selected))
    if (gone := total - _known_tokens(tiers)) > 0:
        lines.append(_line(placed, {**blank, "name": ("removed", "dim"), **_share(gone, total)}))
    return [*lines, _line(placed, computed)]


def _known_tokens(tiers: TiersInfo) -> int:
    """Return the tokens of all rows; those of a backend that was removed are missing."""
    backends = sum(backend.hit_tokens_total for backend in tiers.backends)
    return tiers.device_hit_tokens_total + tiers.host_hit_tokens_total + backends + tiers.computed_tokens_total


def _device(snapshot: Snapshot, bar: int) -> dict[str, Cell]:
    """Return the blocks of the stage that has the least free."""
    known = [each.kv_blocks for each in snapshot.stages if each.kv_blocks.used is not None]
    if not known:
        return {"bar": (UNKNOWN, "dim"), "used": (UNKNOWN, ""), "size": (UNKNOWN, "")}
    blocks = max(known, key=lambda each: each.used or 0)
    return {
        "bar": device_bar(blocks, bar), "used": (count_text(blocks.used), ""), "size": (count_text(blocks.mapped), ""),
    }  # fmt: skip


def _share(tokens: int, total: int) -> dict[str, Cell]:
    """Return tokens and their share of the tokens of all starts; `-` while none has started."""
    share = percent_text(ratio(tokens, total)) if total else _NOTHING
    return {"hit": (share, "" if tokens else "dim"), "tokens": (count_text(tokens), "" if tokens else "dim")}


def _bytes(in_s: float | None, out_s: float | None) -> dict[str, Cell]:
    return {"in": (bytes_text(in_s), "" if in_s else "dim"), "out": (bytes_text(out_s), "" if out_s else "dim")}


def _backend_rows(backends: Sequence[BackendInfo], width: int, selected: str | None) -> list[Row]:
    """Return a row a backend with its latencies and troubles, and its newest error below it."""
    placed = _placed(BACKENDS, [clean(backend.name) for backend in backends], width)
    lines = [_titles(placed)]
    for backend in backends:
        chosen = backend.name == selected
        lines.append(_line(placed, _trouble_cells(backend), chosen=chosen))
        if backend.error:
            text = clip(row(("   ", ""), (clean(backend.error), "bad")), width)
            lines.append(Row(text.segs, "select" if chosen else ""))
    return lines


def _trouble_cells(backend: BackendInfo) -> dict[str, Cell]:
    """Return the cells of latencies and counts of a backend."""
    return {
        "name": (clean(backend.name), "strong"), "breaker": breaker_text(backend.breaker),
        "write_breaker": breaker_text(backend.write_breaker),
        "r50": (_ms(backend.read_ms.p50, backend.read_ms), ""), "r99": (_ms(backend.read_ms.p99, backend.read_ms), ""),
        "w50": (_ms(backend.write_ms.p50, backend.write_ms), ""),
        "w99": (_ms(backend.write_ms.p99, backend.write_ms), ""),
        "queue": _count(backend.queue, ""), "errors": _count(backend.errors_total, "warn"),
        "corrupt": _count(backend.corrupt_total, "bad"), "declined": _count(backend.declined_total, ""),
        "evicted": _count(backend.evicted_total, ""), "write": (clean(backend.write), "dim"),
        "kind": (clean(backend.kind), "dim"), "url": (clean(backend.url), "dim"),
    }  # fmt: skip


def breaker_text(breaker: str) -> Seg:
    """Return a breaker with its style."""
    text = clean(breaker)
    return text, BREAKER_STYLES.get(text, "info")


def _ms(value: float | None, found: Quantiles) -> str:
    """Return a quantile; `?` for one that is not known although there were calls."""
    return UNKNOWN if value is None and found.count else figures.latency_ms(value)


def _count(count: int, style: str) -> Cell:
    return count_text(count), style if count else "dim"


def store_rows(stores: Sequence[StoreInfo], width: int) -> list[Row]:
    """Return the stores by place, as many side by side as fit: age of their figures, jobs, the oldest job."""
    placed = place(STORES, _STORE_CELLS - 2)
    across = max(1, (width - 1) // _STORE_CELLS)
    titles = header(placed).segs[0][0]
    count = min(across, len(stores))
    lines = [row((fit(" " + "  ".join(f"{titles:<{_STORE_CELLS - 2}}" for _ in range(count)), width), ""), fill="head")]
    for start in range(0, len(stores), across):
        segs: list[Seg] = [(" ", "")]
        for store in stores[start : start + across]:
            cells = made_row(placed, store_cells(store)).segs
            used = sum(each.width for each in placed) + len(placed) - 1
            segs += [*cells, (" " * (_STORE_CELLS - used), "")]
        lines.append(clip(Row(tuple(segs)), width))
    return lines


def store_cells(store: StoreInfo) -> dict[str, Cell]:
    """Return the cells of one store."""
    lag, late = store.lag_ms, store.age_ms is None or store.age_ms > _OLD_MS
    age: Cell = ("none", "bad") if store.pid is None else (figures.age(store.age_ms), "bad" if late else "")
    return {
        "place": (f"{store.stage}.{store.rank}", "strong"),
        "age": age,
        "jobs": _count(store.jobs, ""),
        "lag": (figures.latency_ms(lag), "warn" if lag is not None and lag > _LATE_MS else "dim"),
    }  # fmt: skip


def _placed(columns: Sequence[Column], names: Sequence[str], width: int) -> list[Placed]:
    left_out = set() if width >= _WIDE_FROM else _WIDE
    shown = fitted([column for column in columns if column.key not in left_out], {"name": names}, _NAME_MOST)
    return place(shown, width - 1)


def _titles(placed: Sequence[Placed]) -> Row:
    return row((" " + header(placed).segs[0][0], ""), fill="head")


def _line(placed: Sequence[Placed], cells: dict[str, Cell], *, chosen: bool = False) -> Row:
    return Row(((">" if chosen else " ", "accent"), *made_row(placed, cells).segs), "select" if chosen else "")
