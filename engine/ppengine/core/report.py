"""The core's half of a snapshot, made a few times a second."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from ppengine.core.scheduler import wait_reasons
from ppengine.protocol.reports import CoreReport
from ppengine.protocol.snapshot import MAX_REQUESTS, EngineInfo, Queues, RequestInfo, Throughput

if TYPE_CHECKING:
    from ppengine.core.engine import Engine
    from ppengine.core.scheduler.request import Request

WINDOW_S = 10.0


class Reporter:
    """Builds reports and keeps the token counts of the last ten seconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._marks: deque[tuple[float, int, int]] = deque()

    def build(self, dropped: int = 0) -> CoreReport:
        """Return the report of this moment. `dropped`: messages that the collector had no room for, so far."""
        engine, info = self._engine, self._info()
        throughput = self._throughput()
        if not engine.serving:
            return CoreReport(
                mono_ns=time.monotonic_ns(), engine=info, queues=Queues(),
                stages=engine.board.views((), None, None, engine.cordons),
                requests_total=0, requests=[], operations=engine.operations.infos(), throughput=throughput,
                kv_used=None, kv_cached=None, kv_free=None, swap_used=None, steps_in_flight=[],
                preemptions_total=0, prefix_hit_tokens_total=0, dropped_total=dropped,
                losses=engine.recovery.losses.report(),
            )  # fmt: skip
        scheduler, resizer = engine.scheduler, engine.resizer
        plan = resizer.capacity.plan(resizer.utilization)
        live = engine.live()
        return CoreReport(
            mono_ns=time.monotonic_ns(),
            engine=info,
            stages=engine.board.views(plan.capacities, resizer.mapped_blocks, plan.binding, engine.cordons),
            queues=scheduler.queues.counts(),
            requests_total=len(live),
            requests=[self._request(request) for request in live[:MAX_REQUESTS]],
            operations=engine.operations.infos(),
            throughput=throughput,
            kv_used=scheduler.blocks.device.used,
            kv_cached=scheduler.blocks.device.cached,
            kv_free=scheduler.blocks.device.free,
            swap_used=scheduler.blocks.host.used,
            steps_in_flight=engine.board.numbers,
            preemptions_total=scheduler.fences.preemptions_total,
            prefix_hit_tokens_total=scheduler.blocks.hit_tokens_total,
            dropped_total=dropped,
            findings=engine.checks.findings(),
            losses=engine.recovery.losses.report(),
        )

    def _info(self) -> EngineInfo:
        engine = self._engine
        config, profile = engine.config, engine.config.profile
        return EngineInfo(
            id=config.id,
            name=config.name,
            epoch=config.epoch,
            state=engine.state,  # type: ignore[arg-type]
            model=profile.model.path.rstrip("/").rsplit("/", 1)[-1],
            pipeline_parallel_size=profile.parallel.pipeline,
            tensor_parallel_size=profile.parallel.tensor,
            executor=profile.parallel.executor,
            memory_utilization=engine.resizer.utilization if engine.serving else profile.memory.utilization,
            memory_revision=engine.resizer.revision if engine.serving else 0,
            uptime_s=engine.uptime_s,
            step=engine.scheduler.steps.number if engine.serving else 0,
            retired_step=engine.board.retired_step,
            max_model_len=config.max_model_len,
            block_size=profile.memory.block_size,
            max_num_seqs=profile.scheduler.max_num_seqs,
            schedule_ahead=profile.scheduler.schedule_ahead,
            message=engine.message,
            checks=engine.checks.info(),
        )

    def _request(self, request: Request) -> RequestInfo:
        scheduler = self._engine.scheduler
        return RequestInfo(
            id=request.id,
            owner=request.owner,
            state=request.state,
            age_s=self._engine.clock() - request.arrival_time,
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(request.output_ids),
            blocks=len(request.blocks),
            swap_blocks=len(request.host_blocks),
            why=wait_reasons.why(scheduler, request),
            revision=request.revision,
            computed_tokens=request.num_computed,
            cached_tokens=request.num_cached,
            in_flight=list(request.in_flight),
            preemptions=request.preemptions,
            finish_reason=request.finish_reason,
        )

    def _throughput(self) -> Throughput:
        now, engine = time.monotonic(), self._engine
        self._marks.append((now, engine.prompt_tokens_total, engine.output_tokens_total))
        while len(self._marks) > 2 and now - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()
        then, prompts, outputs = self._marks[0]
        if now - then < 0.5:
            return Throughput()
        return Throughput(
            prompt_tok_s=(engine.prompt_tokens_total - prompts) / (now - then),
            output_tok_s=(engine.output_tokens_total - outputs) / (now - then),
        )
