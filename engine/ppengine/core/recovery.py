"""Losing and restarting a stage: a new generation begins, everybody else leaves the old one, and all meet again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ppengine.core.capacity import Capacity
from ppengine.core.link_failures import Losses
from ppengine.core.operations import Operation
from ppengine.core.plans import CommandError, Plan
from ppengine.core.restarts import Restarts, restart_plan
from ppengine.protocol.control import Command
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.steps import (
    FIRST_GENERATION,
    NewGeneration,
    Quiet,
    Retired,
    StageFailed,
    StageProgress,
    StageReady,
)
from ppengine.protocol.verbs import RestartStage

if TYPE_CHECKING:
    from ppengine.core.engine import Engine

QUIET_S = 2.0
"""What a survivor gets to leave the old generation; then it is started anew too."""
HEARSAY_S = 0.5
"""How long the supervisor's word is waited for when a neighbour says that a stage is gone: it knows how it went."""


class Recovery:
    """Owns the generation. `start_stage` and `tell_stage` reach the supervisor and both sockets of a stage."""

    def __init__(
        self,
        engine: Engine,
        start_stage: Callable[[int, int], None],
        tell_stage: Callable[[int, NewGeneration], None],
    ) -> None:
        self._engine = engine
        self._start_stage = start_stage
        self._tell_stage = tell_stage
        self._stages = range(engine.config.stages)
        self.generation = FIRST_GENERATION
        self.active = False
        """Stages are leaving or loading; requests wait and keep what they have."""
        self.down = ""
        """Why nothing goes on until an operator restarts the stage, in one line; empty: it goes on or will."""
        self._born = dict.fromkeys(self._stages, FIRST_GENERATION)
        self._starting = set(self._stages)
        """Stages whose process was started and is not ready."""
        self._quiet: set[int] = set()
        self._deadline = 0.0
        self._due: dict[int, float] = {}
        """Lost stages that nothing was done about yet, and when that is to happen."""
        self._asked: set[int] = set()
        self.losses = Losses(lambda: engine.clock())
        self._restarts = Restarts(engine)
        self._cut: set[int] = set()
        """Those of the lost that are at an end of a wire that closed; neighbours say so, and no process has ended."""
        self._rejoining: set[int] = set()
        """Those of them for which a generation was begun."""
        self._operations: dict[int, Operation] = {}
        self._begun = 0.0
        self._recomputed = 0

    @property
    def holds(self) -> bool:
        """Whether no step may be sent: a stage is lost, or not all have met in this generation."""
        return self.active or bool(self.down) or bool(self._engine.board.lost)

    # --- what stages and supervisor say -----------------------------------------------------------------------

    def on_process(self, info: ProcessInfo) -> None:
        """A process of a stage has ended; one that was replaced meanwhile does not matter."""
        if info.stage is not None and not info.replaced:
            self.losses.explain(info.stage)
        if info.stage is not None and info.generation == self._born[info.stage]:
            self._lose(info.stage, info.detail or f"exit code {info.exit_code}")

    def on_fatal(self, message: Retired) -> None:
        """A stage cannot go on: the cause is its peer where it names one, and then it is no loss itself."""
        if message.generation != self.generation:
            return
        if message.peer is None:
            self._lose(message.stage, message.error)
        else:
            closed = message.error.startswith("lost stage")
            self.losses.heard(message.stage, message.peer, message.error, closed=closed)
            why = f"its connection to stage {message.stage} closed" if closed else message.error
            self._lose(message.peer, why, hearsay=True, closed=closed)

    def on_failed(self, message: StageFailed) -> None:
        """A stage could not load; its process ends."""
        if message.generation == self._born[message.stage]:
            self._lose(message.stage, message.text)

    def on_progress(self, message: StageProgress) -> None:
        """A line about loading. Who loaded while another stage was lost may not have heard of it."""
        self._engine.board.progress[message.stage, message.rank] = message.text
        self._engine.message = message.text
        if message.generation < self.generation:
            self._tell_stage(message.stage, NewGeneration(self.generation))

    def on_quiet(self, message: Quiet) -> None:
        """A survivor has left the older generations."""
        if message.generation == self.generation:
            self._quiet.add(message.stage)

    def on_ready(self, message: StageReady) -> None:
        """A stage has met its neighbours."""
        if message.generation != self.generation:
            return
        self._engine.board.ready[message.stage, message.rank] = message
        if message.stage in self._starting:
            self._starting.discard(message.stage)
            self._engine.event("stage.ready", f"stage {message.stage} is ready", stage=message.stage)

    def _lose(self, stage: int, why: str, *, hearsay: bool = False, closed: bool = False) -> None:
        engine = self._engine
        anew = stage in self._starting | self._rejoining
        if not engine.board.lose(stage, why, self._born[stage], hearsay=hearsay, anew=anew):
            return
        (self._cut.add if closed else self._cut.discard)(stage)
        self._rejoining.discard(stage)
        if not self.down:
            engine.message = engine.board.loss
        self._due[stage] = engine.clock() + (HEARSAY_S if hearsay else 0.0)

    # --- the verb ---------------------------------------------------------------------------------------------

    def plan_restart(self, verb: RestartStage, command: Command) -> Plan:
        """Plan the restart of one stage; lost stages are started with it."""
        engine, stage = self._engine, verb.stage
        if text := engine.board.unknown(stage):
            raise CommandError("NOT_FOUND", text)

        def begin(operation: Operation) -> None:
            older = self._operations.pop(stage, None)
            if older is not None:
                engine.operations.end(older, "superseded", f"restarted once more by {command.by}")
            self._operations[stage] = operation
            self.start([stage])

        lines, figures = restart_plan(engine, stage, self.generation + 1)
        return Plan(lines, begin, target=str(stage), figures=figures)

    # --- one turn ---------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do what is due: begin a generation, hurry who does not leave the old one, go on when all have met."""
        now = self._engine.clock()
        due = {stage for stage, at in self._due.items() if at <= now}
        healed = set() if self.down else {stage for stage in due & self._cut if self._restarts.heals(stage)}
        for stage in due:
            del self._due[stage]
        if any(self._engine.board.is_hearsay(stage) for stage in due):
            self.losses.confirm()
        start = due - healed
        for stage in sorted(start):
            self._engine.event("stage.lost", f"stage {stage}: {self._engine.board.lost[stage]}", stage=stage)
            if not self.down and (why := self._refuses(stage)):
                self.stay_down(why)
        asked, self._asked = self._asked, set()
        if asked:
            self.down = self._engine.outputs.failure = ""
            self._due.clear()
            self.losses.drop()
            self._begin({*asked, *self._engine.board.lost})
        elif due and not self.down:
            self._begin(start, healed)
        if not self.active:
            return
        self._start_the_noisy()
        if self._engine.board.all_ready(self.generation):
            self._go_on()
        else:
            self._tell_progress()

    def _refuses(self, stage: int) -> str | None:
        """Return why a lost stage is not started anew; None: it is."""
        loading = stage in self._starting
        self._starting.discard(stage)
        return self._restarts.refuses(stage, loading=loading)

    def kept_down(self, without: int) -> list[int]:
        """Return the lost stages that only the cordon of stage `without` keeps from being started anew."""
        lost = sorted(self._engine.board.lost)
        others = any(stage in self._engine.cordons for stage in lost if stage != without)
        return lost if self.down and self._restarts.cordoned and without in lost and not others else []

    def start(self, stages: list[int]) -> None:
        """Start stages anew at the next turn, and with them all that are lost."""
        self._asked.update(stages)

    def _begin(self, stages: set[int], healed: set[int] | None = None) -> None:
        """Begin a generation in which `stages` are started anew and the others meet them.

        `healed`: of the others, the ends of a wire that closed.
        """
        engine = self._engine
        self._rejoining = healed or set()
        if not self.active:
            self._begun = engine.clock()
            self._recomputed = sum(1 for request in engine.live() if request.num_computed)
        self.active, self.generation = True, self.generation + 1
        self._quiet, self._deadline = set(), engine.clock() + QUIET_S
        # What was only heard of edges of an older generation is moot; who is gone will not get quiet.
        self._due = {stage: at for stage, at in self._due.items() if not engine.board.is_hearsay(stage)}
        engine.board.begin()
        names = " and ".join(f"stage {stage}" for stage in sorted(stages))
        why = f"{names} {'was' if len(stages) == 1 else 'were'} restarted" if stages else engine.board.loss
        for request in engine.scheduler.restart(why):
            engine.ended(request)
        for stage in self._stages:
            if stage in stages:
                self._start(stage)
            else:
                self._tell_stage(stage, NewGeneration(self.generation))
        if stages:
            engine.event("stage.restart", f"{names} started anew, generation {self.generation}", stage=min(stages))
        else:
            stage, text = next(iter(engine.board.lost.items()))
            text = f"stage {stage}: {text}, and no process has ended; all meet again, generation {self.generation}"
            engine.event("wire.lost", text, stage=stage)

    def _start(self, stage: int) -> None:
        self._born[stage] = self.generation
        self._starting.add(stage)
        self._engine.board.ready.pop((stage, 0), None)
        self._engine.board.progress[stage, 0] = f"stage {stage}: starting"
        self._start_stage(stage, self.generation)

    def _noisy(self) -> list[int]:
        """Return the survivors that should have left the old generation by now and have not."""
        board = self._engine.board
        if self._engine.clock() < self._deadline:
            return []
        gone = {*self._starting, *self._quiet, *(stage for stage in board.lost if not board.is_hearsay(stage))}
        met = {stage for (stage, _), ready in board.ready.items() if ready.generation == self.generation}
        return [stage for stage in self._stages if stage not in gone | met]

    def _start_the_noisy(self) -> None:
        for stage in self._noisy():
            if stage not in self._engine.cordons:
                text = f"stage {stage} did not leave the old generation within {QUIET_S:g} s: started anew too"
                self._engine.event("stage.restart", text, stage=stage)
                self._start(stage)

    def _tell_progress(self) -> None:
        engine = self._engine
        words = [engine.board.progress.get((stage, 0), "") for stage in sorted(self._starting)]
        words += [f"stage {stage} does not leave the old generation and is {engine.cordons.of(stage)}: "
                  f"restart-stage {stage}, or lift the cordon" for stage in self._noisy()]  # fmt: skip
        text = "; ".join(filter(None, words)) or "the stages meet"
        engine.message = f"{engine.board.loss}; {text}" if engine.board.lost else text
        for operation in self._operations.values():
            engine.operations.defer(operation, text)

    def _go_on(self) -> None:
        """All stages have met: map what was agreed and schedule again."""
        engine, profile = self._engine, self._engine.config.profile
        capacity = Capacity(engine.board.ready.values(), profile.memory.block_size, engine.config.max_model_len)
        if refusal := capacity.refusal(1.0):
            self.stay_down(f"a stage came back with less room: {refusal}")
            return
        self.active = False
        # What was only heard of an edge of the old generation is moot: its stage is here.
        self._due.clear()
        self._cut.clear()
        self._rejoining.clear()
        engine.board.found()
        engine.message = engine.outputs.failure = ""
        engine.scheduler.steps.generation = self.generation
        engine.resizer.restart(capacity)
        engine.checks.restate()
        self.losses.heal(self._recomputed)
        took = engine.clock() - self._begun
        text = f"all stages are back after {took:.1f} s, generation {self.generation}"
        text += f"; {self._recomputed} requests are recomputed" if self._recomputed else ""
        engine.event("engine.serving", text)
        operations, self._operations = self._operations, {}
        for stage, operation in operations.items():
            pid = engine.board.ready[stage, 0].pid
            engine.operations.end(operation, "applied", f"stage {stage} is pid {pid}; {text}")

    def stay_down(self, why: str) -> None:
        """Give up until an operator restarts a stage: `why` in one line."""
        engine = self._engine
        self.active, self.down = False, why
        self._due.clear()
        self._rejoining.clear()
        self._operations.clear()
        engine.message = engine.outputs.failure = why
        for operation in engine.operations.live:
            engine.operations.end(operation, "failed", f"{why}; how far it came is not known")
