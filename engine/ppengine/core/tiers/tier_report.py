"""The part of a snapshot that is about stores and backends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ppengine.core.tiers.backends import Backend
from ppengine.core.tiers.store_desk import StoreDesk
from ppengine.core.tiers.store_records import StoreRecord
from ppengine.protocol.backend_fields import without_secrets
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.store_messages import BackendFigures
from ppengine.protocol.tiers import BackendInfo, BackendState, BreakerState, StoreInfo, TiersInfo

WINDOW_S = 2.0
"""Seconds of the rates."""
LEAST_S = 0.5
"""Seconds after which there are rates."""
_WORST: tuple[BackendState, ...] = ("broken", "unknown", "opening", "paused", "draining", "open")
_UNKNOWN: BackendState = "unknown"
_BREAKERS: tuple[BreakerState, ...] = ("open", "half-open", "closed")


@dataclass(eq=False)
class TierReport:
    """Keeps the byte counts of the last two seconds."""

    _desk: StoreDesk
    _clock: Callable[[], float]
    _marks: dict[str, deque[tuple[float, int, int]]] = field(init=False, default_factory=dict)

    def fill(self, info: TiersInfo) -> None:
        """Add stores, backends and jobs of this moment."""
        desk, links = self._desk, self._desk.links
        info.failed_fetches_total = desk.fetcher.failed_total
        info.dropped_total += desk.writer.dropped_total
        info.why_not_ready = links.why_not_ready
        info.ready = desk.ready
        if not len(desk.backends):
            return
        info.stores = [self._store(record) for record in links.records.values()]
        info.backends = [self._backend(backend) for backend in desk.backends]
        self._marks = {name: marks for name, marks in self._marks.items() if desk.backends.get(name) is not None}
        if links.pools is not None:
            desk.finder.explain(links.pools)
            desk.fetcher.explain(links.pools)

    def _store(self, record: StoreRecord) -> StoreInfo:
        now = self._clock()
        jobs, oldest = self._desk.jobs.owing(record.place)
        return StoreInfo(
            stage=record.place.stage, rank=record.place.rank, pid=record.pid,
            age_ms=None if record.seen is None else (now - record.seen) * 1e3,
            jobs=jobs, lag_ms=None if oldest is None else (now - oldest) * 1e3,
        )  # fmt: skip

    def _backend(self, backend: Backend) -> BackendInfo:
        name, config = backend.name, backend.config
        records = list(self._desk.links.records.values())
        figures = [record.figures[name] for record in records if name in record.figures]
        read = sum(record.total(name, "read_bytes") for record in records)
        written = sum(record.total(name, "written_bytes") for record in records)
        read_s, write_s = self._rates(name, read, written)
        return BackendInfo(
            name=name, kind=config.kind, url=without_secrets(config.url), write=config.write,
            state=self._state(backend, figures), breaker=_worst(one.breaker for one in figures),
            write_breaker=_worst(one.write_breaker for one in figures),
            error=next((one.error for one in figures if one.error), ""),
            quota_bytes=backend.quota_bytes,
            used_bytes=self._desk.links.used_bytes(name),
            hit_tokens_total=self._desk.hit_tokens(backend),
            read_bytes_total=read, written_bytes_total=written, read_bytes_s=read_s, write_bytes_s=write_s,
            read_ms=_slowest([(one.read_p50_ms, one.read_p99_ms, one.reads) for one in figures]),
            write_ms=_slowest([(one.write_p50_ms, one.write_p99_ms, one.writes) for one in figures]),
            queue=sum(one.queue for one in figures),
            errors_total=sum(record.total(name, "errors") for record in records),
            corrupt_total=sum(record.total(name, "corrupt") for record in records),
            evicted_total=sum(record.total(name, "evicted") for record in records),
            declined_total=backend.declined,
        )  # fmt: skip

    def _state(self, backend: Backend, figures: list[BackendFigures]) -> BackendState:
        """Return the state at the worst place; an order that the stores do not know yet counts."""
        now = self._clock()
        states: set[str] = {one.state for one in figures}
        if len(figures) < len(self._desk.links.records):
            states.add("opening")
        if not any(record.answers(now) for record in self._desk.links.records.values()):
            states = {"unknown"}
        state = next((one for one in _WORST if one in states), _UNKNOWN)
        if backend.paused and state != "unknown":
            return "paused"  # Stores do not open it before it is resumed.
        if state in ("open", "draining", "paused"):
            return "draining" if backend.draining else "open"
        return state

    def _rates(self, name: str, read: int, written: int) -> tuple[float | None, float | None]:
        now, marks = self._clock(), self._marks.setdefault(name, deque())
        marks.append((now, read, written))
        while len(marks) > 2 and now - marks[1][0] >= WINDOW_S:
            marks.popleft()
        then, read_then, written_then = marks[0]
        if now - then < LEAST_S:
            return None, None
        return (read - read_then) / (now - then), (written - written_then) / (now - then)


def _worst(breakers: Iterable[str]) -> BreakerState:
    states = set(breakers)
    return next((one for one in _BREAKERS if one in states), "closed")


def _slowest(quantiles: list[tuple[float, float, int]]) -> Quantiles:
    """Return the quantiles of the place with the largest median; -1: no call."""
    p50, p99, count = max(quantiles, default=(-1.0, -1.0, 0))
    return Quantiles(p50=p50, p99=p99, count=count) if p50 >= 0 else Quantiles()
