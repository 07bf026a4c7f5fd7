"""The core's answer to a question for metrics: reports of others are kept for a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ppengine.core.metrics_desk import RINGS_S, MetricsDesk
from ppengine.core.request_metrics import RequestMetrics
from ppengine.protocol.clients import HttpReport, ProcessFigures
from ppengine.protocol.metrics import MetricsQuery, RingFigures, StageFigures
from ppengine.protocol.tiers import TiersInfo


def test_reports_of_rings_grow_old_and_those_of_processes_do_not() -> None:
    now = [100.0]
    health: Any = SimpleNamespace(state="loading", serving=None)
    latencies = SimpleNamespace(slo=SimpleNamespace(met_total=0, missed_total=0))
    requests: Any = SimpleNamespace(
        metrics=RequestMetrics(8), prompt_tokens_total=0, output_tokens_total=0, latencies=latencies
    )
    stages: Any = []
    tracker: Any = None
    desk = MetricsDesk(health, stages, tracker, requests, lambda: now[0])
    assert desk.answer(MetricsQuery(nonce=1)).rings == [] and desk.answer(MetricsQuery(nonce=1)).tiers is None
    desk.take_tiers(TiersInfo(slots=7))
    assert desk.answer(MetricsQuery(nonce=1)).tiers == TiersInfo(slots=7)
    rings = [RingFigures(0, 0, 0.1, 0.2, 0.5, None, 0, 0, 0.1)]
    desk.take_rings(StageFigures(ranks=rings))
    process = ProcessFigures(1.0, 2.0, 3, 4, 5)
    desk.take(HttpReport(role="http0", mono_ns=0, clients=[], process=process))
    now[0] += RINGS_S / 2
    assert desk.answer(MetricsQuery(nonce=2)).rings == rings
    now[0] += RINGS_S
    answer = desk.answer(MetricsQuery(nonce=3))
    assert answer.rings == [] and answer.processes == {"http0": process}
