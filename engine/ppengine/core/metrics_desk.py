"""The answer to a question for metrics: counts that are there already, put together in one message."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.core.health import Health
from ppengine.core.live_requests import LiveRequests
from ppengine.core.scheduler.results import SwapCopies
from ppengine.core.scheduler.retirement import Retirement
from ppengine.core.stage_records import StageRecord, Stages
from ppengine.core.stage_tracker import StageTracker
from ppengine.protocol.clients import HttpReport
from ppengine.protocol.metrics import CoreMetrics, MetricsQuery, RingFigures, StageFigures, StageMetrics, SwapFigures
from ppengine.protocol.tiers import TiersInfo

HTTP_SILENT_S = 5.0
"""Seconds without the report that an HTTP process sends each second."""
RINGS_S = 10.0
"""Seconds after which figures of the rings are no longer those of now."""


@dataclass(eq=False)
class MetricsDesk:
    """Reads the counts of the core's parts."""

    _health: Health
    _stages: Stages
    _tracker: StageTracker
    _requests: LiveRequests
    _clock: Callable[[], float]
    _http: dict[str, HttpReport] = field(init=False, default_factory=dict)
    """Newest counts of each HTTP process."""
    _rings: list[RingFigures] = field(init=False, default_factory=list)
    _rings_at: float = field(init=False, default=0.0)
    _tiers: TiersInfo | None = field(init=False, default=None)
    _cache_out: SwapCopies = field(init=False, default_factory=SwapCopies)
    """Copies to the host cache."""
    _cache_in: SwapCopies = field(init=False, default_factory=SwapCopies)

    def take(self, report: HttpReport) -> None:
        """Keep the counts of an HTTP process for the next answer."""
        self._http[report.role] = report

    def silent_http(self) -> list[str]:
        """Return the HTTP processes whose newest report is too old."""
        now = time.monotonic()
        return sorted(role for role, one in self._http.items() if now - one.mono_ns / 1e9 > HTTP_SILENT_S)

    def take_rings(self, figures: StageFigures) -> None:
        """Keep the figures of the stages' rings for the next answers."""
        self._rings, self._rings_at = figures.ranks, self._clock()

    def take_tiers(self, tiers: TiersInfo | None) -> None:
        """Keep the tiers of the core's newest report for the next answers."""
        self._tiers = tiers

    def copied(self, retirement: Retirement, sent: float) -> None:
        """Count the blocks that a step, sent at `sent`, copied to the host cache and from there."""
        seconds = self._clock() - sent
        for copies, blocks in ((self._cache_out, retirement.copied_out), (self._cache_in, retirement.copied_in)):
            if blocks:
                copies.add(blocks, seconds)

    def answer(self, question: MetricsQuery) -> CoreMetrics:
        """Return the metrics of this moment."""
        requests, metrics = self._requests, self._requests.metrics
        answer = CoreMetrics(
            nonce=question.nonce, state=self._health.state, prompt_tokens=requests.prompt_tokens_total,
            output_tokens=requests.output_tokens_total, finished=dict(metrics.finished),
            histograms={name: each.wire() for name, each in metrics.histograms.items()},
            constrained_ended=metrics.constrained,
            stages=[self._stage(record) for record in self._stages],
            slo_met=requests.latencies.slo.met_total, slo_missed=requests.latencies.slo.missed_total,
            http=[each for report in self._http.values() for each in report.clients],
            processes={role: one.process for role, one in self._http.items() if one.process is not None},
            tiers=self._tiers,
            rings=self._rings if self._clock() - self._rings_at < RINGS_S else [],
        )  # fmt: skip
        if self._health.serving is not None:
            scheduler, memory = self._health.serving
            queues, device, host = scheduler.queues.counts(), scheduler.blocks.device, scheduler.blocks.host
            answer.running, answer.waiting = queues.running, queues.waiting
            answer.swapped, answer.held = queues.swapped, queues.held
            answer.blocks_used, answer.blocks = device.used, device.used + device.cached + device.free
            answer.host_blocks_used, answer.host_blocks = host.used, host.size
            answer.step, answer.generation = scheduler.steps.number, scheduler.steps.generation
            answer.memory_utilization = memory.utilization
            answer.prefix_hit_tokens = scheduler.blocks.hit_tokens_total
            answer.preemptions, answer.swaps = scheduler.fences.preemptions_total, scheduler.fences.swaps_total
            if (copies := scheduler.blocks.copies) is not None:
                answer.host_hit_tokens = copies.totals.host
                answer.backend_hit_tokens = copies.totals.backends.total()
            block_bytes = memory.capacity.block_bytes
            answer.swap_out = _copies(block_bytes, scheduler.fences.copies_out, self._cache_out)
            answer.swap_in = _copies(block_bytes, scheduler.fences.copies_in, self._cache_in)
            constrained = scheduler.queues.constrained
            answer.constrained = len(constrained)
            answer.constrained_waiting = sum(1 for request in constrained if request.mask is None)
        return answer

    def _stage(self, record: StageRecord) -> StageMetrics:
        oldest = self._tracker.oldest(record.place)
        return StageMetrics(
            stage=record.stage, rank=record.place.rank, up=record.ready is not None, retired_step=record.retired_step,
            oldest_step_s=0.0 if oldest is None else self._clock() - oldest.sent,
        )  # fmt: skip


def _copies(block_bytes: int, *sorts: SwapCopies) -> SwapFigures:
    blocks = sum(copies.blocks for copies in sorts)
    seconds = sum(copies.seconds for copies in sorts)
    return SwapFigures(sum(copies.requests for copies in sorts), blocks * block_bytes, seconds)
