"""Turns the core's figures of stores and backends, and the ends of stores, into evidence with their ages."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping

from ppengine.diagnosis.budgets import CHURN_LEAST, STORE_SETTLES_S, TIER_WINDOW_S
from ppengine.diagnosis.tier_evidence import BackendEvidence, StoreEvidence, TierEvidence
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.tiers import BackendInfo, StoreInfo, TiersInfo

_ROLE = re.compile(r"store(\d+)(?:\.(\d+))?")
_LOOK_NS = 1_000_000_000
"""Nanoseconds between two totals that are kept."""
_Totals = tuple[int, int, int, int]
"""Corrupt and evicted shards, tokens loaded, and calls that failed."""


class _BackendHistory:
    """The totals of the last minute, and since when it is broken."""

    def __init__(self) -> None:
        self._totals: deque[tuple[int, _Totals]] = deque()
        self._last: _Totals | None = None
        self._comes = False
        """Whether stores have still to report to a new core. Its totals grow by theirs, which is no news."""
        self._broken_ns: int | None = None
        self._corrupt_ns: int | None = None
        self._failed_ns: int | None = None
        self._churns_ns: int | None = None
        self._error = ""
        """Newest error, also if calls have succeeded since."""

    def evidence(self, now_ns: int, info: BackendInfo) -> BackendEvidence:
        """Enter the present figures and return the evidence."""
        broken = info.state == "broken" or {info.breaker, info.write_breaker} != {"closed"}
        self._broken_ns = (self._broken_ns or now_ns) if broken else None
        totals = info.corrupt_total, info.evicted_total, info.hit_tokens_total, info.errors_total
        self._error = info.error or self._error
        last = self._last
        comes = self._comes or last is None or any(map(int.__lt__, totals, last))
        self._comes = comes and info.state in ("opening", "unknown")
        if comes or last is None:
            self._totals.clear()
            self._corrupt_ns = self._failed_ns = None
        else:
            self._corrupt_ns = now_ns if totals[0] > last[0] else self._corrupt_ns
            self._failed_ns = now_ns if totals[3] > last[3] else self._failed_ns
        self._last = totals
        if not self._totals or now_ns - self._totals[-1][0] >= _LOOK_NS:
            self._totals.append((now_ns, totals))
        horizon = now_ns - int(TIER_WINDOW_S * 1e9)
        while len(self._totals) > 1 and self._totals[1][0] <= horizon:
            self._totals.popleft()
        first_ns, first = self._totals[0]
        evicted, hits = totals[1] - first[1], totals[2] - first[2]
        # Half the number ends it, or it would begin and end with each shard.
        churns = first_ns <= horizon and not hits and evicted >= (CHURN_LEAST // 2 if self._churns_ns else CHURN_LEAST)
        self._churns_ns = (self._churns_ns or horizon) if churns else None
        known = [value for value in (info.read_ms.p99, info.write_ms.p99) if value is not None]
        return BackendEvidence(
            name=info.name, state=info.state, breaker=info.breaker, write_breaker=info.write_breaker,
            error=self._error,
            broken_for_s=_since(now_ns, self._broken_ns), errors=totals[3],
            errors_new=totals[3] - first[3], errors_ago_s=_since(now_ns, self._failed_ns), corrupt=totals[0],
            corrupt_new=totals[0] - first[0], corrupt_ago_s=_since(now_ns, self._corrupt_ns),
            evicted_new=evicted, churns_for_s=_since(now_ns, self._churns_ns),
            fill=None if info.used_bytes is None else info.used_bytes / max(1, info.quota_bytes), queue=info.queue,
            slowest_ms=max(known, default=None),
        )  # fmt: skip


class TierHistory:
    """Remembers when stores began and ended, and the totals of backends."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._seen: dict[tuple[str, int, bool], int] = {}
        """Time when a process of a role was first seen to run, or to be gone, by role, pid and which."""
        self._backends: dict[str, _BackendHistory] = {}

    def look(
        self, now_ns: int, tiers: TiersInfo | None, report_ns: int, listed: Iterable[ProcessInfo],
        states: Mapping[int, str | None],
    ) -> TierEvidence | None:  # fmt: skip
        """Return the evidence; None without tiers. `report_ns`: time of the core's report; `states`: by pid."""
        if tiers is None:
            self._seen.clear()
            self._backends.clear()
            return None
        processes = _newest(listed)
        keys = [(each.role, each.pid, each.exit_code is None) for each in processes.values()]
        self._seen = {key: self._seen.get(key, now_ns) for key in keys}
        since_report = (now_ns - report_ns) / 1e9
        stores = tuple(
            self._store(now_ns, info, processes.get(_role(info)), since_report, states) for info in tiers.stores
        )
        kept = {info.name: self._backends.get(info.name) or _BackendHistory() for info in tiers.backends}
        self._backends = kept
        return TierEvidence(
            stores=stores, backends=tuple(kept[info.name].evidence(now_ns, info) for info in tiers.backends)
        )

    def _store(
        self, now_ns: int, info: StoreInfo, process: ProcessInfo | None, since_report: float,
        states: Mapping[int, str | None],
    ) -> StoreEvidence:  # fmt: skip
        base = StoreEvidence(
            stage=info.stage, rank=info.rank if self._ranks > 1 else None, pid=info.pid, jobs=info.jobs,
            lag_s=None if info.lag_ms is None else info.lag_ms / 1e3,
            age_s=None if info.age_ms is None else info.age_ms / 1e3 + since_report,
        )  # fmt: skip
        if process is None:
            return base
        runs = process.exit_code is None
        since = (now_ns - self._seen[process.role, process.pid, runs]) / 1e9
        present = runs and info.pid == process.pid
        return StoreEvidence(
            stage=base.stage, rank=base.rank, pid=process.pid, node=process.node, exit_code=process.exit_code,
            exit_detail=process.detail, calls=process.calls,
            process_state=states.get(process.pid) if runs and not process.node else None,
            gone_for_s=None if runs else since, absent_for_s=since if runs and info.pid != process.pid else None,
            # A process that has just begun is not judged by the figures of the one before it.
            age_s=base.age_s if present and since >= STORE_SETTLES_S else None,
            jobs=base.jobs if present else 0, lag_s=base.lag_s if present else None,
        )  # fmt: skip


def is_store(process: ProcessInfo) -> bool:
    """Return whether a process is a store."""
    return _ROLE.fullmatch(process.role) is not None


def _role(info: StoreInfo) -> str:
    return f"store{info.stage}.{info.rank}"


def _newest(listed: Iterable[ProcessInfo]) -> dict[str, ProcessInfo]:
    """Return the process of each place by its role with a rank: a running one, otherwise the last one listed."""
    found: dict[str, ProcessInfo] = {}
    for process in listed:
        if (role := _ROLE.fullmatch(process.role)) is None:
            continue
        name = f"store{role[1]}.{role[2] or 0}"
        known = found.get(name)
        if known is None or known.exit_code is not None or process.exit_code is None:
            found[name] = process
    return found


def _since(now_ns: int, at_ns: int | None) -> float | None:
    return None if at_ns is None else (now_ns - at_ns) / 1e9
