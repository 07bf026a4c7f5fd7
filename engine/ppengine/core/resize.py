"""Memory utilization changed live: plan, shrink or grow in revisions, one outcome each.

Shrink: logical first (the scheduler stops using the tail, moves, swaps, recomputes), then physical. Grow: physical
first, then logical. A later change supersedes one under way; while a `map_blocks` step is in flight the new
target waits for its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppengine.config import check_utilization
from ppengine.core.operations import Operation
from ppengine.core.stages import Flight
from ppengine.memory import MemoryPlan
from ppengine.protocol.control import Command, Outcome, Refused, SetMemory

if TYPE_CHECKING:
    from ppengine.core.engine import Engine


class Resizer:
    """Holds the agreed number of mapped blocks and the change under way."""

    def __init__(self, engine: Engine, memory: MemoryPlan, utilization: float, blocks: int) -> None:
        self._engine = engine
        self.memory = memory
        self.utilization = utilization
        self.revision = 0
        self.mapped_blocks = blocks
        self._target = blocks
        self._operation: Operation | None = None
        self._mapping = True
        self._before = blocks
        self._rolling_back = ""

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._operation is not None

    def handle(self, client: bytes, command: Command, verb: SetMemory) -> None:
        """Plan or begin a change; raises ValueError for a utilization that can never be right."""
        check_utilization(verb.utilization)
        engine = self._engine
        if command.if_rev is not None and command.if_rev != self.revision:
            text = (
                f"memory is at revision {self.revision} (utilization {self.utilization:g}), you saw {command.if_rev}; "
                "look again and decide"
            )
            engine.reply(client, Refused(id=command.id, code="CONFLICT", text=text))
            return
        capacity = self.memory.capacity(verb.utilization)
        if capacity.blocks < self.memory.least_blocks(engine.config.max_model_len):
            text = self.memory.refusal(verb.utilization, engine.config.max_model_len)
            engine.reply(client, Refused(id=command.id, code="DOES_NOT_FIT", text=text))
            return
        plan = engine.scheduler.plan_resize(capacity.blocks)
        if plan.refused:
            engine.reply(client, Refused(id=command.id, code="DOES_NOT_FIT", text=plan.refused))
            return
        lines = [f"stage {capacity.binding} is binding: {capacity.exact} blocks fit, {capacity.blocks} in whole quanta"]
        lines += plan.lines()
        if command.dry_run:
            outcome = Outcome(
                id=command.id, op="", state="planned", text=lines[1], plan=lines, revision=self.revision,
                figures=plan.figures(),
            )  # fmt: skip
            engine.reply(client, outcome)
            return
        self._begin(client, command, verb.utilization, capacity.blocks)

    def advance(self) -> None:
        """Give memory back once nothing can touch it any more."""
        if self._operation is None or self._mapping:
            return
        scheduler = self._engine.scheduler
        if self._target == self.mapped_blocks:
            scheduler.finish_resize(self._target)
            self._end("applied")
        elif self._target > self.mapped_blocks or scheduler.resize_ready():
            self._mapping = True
            self._engine.send(scheduler.map_step(self._target))
        else:
            self._engine.operations.defer(self._operation, scheduler.resize_progress())

    def mapped(self, flight: Flight) -> None:
        """All stages have answered a `map_blocks` step."""
        self._mapping = False
        got = min(flight.mapped)
        self.mapped_blocks = got
        scheduler = self._engine.scheduler
        if self._operation is None:
            if got < self._target:
                self._engine.leave(f"the KV cache could not be mapped: {'; '.join(flight.errors)}")
            return
        if flight.errors or max(flight.mapped) != got:
            # One stage could not follow: all go back to what everyone has.
            self._rolling_back = "; ".join(flight.errors) or "stages answered different sizes"
            self._target = got
            if max(flight.mapped) != got:
                self._mapping = True
                self._engine.send(scheduler.map_step(got))
                return
        if self._target == got:
            scheduler.finish_resize(got)
            self._end("failed" if self._rolling_back else "applied", flight.number)
        elif self._target < got:
            scheduler.begin_resize(self._target)

    # --- inside ---------------------------------------------------------------------------------------------

    def _begin(self, client: bytes, command: Command, utilization: float, blocks: int) -> None:
        engine = self._engine
        older = self._operation
        self.revision += 1
        if older is not None:
            engine.operations.end(
                older, "superseded", f"superseded by utilization {utilization:g} (revision {self.revision})"
            )
        self._operation = engine.operations.open(command, client, f"{self.utilization:g}>{utilization:g}")
        self.utilization, self._target, self._rolling_back = utilization, blocks, ""
        self._before = self.mapped_blocks
        engine.scheduler.revision = self.revision
        engine.scheduler.begin_resize(min(blocks, self.mapped_blocks))
        self.advance()

    def _end(self, state: str, step: int | None = None) -> None:
        operation = self._operation
        if operation is None:
            return
        self._operation = None
        report = self._engine.scheduler.take_resize_report()
        figures = {"blocks_before": float(self._before), "blocks_after": float(self.mapped_blocks), **report.figures()}
        text = f"{self._before} > {self.mapped_blocks} blocks; {report.text()}"
        if state == "failed":
            self.utilization = self.memory.utilization_of(self.mapped_blocks)
            text = f"{self._rolling_back}; stays at {self.mapped_blocks} blocks (utilization {self.utilization:.3f})"
            self._engine.operations.end(operation, "failed", text, step=step, revision=self.revision, figures=figures)
            return
        self._engine.operations.end(operation, "applied", text, step=step, revision=self.revision, figures=figures)
