"""One backend in full: state, figures, stores, events."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.snapshot import Event, Snapshot
from ppengine.protocol.tiers import BackendInfo

from ppconsole.model.safe import clean
from ppconsole.model.units import bytes_text, count_text
from ppconsole.view import figures
from ppconsole.view.cells import EMPTY, Row, row
from ppconsole.view.drilldown import field, grid, heading
from ppconsole.view.events import event_rows
from ppconsole.view.tiers_page import STATE_STYLES, breaker_text, store_rows

EVENTS_MOST = 200


def rows(snapshot: Snapshot, name: str, events: Iterable[Event], width: int) -> list[Row]:
    """Return everything about a backend, the newest events first; nothing if it is not there."""
    tiers = snapshot.tiers
    backend = next((each for each in tiers.backends if each.name == name), None) if tiers is not None else None
    if tiers is None or backend is None:
        return []
    found = [
        heading("STATE", width),
        *field("state", clean(backend.state), STATE_STYLES.get(backend.state, ""), width),
        *field("read breaker", *breaker_text(backend.breaker), width),
        *field("write breaker", *breaker_text(backend.write_breaker), width),
    ]
    if backend.error:
        found += field("newest error", clean(backend.error), "bad", width)
    if not tiers.ready:
        found += field("not used", clean(tiers.why_not_ready) or "the reason is not known", "warn", width)
    found += [*field("place", clean(backend.url) or "-", "", width), *grid(_figures(backend), width)]
    found += [EMPTY, heading("CALLS  of the slowest place", width), *grid(_calls(backend), width), EMPTY]
    found += store_rows(tiers.stores, width) if tiers.stores else []
    mine = [event for event in events if of_backend(event, name)][-EVENTS_MOST:]
    found += [EMPTY, heading("EVENTS", width)]
    shown = [line for event in reversed(mine) for line in event_rows(event, width)]
    return found + (shown or [row(("  none yet", "dim"))])


def of_backend(event: Event, name: str) -> bool:
    """Return whether an event is about a backend: one of a store or a verb that has its name as a word."""
    about = event.kind.startswith(("store.", "backend.", "tiers.", "op.")) or "store" in event.text
    return about and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", event.text) is not None


def _figures(backend: BackendInfo) -> list[tuple[str, str]]:
    return [
        ("kind", clean(backend.kind)), ("written are", clean(backend.write)),
        ("used", bytes_text(backend.used_bytes)), ("quota", bytes_text(backend.quota_bytes)),
        ("hit tokens", count_text(backend.hit_tokens_total)), ("declined", count_text(backend.declined_total)),
        ("read", bytes_text(backend.read_bytes_total)), ("written", bytes_text(backend.written_bytes_total)),
        ("read/s", bytes_text(backend.read_bytes_s)), ("written/s", bytes_text(backend.write_bytes_s)),
        ("errors", count_text(backend.errors_total)), ("corrupt", count_text(backend.corrupt_total)),
        ("evicted", count_text(backend.evicted_total)), ("queue", count_text(backend.queue)),
    ]  # fmt: skip


def _calls(backend: BackendInfo) -> list[tuple[str, str]]:
    return [("read", _quantiles(backend.read_ms)), ("write", _quantiles(backend.write_ms))]


def _quantiles(found: Quantiles) -> str:
    values = zip(("p50", "p90", "p99"), figures.quantiles(found, 1.0), strict=True)
    return " ".join(f"{name} {value}" for name, value in values if value != figures.NOTHING) or figures.NOTHING
