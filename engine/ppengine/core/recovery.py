"""Recovery from a lost stage: a new generation begins, its process is restarted, the others meet it again.

A place has one process in each generation. Neighbours that had met another one would never meet its successor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ppengine.common.config import EngineConfig
from ppengine.core.capacity import Capacity
from ppengine.core.events import Events
from ppengine.core.health import Health
from ppengine.core.journal_records import Settings
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.restart_policy import RestartPolicy
from ppengine.core.restarts import pids_text, restart_plan
from ppengine.core.serving import Serving
from ppengine.core.stage_records import StageRecord, Stages
from ppengine.core.stage_tracker import StageTracker
from ppengine.core.start_tries import StartTries
from ppengine.core.startup import Startup
from ppengine.core.successor import Successor
from ppengine.core.takeover import Takeover
from ppengine.diagnosis.budgets import PHASE_BUDGET_S
from ppengine.protocol import facts
from ppengine.protocol.control import Command
from ppengine.protocol.facts import Fact, GenerationBegan
from ppengine.protocol.place import Place
from ppengine.protocol.stage_lifecycle import FIRST_GENERATION, NewGeneration
from ppengine.protocol.verbs import RestartStage

CONNECT_S = 1.0
"""Seconds more for stages to connect to a core that follows another one."""
DRAIN_S = 2.0
"""Seconds in which a live stage must leave the old generation; otherwise it is restarted too."""


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
    _event: Events
    _clock: Callable[[], float]
    _start_stage: Callable[[Place, int], None]
    _notify_stage: Callable[[Place, NewGeneration], None]
    _note: Callable[[Fact], None]
    _commit: Callable[[], None]
    """Writes the generation to the journal, before a stage can know it."""
    _policy: RestartPolicy
    _tries: StartTries
    _startup: Startup
    _successor: Successor | None
    """In a core that follows another one."""
    generation: int = field(init=False, default=FIRST_GENERATION)
    _deadline: float = field(init=False, default=0.0)
    """Time until which all must have left the old generation."""
    _began: float = field(init=False, default=0.0)
    _recomputed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.takeover = Takeover(self._stages, self._health, self._clock, self._notify_stage)
        if self._config.profile.parallel.executor == "ray":
            for record in self._stages:
                # An actor loads torch after its pid is known.
                record.life.answer_s = PHASE_BUDGET_S["start"]

    def follow(self, known: Settings, why: str) -> None:
        """Begin a generation in place of that of a core which ended: all stages leave it and meet again."""
        self.generation = known.generation + 1
        self._began = self._clock()
        self._deadline = self._began + DRAIN_S + CONNECT_S
        self.takeover.begin(known, self.generation, why)
        self._note(
            GenerationBegan(mono_ns=self._now_ns(), generation=self.generation, restarted=(), why=why)
        )  # fmt: skip

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

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
        if not self._health.recovering and self._stages.undisturbed and not self._tries.due:
            return
        self._policy.lose_silent()
        requested = [record for record in self._stages if record.restart_due]
        restarted, reconnected = self._policy.judge(requested=bool(requested))
        if requested:
            for record in self._stages:
                record.restart_due = False
                if record.loss is not None:
                    record.loss.due = None
            self._begin([record for record in self._stages if record in requested or record.loss is not None])
        elif (restarted or reconnected or self._tries.due) and not self._health.down and not self._tries.waits:
            self._begin([record for record in self._stages if record.phase == "lost"])
        if not self._health.recovering:
            return
        if self._tries.expire():
            self._give_up()
        self.takeover.notify(self.generation)
        self._restart_lingering()
        if self._stages.all_met(self.generation):
            self._go_on()
        else:
            self._report_progress()

    def start(self, stages: Iterable[int]) -> None:
        """Restart all ranks of stages at the next turn, and with them all that are lost."""
        for stage in stages:
            for record in self._stages.ranks(stage):
                record.restart_due = True

    def start_lost(self) -> None:
        """Restart all lost places at the next turn."""
        for record in self._stages.lost:
            record.restart_due = True

    def _begin(self, restarted: list[StageRecord]) -> None:
        """Begin a generation in which `restarted` get new processes and the others meet them.

        Without a stage to restart, a connection closed between live processes, and all meet again.
        """
        serving = self._health.serving
        if not self._health.recovering:
            self._began = self._clock()
            self._recomputed = sum(1 for request in self._requests.live() if request.num_computed)
        self._health.recover()
        self._tries.begun()
        self.generation += 1
        self._deadline = self._clock() + DRAIN_S
        for record in self._stages:
            # Unconfirmed reports were about connections of an older generation.
            if record.loss is not None and record.loss.unconfirmed:
                record.loss.due = None
        self._commit()
        self._tracker.reset()
        names = joined([record.name for record in restarted])
        why = f"{names} {'was' if len(restarted) == 1 else 'were'} restarted" if restarted else self._stages.loss
        places = tuple(record.place for record in restarted)
        self._note(
            GenerationBegan(
                mono_ns=self._now_ns(), generation=self.generation, restarted=places, why=self._stages.loss or why,
                by=self._requested_by(),
            )
        )  # fmt: skip
        for request in serving.scheduler.restart(why) if serving is not None else ():
            self._requests.ended(request)
        for record in self._stages:
            if record in restarted:
                record.start(self.generation, self._clock())
                self._start_stage(record.place, self.generation)
            else:
                if record.phase != "starting":
                    record.transition("draining")
                self._notify_stage(record.place, NewGeneration(self.generation, record.started))
        if restarted:
            stage = restarted[0].stage
            self._event("stage.restart", f"{names} restarted, generation {self.generation}", stage=stage)
        else:
            self._report_reconnection(self._stages.lost[0])

    def _report_reconnection(self, first: StageRecord) -> None:
        why = first.loss.why if first.loss else ""
        text = f"{first.name}: {why}, and no process has ended; all meet again, generation {self.generation}"
        self._event("wire.lost", text, stage=first.stage)

    def _requested_by(self) -> str:
        """Return the operator who requested a restart that has no outcome; empty if none did."""
        return next((record.restart.command.by for record in self._stages if record.restart is not None), "")

    def _lingering(self) -> list[StageRecord]:
        """Return the live stages that have not left the old generation in time."""
        late = self._clock() >= self._deadline
        return [record for record in self._stages if late and record.phase == "draining"]

    def _restart_lingering(self) -> None:
        """Begin one more generation: a late stage may have met others, or be about to, before its process ends."""
        late = [record for record in self._lingering() if record.cordon is None]
        for record in late:
            text = f"{record.name} did not leave the old generation within {DRAIN_S:g} s: restarted too"
            self._event("stage.restart", text, stage=record.stage)
        if late:
            self._begin([record for record in self._stages if record in late or record.phase == "lost"])

    def _report_progress(self) -> None:
        lines = [record.progress for record in self._stages if record.phase == "starting"]
        lines += [f"{record.name} does not leave the old generation and is {record.cordoned}: "
                  f"restart-stage {record.stage}, or lift the cordon" for record in self._lingering()]  # fmt: skip
        text = self._tries.text or "; ".join(filter(None, lines)) or "the stages meet"
        self._health.progress(text)
        for record in self._stages:
            if record.restart is not None:
                self._operations.defer(record.restart, text)

    def _go_on(self) -> None:
        """Map the agreed blocks and schedule again: all stages have met."""
        profile = self._config.profile
        capacity = Capacity(self._stages, profile.memory.block_size, self._config.max_model_len)
        if refused := capacity.refusal(1.0):
            self._policy.stay_down(f"a stage came back with less room: {refused}")
            return
        self._health.recovered()
        self._tries.reset()
        self._stages.serve()
        serving = self._health.serving
        if serving is None:
            serving = self._resume()
            self._recomputed = len(self._requests.live())
        serving.scheduler.steps.generation = self.generation
        serving.scheduler.restarted()
        serving.memory.restart(capacity)
        self._checks.restate(serving.scheduler)
        took_s = self._clock() - self._began
        processes = tuple((record.place, record.started) for record in self._stages)
        self._note(
            facts.Serving(
                mono_ns=self._now_ns(), generation=self.generation, processes=processes, took_s=took_s,
                recomputed=self._recomputed, by=self._requested_by(),
            )
        )  # fmt: skip
        text = f"all stages are back after {took_s:.1f} s, generation {self.generation}"
        text += f"; {self._recomputed} requests are recomputed" if self._recomputed else ""
        self._event("engine.serving", text)
        for record in self._stages:
            operation, record.restart = record.restart, None
            if operation is not None:
                pids = pids_text(self._stages.ranks(record.stage))
                self._operations.end(operation, "applied", f"stage {record.stage} is {pids}; {text}")

    def _resume(self) -> Serving:
        """Serve for the first time in a core that follows another one, with all requests that go on."""
        successor = self._successor
        assert successor is not None, "the first core begins to serve by itself"
        serving = self._startup.resume(successor)
        self._checks.resume(successor.settings.checks, successor.settings.shadow)
        return serving

    def _lose_all(self, why: str) -> int:
        """End every request as lost, also those of a core before this one that wait for the stages."""
        if self._successor is not None and self._health.serving is None:
            return self._successor.lose_all(why, self._operations)
        return self._requests.lose_all(why)

    def _give_up(self) -> None:
        """End all requests as lost, and refuse others until the stages serve: a stage does not come up."""
        first = self._stages.lost[0] if self._stages.lost else None
        name, why = ("a stage", "") if first is None else (first.name, first.loss.why if first.loss else "")
        text = f"{name} {self._tries.loss}" + (f": {why}" if why else "")
        self._health.give_up(text)
        for record in self._stages:
            record.restart = None
        lost = self._lose_all(text)
        for operation in self._operations.live:
            self._operations.end(operation, "failed", text)
        stage = None if first is None else first.stage
        self._event("engine.gave-up", f"{text}; {lost} requests are lost, and new ones are refused", stage=stage)


def joined(names: list[str]) -> str:
    """Return `stage 0`, `stage 0 and stage 1`, or `stage 0, stage 1 and stage 2`."""
    *others, last = names or [""]
    return f"{', '.join(others)} and {last}" if others else last
