"""Stages of a core that ended, on their way to the core that follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.core.health import Health
from ppengine.core.journal_records import Settings
from ppengine.core.operations import Operation
from ppengine.core.stage_records import StageRecord, Stages
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.stage_lifecycle import NewGeneration

REPEAT_S = 0.05
"""Seconds between two notices to a stage that has not answered."""


@dataclass(eq=False)
class Takeover:
    """Fills the records of the stages, and notifies each until it answers."""

    _stages: Stages
    _health: Health
    _clock: Callable[[], float]
    _notify_stage: Callable[[Place, NewGeneration], None]
    _first: int = field(init=False, default=0)
    """First generation of this core."""
    _repeat_at: float = field(init=False, default=0.0)
    """Time at which stages that have not answered are notified again."""

    def begin(self, known: Settings, generation: int, why: str) -> None:
        """Take the processes of a core that ended, all of which must meet in `generation`."""
        self._first = generation
        for record, state in zip(self._stages, known.stages, strict=False):
            record.resume(state.started, self._clock(), loaded=state.loaded)
        self._health.follow(why)

    def has_begun(self, stage: int, known: Settings) -> bool:
        """Return whether a stage was started for the newest generation of the core before this one."""
        number = self._stages.groups.number(Place(stage, 0))
        return number < len(known.stages) and known.stages[number].started == known.generation

    def adopt(self, stage: int, operation: Operation) -> None:
        """Go on with the restart of a stage that the core before this one had begun."""
        self._stages.leader(stage).restart = operation

    def note(self, record: StageRecord, info: ProcessInfo) -> None:
        """Note which process of a stage there is: the core before this one may not have noted its start."""
        follows = self._health.follows and record.started < self._first
        if not follows or info.generation == record.started or info.replaced:
            return
        ordered = info.generation < record.started
        record.resume(info.generation, self._clock(), loaded=ordered)
        # An order that did not reach the supervisor is repeated.
        record.restart_due = record.restart_due or ordered

    def notify(self, generation: int) -> None:
        """Notify the stages that have not answered: a message to one that has not connected yet is dropped."""
        if self._health.follows and self._clock() >= self._repeat_at:
            self._repeat_at = self._clock() + REPEAT_S
            for record in self._stages:
                if record.phase in ("starting", "draining"):
                    self._notify_stage(record.place, NewGeneration(generation, record.started))
