"""The core's half of a snapshot, made a few times a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ppengine.common.config import EngineConfig
from ppengine.core.client_rules import ClientRules
from ppengine.core.health import Health
from ppengine.core.host_tier import host_tier
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.mask_processes import MaskProcesses
from ppengine.core.operations import Operations
from ppengine.core.request_infos import request_infos
from ppengine.core.serving import Serving
from ppengine.core.stage_records import StageRecord, Stages
from ppengine.core.stage_tracker import StageTracker
from ppengine.core.tiers.tier_report import TierReport
from ppengine.protocol.reports import CoreReport, StageView
from ppengine.protocol.snapshot import MAX_REQUESTS, EngineInfo, Queues, Throughput
from ppengine.protocol.stage_info import CordonInfo

WINDOW_S = 2.0
"""Seconds of the rates: an engine that hangs must not look busy."""


@dataclass(eq=False)
class Reporter:
    """Builds reports and keeps the token counts of the last two seconds."""

    _config: EngineConfig
    _stages: Stages
    _tracker: StageTracker
    _health: Health
    _requests: LiveRequests
    _operations: Operations
    _checks: Checks
    _rules: ClientRules
    _tiers: TierReport
    _masks: MaskProcesses
    _clock: Callable[[], float]
    _began: float
    """Start of the core, in seconds of the clock."""
    _marks: deque[tuple[float, int, int]] = field(init=False, default_factory=deque)

    def build(self, dropped: int = 0) -> CoreReport:
        """Return the report of this moment. `dropped`: messages for which the collector had no room, so far."""
        serving = self._health.serving
        live = self._requests.live()
        report = CoreReport(
            mono_ns=int(self._clock() * 1e9), engine=self._engine_info(serving), queues=Queues(),
            stages=self._stage_views(serving), requests_total=len(live), requests=[],
            operations=self._operations.infos(), throughput=self._throughput(),
            kv_used=None, kv_cached=None, kv_free=None, swap_used=None, steps_in_flight=self._tracker.numbers,
            preemptions_total=0, prefix_hit_tokens_total=0, dropped_total=dropped,
            latency=self._requests.latencies.info(),
            findings=self._checks.findings(), rules=self._rules.rules(), unanswered=self._masks.unanswered,
        )  # fmt: skip
        if serving is not None:
            scheduler = serving.scheduler
            report.tiers = host_tier(serving)
            if report.tiers is not None:
                self._tiers.fill(report.tiers)
            report.queues = scheduler.queues.counts()
            report.requests = request_infos(scheduler, live[:MAX_REQUESTS], self._clock())
            device = scheduler.blocks.device
            report.kv_used, report.kv_cached, report.kv_free = device.used, device.cached, device.free
            report.swap_used = scheduler.blocks.host.used
            report.preemptions_total = scheduler.fences.preemptions_total
            report.swaps_total = scheduler.fences.swaps_total
            report.prefix_hit_tokens_total = scheduler.blocks.hit_tokens_total
        return report

    def _engine_info(self, serving: Serving | None) -> EngineInfo:
        config, profile = self._config, self._config.profile
        return EngineInfo(
            id=config.id,
            name=config.name,
            epoch=config.epoch,
            state=self._health.state,
            model=profile.model.path.rstrip("/").rsplit("/", 1)[-1],
            pipeline_parallel_size=profile.parallel.pipeline,
            tensor_parallel_size=profile.parallel.tensor,
            executor=profile.parallel.executor,
            memory_utilization=serving.memory.utilization if serving else profile.memory.utilization,
            memory_revision=serving.memory.revision if serving else 0,
            uptime_s=self._clock() - self._began,
            step=serving.scheduler.steps.number if serving else 0,
            retired_step=self._stages.retired_step,
            max_model_len=config.max_model_len,
            block_size=profile.memory.block_size,
            max_num_seqs=profile.scheduler.max_num_seqs,
            schedule_ahead=profile.scheduler.schedule_ahead,
            message=self._health.message,
            checks=self._checks.info(),
        )

    def _stage_views(self, serving: Serving | None) -> list[StageView]:
        if serving is None:
            return [self._stage_view(record, (), None, None) for record in self._stages]
        memory = serving.memory
        plan = memory.capacity.plan(memory.utilization)
        return [
            self._stage_view(record, plan.capacities, memory.mapped_blocks, plan.binding) for record in self._stages
        ]

    def _stage_view(
        self, record: StageRecord, capacities: Sequence[int], mapped: int | None, binding: int | None
    ) -> StageView:  # fmt: skip
        oldest, ready = self._tracker.oldest(record.place), record.ready
        number = self._stages.groups.number(record.place)
        view = StageView(
            index=record.stage,
            rank=record.place.rank,
            ready=ready is not None,
            retired_step=record.retired_step,
            oldest_unretired_age_ms=None if oldest is None else (self._clock() - oldest.sent) * 1e3,
            oldest_unretired_step=None if oldest is None else oldest.number,
            oldest_unretired_tokens=0 if oldest is None else oldest.tokens,
            oldest_unretired_moved=0 if oldest is None else oldest.moved,
            mapping_blocks=self._tracker.mapping_blocks(record.place),
            capacity=capacities[number] if capacities else None,
            mapped=mapped,
            binding=number == binding,
            layers=list(record.layers),
            progress=record.progress,
            cordon=self._cordon_info(record),
        )
        if ready is not None:
            view.total_bytes, view.weights_bytes = ready.total_bytes, ready.weights_bytes
            view.peak_bytes, view.block_bytes = ready.peak_bytes, ready.block_bytes
            view.swap_blocks, view.pid, view.host = ready.swap_blocks, ready.pid, ready.host
            view.device_kind, view.device_name = ready.device_kind, ready.device_name
            view.device_uuid, view.links = ready.device_uuid, ready.links
        return view

    def _cordon_info(self, record: StageRecord) -> CordonInfo | None:
        cordon = record.cordon
        if cordon is None:
            return None
        return CordonInfo(by=cordon.by, since_s=self._clock() - cordon.at, reason=cordon.reason)

    def _throughput(self) -> Throughput:
        now, requests = self._clock(), self._requests
        self._marks.append((now, requests.prompt_tokens_total, requests.output_tokens_total))
        while len(self._marks) > 2 and now - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()
        then, prompts, outputs = self._marks[0]
        if now - then < 0.5:
            return Throughput()
        return Throughput(
            prompt_tok_s=(requests.prompt_tokens_total - prompts) / (now - then),
            output_tok_s=(requests.output_tokens_total - outputs) / (now - then),
            window_s=now - then,
        )
