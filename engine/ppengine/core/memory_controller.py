"""Memory utilization changed live: plan, shrink or grow in revisions, one outcome each.

Shrink: logical first (the scheduler stops using the tail, moves, swaps, recomputes), then physical. Grow: physical
first, then logical. Stages change what is mapped beside the steps that follow, and answer with `Mapped` when they are
done. A later change supersedes one under way; while stages are at it the new target waits for their answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ppengine.common.config import check_utilization
from ppengine.core.capacity import Capacity
from ppengine.core.operations import Operation
from ppengine.core.plans import CommandError, Plan
from ppengine.core.scheduler import ResizeReport
from ppengine.core.stage_tracker import Change
from ppengine.protocol.control import Command
from ppengine.protocol.verbs import SetMemory

if TYPE_CHECKING:
    from ppengine.core.engine import Engine


_BOOT, _AGAIN = 0, -1
"""In place of a revision: the first mapping, and the one with which a new generation of stages begins."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the newest `map_blocks` step was sent for."""

    utilization: float
    revision: int


class Resizer:
    """Holds the agreed number of mapped blocks and the change under way."""

    def __init__(self, engine: Engine, capacity: Capacity, utilization: float) -> None:
        self._engine = engine
        self.capacity = capacity
        self.utilization = utilization
        self.revision = 0
        self.mapped_blocks = capacity.plan(utilization).mapped
        self._target = self.mapped_blocks
        self._operation: Operation | None = None
        self._mapping = True
        """Stages have been told to map, and not all have answered; the first time is at boot."""
        self._asked = _Asked(utilization, _BOOT)
        self._uneven = False
        """Some stages have more than `mapped_blocks`: one could not follow a grow."""
        self._before = self.mapped_blocks
        self._agreed = utilization
        """What `mapped_blocks` came from; `utilization` is what was asked for last."""
        self._failure = ""
        self._step: int | None = None
        """Step that mapped what the change under way asked for."""

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._operation is not None

    @property
    def begins(self) -> bool:
        """Whether stages are at the mapping with which a generation begins: until then they have no block to use."""
        return self._mapping and self._asked.revision in (_BOOT, _AGAIN)

    def conflict(self, seen: int) -> str:
        """Return why a command about revision `seen` is refused; empty: `seen` is the present one."""
        if seen == self.revision:
            return ""
        now = f"memory is at revision {self.revision} (utilization {self.utilization:g})"
        return f"{now}, you saw {seen}; look again and decide"

    def plan_set_memory(self, verb: SetMemory, command: Command) -> Plan:
        """Plan a change. Raises ValueError for a utilization that can never be right, CommandError if it lacks room."""
        check_utilization(verb.utilization)
        memory = self.capacity.plan(verb.utilization)
        refusal = self.capacity.refusal(verb.utilization)
        plan = self._engine.scheduler.resize.plan(memory.mapped)
        if refusal or plan.refused:
            raise CommandError("DOES_NOT_FIT", refusal or plan.refused or "")
        binding = f"stage {memory.binding} is binding: {memory.blocks} blocks fit, {memory.mapped} in whole quanta"
        same = self._is_so(verb.utilization, memory.mapped)
        return Plan(
            [*plan.lines(), binding],
            self._end_unchanged if same else lambda each: self._begin(each, verb.utilization, memory.mapped),
            target=f"{verb.utilization:g}" if same else f"{self.utilization:g}>{verb.utilization:g}",
            revision=self.revision, figures=plan.figures(),
        )  # fmt: skip

    def advance(self) -> None:
        """Give memory back once nothing can touch it any more, or take it before anything does."""
        engine, scheduler = self._engine, self._engine.scheduler
        if self._operation is None or self._mapping or engine.recovery.holds or engine.leaving:
            return
        if self._target == self.mapped_blocks and not self._uneven:
            self._end(scheduler.resize.finish(self._target))
        elif self._target >= self.mapped_blocks or scheduler.resize.ready():
            self._mapping, self._asked = True, _Asked(self.utilization, self.revision)
            engine.send(scheduler.resize.map_step(self._target))
        else:
            live = scheduler.blocks.device.tail_live
            engine.operations.defer(self._operation, f"{live} live blocks to leave the tail")

    def mapped(self, change: Change) -> None:
        """All stages have ended what a `map_blocks` step began."""
        asked, errors = self._asked, "; ".join(change.errors)
        self._mapping, self._step = False, change.number
        self.mapped_blocks = min(change.mapped)
        self._uneven = max(change.mapped) != self.mapped_blocks
        if not errors:
            self._agreed = asked.utilization
        elif asked.revision == _AGAIN:
            self._engine.recovery.stay_down(f"the KV cache could not be mapped again: {errors}")
        elif asked.revision == _BOOT:
            self._engine.failed = f"the KV cache could not be mapped: {errors}"
            self._engine.leave(self._engine.failed)
        elif asked.revision == self.revision:
            # One stage could not follow: all go back to what everyone has.
            self._failure = errors
            self._target, self.utilization = self.mapped_blocks, self._agreed
        else:
            # The change that it was for was superseded meanwhile; the one under way goes on from what there is.
            self._engine.event("memory.error", f"utilization {asked.utilization:g}, superseded: {errors}")

    def restart(self, capacity: Capacity) -> None:
        """All stages have met in a new generation, one with nothing mapped: map what was agreed on all of them.

        A change under way begins again from there: nobody holds a block. Less is mapped where a stage that came back
        has room for less at the utilization that was agreed.
        """
        engine, scheduler = self._engine, self._engine.scheduler
        size = scheduler.blocks.device.size
        if self._mapping and self._asked.revision > _BOOT and size < self.mapped_blocks:
            # What a shrink gave up is gone, whoever has mapped it.
            self._agreed = self._asked.utilization
        if self._operation is not None and self._operation.ended is not None:
            # The engine was down meanwhile, and its author was told that it has failed.
            self._operation, self.utilization = None, self._agreed
        self.capacity = capacity
        # Its peak is measured anew. Where that leaves no room for one sequence, what is there serves on as it is.
        fits = capacity.refusal(self._agreed) is None
        if (most := capacity.plan(self._agreed if fits else 1.0).mapped) < size:
            size = most
            scheduler.resize.begin(size)
        self._mapping, self._asked, self._step = True, _Asked(self._agreed, _AGAIN), None
        self.mapped_blocks = size
        engine.send(scheduler.resize.map_step(size))
        if self._operation is not None:
            self._target = capacity.plan(self.utilization).mapped
            scheduler.resize.begin(min(self._target, scheduler.blocks.device.size))

    # --- inside ---------------------------------------------------------------------------------------------

    def _is_so(self, utilization: float, blocks: int) -> bool:
        """Whether all stages have what is asked for, and nothing is under way that would change it."""
        settled = not (self.busy or self._mapping or self._uneven)
        return settled and (utilization, blocks) == (self.utilization, self.mapped_blocks)

    def _end_unchanged(self, operation: Operation) -> None:
        # No new revision: plans that operators have open on this one are as good as before.
        text = f"nothing to change: {self.mapped_blocks} blocks are mapped"
        self._engine.operations.end(operation, "applied", text, revision=self.revision)

    def _begin(self, operation: Operation, utilization: float, blocks: int) -> None:
        engine, older = self._engine, self._operation
        self.revision += 1
        if older is not None:
            text = f"superseded by utilization {utilization:g} (revision {self.revision})"
            engine.operations.end(older, "superseded", text, revision=self.revision)
        self._operation = operation
        self._before = self.mapped_blocks
        self.utilization, self._target, self._failure = utilization, blocks, ""
        self._step = None
        engine.scheduler.steps.revision = self.revision
        engine.scheduler.resize.begin(min(blocks, engine.scheduler.blocks.device.size))
        self.advance()

    def _end(self, report: ResizeReport) -> None:
        operation, self._operation = self._operation, None
        if operation is None:
            return
        figures = {"blocks_before": float(self._before), "blocks_after": float(self.mapped_blocks), **report.figures()}
        text = f"{self._before} > {self.mapped_blocks} blocks{report.text()}"
        if self._failure:
            text = f"{self._failure}; stays at {self.mapped_blocks} blocks"
        state: Literal["applied", "failed"] = "failed" if self._failure else "applied"
        self._engine.operations.end(
            operation, state, text, step=self._step, revision=self.revision, figures=figures
        )  # fmt: skip
