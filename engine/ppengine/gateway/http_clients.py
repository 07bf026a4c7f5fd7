"""Clients of the HTTP port over all its processes: sums, rates and quantiles."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from ppengine.common.durations import quantiles_of
from ppengine.gateway.helper_watch import Sign
from ppengine.protocol.clients import ClientCounts, ClientInfo, ClientRule, HttpReport
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.snapshot import MAX_CLIENTS

RATE_S, AWAY_S = 10.0, 10.0
"""Seconds of the rates, and seconds without a report after which a process is gone."""
_Key = tuple[str, str]


@dataclass(slots=True)
class _Process:
    """The newest report of one process, and its totals of the last `RATE_S` seconds."""

    report: HttpReport
    marks: dict[_Key, deque[tuple[float, int, int]]] = field(default_factory=dict)
    """Time, requests and tokens, by key and route."""

    def take(self, report: HttpReport) -> None:
        self.report = report
        now = report.mono_ns / 1e9
        for one in report.clients:
            marks = self.marks.setdefault((one.key, one.route), deque())
            if marks and marks[-1][1] > one.requests:
                marks.clear()  # another process has its role
            marks.append((now, one.requests, one.tokens))
            while now - marks[0][0] > RATE_S:
                marks.popleft()

    @property
    def gone_ns(self) -> int:
        """Time from which it is gone, unless it reports before."""
        return self.report.mono_ns + int(AWAY_S * 1e9)

    def rates(self, key: _Key) -> tuple[float, float] | None:
        """Return requests and tokens a second; None before the second report."""
        marks = self.marks[key]
        (begin, requests, tokens), (end, newest, written) = marks[0], marks[-1]
        return None if end <= begin else ((newest - requests) / (end - begin), (written - tokens) / (end - begin))


class HttpClients:
    """Takes the reports of HTTP processes."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._infos: list[ClientInfo] = []
        """Made once a report: snapshots are made ten times as often."""
        self._rules: list[ClientRule] = []
        self._until_ns = 0
        """Time at which the oldest process among them is gone."""

    def take(self, report: HttpReport) -> None:
        """Take one report."""
        process = self._processes.setdefault(report.role, _Process(report))
        process.take(report)
        self._until_ns = 0

    def signs(self) -> dict[str, Sign]:
        """Return the time of the newest report of each process, and the answers that it had open."""
        reports = {role: process.report for role, process in self._processes.items()}
        return {role: Sign(each.mono_ns, sum(one.open for one in each.clients)) for role, each in reports.items()}

    def infos(self, mono_ns: int, rules: list[ClientRule]) -> list[ClientInfo]:
        """Return all clients at `mono_ns`, those with the most open requests and tokens first; last, other `rules`."""
        if mono_ns > self._until_ns or rules != self._rules:
            self._rules = rules
            self._infos = self._made(mono_ns, {rule.client: rule for rule in rules if rule.text})
        return self._infos

    def _made(self, mono_ns: int, rules: dict[str, ClientRule]) -> list[ClientInfo]:
        parts: dict[_Key, list[tuple[ClientCounts, tuple[float, float] | None]]] = {}
        present = [process for process in self._processes.values() if process.gone_ns >= mono_ns]
        self._until_ns = min((process.gone_ns for process in present), default=mono_ns)
        for process in present:
            for one in process.report.clients:
                key = one.key, one.route
                parts.setdefault(key, []).append((one, process.rates(key)))
        found = [_info(key, each, rules.get(key[0])) for key, each in parts.items()]
        idle = rules.keys() - {key for key, _ in parts}
        found += [_info((name, ""), [], rules[name]) for name in idle]
        found.sort(key=lambda one: (-one.open, -(one.tokens_s or 0.0), -one.requests_total, one.key, one.route))
        return found[:MAX_CLIENTS]


def _info(
    key: _Key, parts: list[tuple[ClientCounts, tuple[float, float] | None]], rule: ClientRule | None
) -> ClientInfo:
    rule = rule or ClientRule(client=key[0])
    counts, rates = [one for one, _ in parts], [rate for _, rate in parts if rate is not None]
    return ClientInfo(
        key=key[0], route=key[1], open=sum(one.open for one in counts), slow=sum(one.slow for one in counts),
        requests_total=sum(one.requests for one in counts), tokens_total=sum(one.tokens for one in counts),
        refused_total=sum(one.refused for one in counts), errors_total=sum(one.errors for one in counts),
        failed_total=sum(one.failed for one in counts), left_total=sum(one.left for one in counts),
        requests_s=sum(rate[0] for rate in rates) if rates else None,
        tokens_s=sum(rate[1] for rate in rates) if rates else None,
        most_open=rule.most_open, per_minute=rule.per_minute, draining=rule.draining,
        key_limit=next((one.limit for one in counts if one.limit is not None), None),
        ttft_ms=_quantiles([one.ttft for one in counts]), itl_ms=_quantiles([one.itl for one in counts]),
    )  # fmt: skip


def _quantiles(parts: list[dict[int, int]]) -> Quantiles:
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update(part)
    if not counts.total():
        return Quantiles()
    p50, p90, p99 = (value * 1e3 for value in quantiles_of(counts, (0.5, 0.9, 0.99)))
    return Quantiles(p50=p50, p90=p90, p99=p99, count=counts.total())
