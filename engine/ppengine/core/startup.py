"""The beginning of service: all stages have met a core that has no scheduler yet, and it gets one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import EngineConfig
from ppengine.core.capacity import Capacity
from ppengine.core.device_room import RoomBook
from ppengine.core.events import Events
from ppengine.core.health import Health
from ppengine.core.memory_controller import MemoryController
from ppengine.core.operations import Operations
from ppengine.core.scheduler import Scheduler
from ppengine.core.scheduler.cache_copies import host_limits
from ppengine.core.serving import Serving
from ppengine.core.stage_records import Stages
from ppengine.core.stage_tracker import StageTracker
from ppengine.core.successor import Successor


@dataclass(eq=False)
class Startup:
    """Makes the scheduler and the memory controller, once in the life of a core."""

    _config: EngineConfig
    _spec: ModelSpec
    _stages: Stages
    _tracker: StageTracker
    _health: Health
    _operations: Operations
    _event: Events
    _rooms: RoomBook
    _stay_down: Callable[[str], None]
    """Blocks serving until an operator restarts a stage."""
    _clock: Callable[[], float]

    def begin(self, generation: int) -> None:
        """Serve if all stages have met in `generation`, with the memory of the profile."""
        health = self._health
        if health.serving is not None or health.blocked or not self._stages.all_met(generation):
            return
        capacity = self._capacity()
        utilization = self._config.profile.memory.utilization
        if refusal := capacity.refusal(utilization):
            health.refuse(refusal)
            return
        scheduler, memory = serving = self._make(capacity, utilization)
        scheduler.steps.generation = generation
        self._stages.serve()
        health.serve(serving)
        mapped, binding = memory.mapped_blocks, capacity.binding(capacity.plan(memory.utilization))
        self._tracker.send(scheduler.resize.map_step(mapped))
        self._event("engine.serving", f"serving with {mapped} blocks, {binding} is binding")

    def resume(self, successor: Successor) -> Serving:
        """Serve with the memory and the requests of the core before this one; `Recovery` maps the blocks."""
        known = successor.settings
        utilization = known.utilization or self._config.profile.memory.utilization
        serving = self._make(self._capacity(), utilization)
        serving.memory.revision = known.revision
        self._health.serve(serving)
        successor.resume(serving.scheduler)
        serving.scheduler.batcher.cordon = self._stages.cordons
        return serving

    def _capacity(self) -> Capacity:
        return Capacity(self._stages, self._config.profile.memory.block_size, self._config.max_model_len)

    def _make(self, capacity: Capacity, utilization: float) -> Serving:
        profile, tracker, health = self._config.profile, self._tracker, self._health
        scheduler = Scheduler(
            profile.scheduler,
            stages=self._config.stages,
            block_size=profile.memory.block_size,
            max_model_len=self._config.max_model_len,
            num_blocks=capacity.plan(utilization).mapped,
            num_host_blocks=capacity.host_blocks,
            eos_token_ids=frozenset(self._spec.eos_token_ids),
            host_cache=host_limits(profile.tiers, capacity.most_block_bytes, on_gpus=bool(self._stages.on_gpus)),
            clock=self._clock,
        )
        memory = MemoryController(
            scheduler, capacity, utilization, self._operations, self._event, tracker.send,
            lambda: health.blocked, health.fail, self._stay_down, self._rooms, lambda: tracker.unmapped, self._clock,
        )  # fmt: skip
        return Serving(scheduler, memory)
