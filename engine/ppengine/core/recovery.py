"""Recovery from a lost stage: a new generation begins, its process is restarted, the others meet it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ppengine.common.config import EngineConfig
from ppengine.core.capacity import Capacity
from ppengine.core.events import Events
from ppengine.core.health import Health
from ppengine.core.link_failures import LinkFailures
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.restarts import Refusal, reconnects, refusal, restart_plan
from ppengine.core.stage_records import StageRecord, Stages
from ppengine.core.stage_tracker import StageTracker
from ppengine.protocol.control import Command
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.steps import (
    FIRST_GENERATION,
    Drained,
    NewGeneration,
    Retired,
    StageFailed,
    StageProgress,
    StageReady,
)
from ppengine.protocol.verbs import RestartStage

DRAIN_S = 2.0
"""Seconds in which a live stage must leave the old generation; otherwise it is restarted too."""
CONFIRM_S = 0.5
"""Seconds for which the core waits for the supervisor's exit status after a neighbour reported a stage as lost."""


@dataclass(eq=False)
class Recovery:
    """Owns the generation. `start_stage` reaches the supervisor, `notify_stage` both sockets of a stage."""

    _config: EngineConfig
    _stages: Stages
    _tracker: StageTracker
    _health: Health
    _requests: LiveRequests
    _checks: Checks
    _operations: Operations
    _link_failures: LinkFailures
    _event: Events
    _clock: Callable[[], float]
    _start_stage: Callable[[Place, int], None]
    _notify_stage: Callable[[Place, NewGeneration], None]
    generation: int = field(init=False, default=FIRST_GENERATION)
    _refusal: Refusal | None = field(init=False, default=None)
    """The newest reason why a stage was not restarted."""
    _deadline: float = field(init=False, default=0.0)
    """Time until which all must have left the old generation."""
    _began: float = field(init=False, default=0.0)
    _recomputed: int = field(init=False, default=0)

    # --- messages of stages and supervisor --------------------------------------------------------------------

    def on_process(self, info: ProcessInfo) -> None:
        """Note that a process of a stage has ended; a replaced one does not matter."""
        if info.stage is None:
            return
        if not info.replaced:
            self._link_failures.explain(info.stage)
        record = self._stages[info.stage, info.rank or 0]
        if info.generation == record.started:
            self._lose(record, info.detail or f"exit code {info.exit_code}")

    def on_fatal(self, message: Retired) -> None:
        """Note that a stage cannot go on; if it names a peer as the cause, the peer is lost instead."""
        if message.generation != self.generation:
            return
        if message.peer is None:
            self._lose(self._stages[message.stage, message.rank], message.error)
        else:
            closed = message.error.startswith("lost stage")
            self._link_failures.reported(message.stage, message.peer, message.error, closed=closed)
            why = f"its connection to stage {message.stage} closed" if closed else message.error
            self._lose(self._stages[message.peer, message.rank], why, unconfirmed=True, closed=closed)

    def on_failed(self, message: StageFailed) -> None:
        """Note that a stage could not load; its process ends."""
        record = self._stages[message.stage, message.rank]
        if message.generation == record.started:
            self._lose(record, message.text)

    def on_progress(self, message: StageProgress) -> None:
        """Note a line about loading; send the generation to a stage that may have missed its beginning."""
        record = self._stages[message.stage, message.rank]
        record.progress = message.text
        self._health.progress(message.text)
        if message.generation < self.generation:
            self._notify_stage(record.place, NewGeneration(self.generation))

    def on_drained(self, message: Drained) -> None:
        """Note that a stage has left the older generations."""
        record = self._stages[message.stage, message.rank]
        if message.generation == self.generation and record.phase == "draining":
            record.transition("meeting")

    def on_ready(self, message: StageReady) -> None:
        """Note that a stage has met its neighbours."""
        record = self._stages[message.stage, message.rank]
        if message.generation == self.generation and record.on_ready(message):
            self._event("stage.ready", f"{record.name} is ready", stage=record.stage)

    def _lose(self, record: StageRecord, why: str, *, unconfirmed: bool = False, closed: bool = False) -> None:
        due = self._clock() + (CONFIRM_S if unconfirmed else 0.0)
        self._stages.lose(record, why, due, unconfirmed=unconfirmed, closed=closed)

    # --- the verb ---------------------------------------------------------------------------------------------

    def plan_restart(self, verb: RestartStage, command: Command) -> Plan:
        """Plan the restart of one stage; lost stages are started with it."""
        stage = verb.stage
        if text := self._stages.unknown(stage):
            raise CommandError("NOT_FOUND", text)

        def begin(operation: Operation) -> None:
            record = self._stages.leader(stage)
            if record.restart is not None:
                self._operations.end(record.restart, "superseded", f"restarted once more by {command.by}")
            record.restart = operation
            self.start([stage])

        lines, figures = restart_plan(self._stages, self._requests.live(), stage, self.generation + 1)
        return Plan(lines, begin, target=str(stage), figures=figures)

    # --- one turn ---------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Begin a generation if one is due, restart stages that linger in the old one, go on when all have met."""
        requested = [record for record in self._stages if record.restart_due]
        restarted, reconnected = self._act_on_losses()
        if requested:
            for record in self._stages:
                record.restart_due = False
                if record.loss is not None:
                    record.loss.due = None
            self._link_failures.drop()
            self._begin([record for record in self._stages if record in requested or record.loss is not None])
        elif (restarted or reconnected) and not self._health.down:
            self._begin(restarted)
        if not self._health.recovering:
            return
        self._restart_lingering()
        if self._stages.all_met(self.generation):
            self._go_on()
        else:
            self._report_progress()

    def _act_on_losses(self) -> tuple[list[StageRecord], list[StageRecord]]:
        """Return the lost stages to restart, and those for which a new generation is enough."""
        now, restarted, reconnected = self._clock(), [], []
        for record in self._stages:
            loss = record.loss
            if loss is None or loss.due is None or loss.due > now:
                continue
            loss.due = None
            if loss.unconfirmed:
                self._link_failures.confirm()
            if loss.closed and not self._health.down and reconnects(record, now) and self.automatic:
                reconnected.append(record)
            else:
                restarted.append(record)
        for record in restarted:
            loading = record.phase == "starting"
            if record.phase != "lost":
                record.transition("lost")
            self._event("stage.lost", f"{record.name}: {record.loss.why if record.loss else ''}", stage=record.stage)
            if not self._health.down:
                self._judge(record, now, loading=loading)
        return restarted, reconnected

    def _judge(self, record: StageRecord, now: float, *, loading: bool) -> None:
        """Stay down if a lost stage must not be restarted automatically."""
        first = self._stages.loss
        self._refusal = refusal(record, first, now, loading=loading) if self.automatic else Refusal(first)
        if self._refusal is not None:
            self.stay_down(self._refusal.text)

    @property
    def automatic(self) -> bool:
        """Whether lost stages are restarted without an operator."""
        return self._health.serving is not None and self._config.profile.parallel.restart == "auto"

    def kept_down(self, without: int) -> list[int]:
        """Return the lost stages that would be restarted if stage `without` had no cordon."""
        lost = self._stages.lost
        others = any(record.cordon is not None for record in lost if record.stage != without)
        only_cordon = self._health.down and self._refusal is not None and self._refusal.cordon
        stages = sorted(record.stage for record in lost)
        return stages if only_cordon and without in stages and not others else []

    def start(self, stages: Iterable[int]) -> None:
        """Restart stages at the next turn, and with them all that are lost."""
        for stage in stages:
            self._stages.leader(stage).restart_due = True

    def _begin(self, restarted: list[StageRecord]) -> None:
        """Begin a generation in which `restarted` get new processes and the others meet them.

        Without a stage to restart, a connection closed between live processes, and all meet again.
        """
        serving = self._health.require()
        if not self._health.recovering:
            self._began = self._clock()
            self._recomputed = sum(1 for request in self._requests.live() if request.num_computed)
        self._health.recover()
        self.generation += 1
        self._deadline = self._clock() + DRAIN_S
        for record in self._stages:
            # Unconfirmed reports were about connections of an older generation.
            if record.loss is not None and record.loss.unconfirmed:
                record.loss.due = None
        self._tracker.reset()
        names = " and ".join(record.name for record in restarted)
        why = f"{names} {'was' if len(restarted) == 1 else 'were'} restarted" if restarted else self._stages.loss
        for request in serving.scheduler.restart(why):
            self._requests.ended(request)
        for record in self._stages:
            if record in restarted:
                self._start(record)
            else:
                if record.phase != "starting":
                    record.transition("draining")
                self._notify_stage(record.place, NewGeneration(self.generation))
        if restarted:
            stage = restarted[0].stage
            self._event("stage.restart", f"{names} restarted, generation {self.generation}", stage=stage)
        else:
            self._report_reconnection(self._stages.lost[0])

    def _report_reconnection(self, first: StageRecord) -> None:
        why = first.loss.why if first.loss else ""
        text = f"{first.name}: {why}, and no process has ended; all meet again, generation {self.generation}"
        self._event("wire.lost", text, stage=first.stage)

    def _start(self, record: StageRecord) -> None:
        record.start(self.generation)
        self._start_stage(record.place, self.generation)

    def _lingering(self) -> list[StageRecord]:
        """Return the live stages that have not left the old generation in time."""
        late = self._clock() >= self._deadline
        return [record for record in self._stages if late and record.phase == "draining"]

    def _restart_lingering(self) -> None:
        for record in self._lingering():
            if record.cordon is None:
                text = f"{record.name} did not leave the old generation within {DRAIN_S:g} s: restarted too"
                self._event("stage.restart", text, stage=record.stage)
                self._start(record)

    def _report_progress(self) -> None:
        lines = [record.progress for record in self._stages if record.phase == "starting"]
        lines += [f"{record.name} does not leave the old generation and is {record.cordoned}: "
                  f"restart-stage {record.stage}, or lift the cordon" for record in self._lingering()]  # fmt: skip
        text = "; ".join(filter(None, lines)) or "the stages meet"
        self._health.progress(text)
        for record in self._stages:
            if record.restart is not None:
                self._operations.defer(record.restart, text)

    def _go_on(self) -> None:
        """Map the agreed blocks and schedule again: all stages have met."""
        serving, profile = self._health.require(), self._config.profile
        capacity = Capacity(self._stages.ready, profile.memory.block_size, self._config.max_model_len)
        if refused := capacity.refusal(1.0):
            self.stay_down(f"a stage came back with less room: {refused}")
            return
        self._health.recovered()
        self._stages.serve()
        serving.scheduler.steps.generation = self.generation
        serving.memory.restart(capacity)
        self._checks.restate(serving.scheduler)
        self._link_failures.heal(self._recomputed)
        text = f"all stages are back after {self._clock() - self._began:.1f} s, generation {self.generation}"
        text += f"; {self._recomputed} requests are recomputed" if self._recomputed else ""
        self._event("engine.serving", text)
        for record in self._stages:
            operation, record.restart = record.restart, None
            if operation is not None and record.ready is not None:
                self._operations.end(operation, "applied", f"{record.name} is pid {record.ready.pid}; {text}")

    def stay_down(self, why: str) -> None:
        """Block serving until an operator restarts a stage: `why` in one line."""
        self._health.stay_down(why)
        for record in self._stages:
            record.restart = None
            if record.loss is not None:
                record.loss.due = None
        for operation in self._operations.live:
            self._operations.end(operation, "failed", f"{why}; how far it came is not known")
