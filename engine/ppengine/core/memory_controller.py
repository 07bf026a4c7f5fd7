"""Memory utilization changed live: plan, shrink or grow in revisions, one outcome each.

Shrink: logical first (the scheduler stops using the tail, moves, swaps, recomputes), then physical. Grow: physical
first, then logical. Stages change the mapping beside the steps that follow, and answer with `Mapped`. A later change
supersedes one under way; its target waits for their answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ppengine.common.config import check_utilization
from ppengine.core.capacity import Capacity
from ppengine.core.device_room import RoomBook
from ppengine.core.events import Events
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.scheduler import ResizeReport, Scheduler
from ppengine.core.stage_tracker import Change
from ppengine.protocol.control import Command
from ppengine.protocol.steps import Step
from ppengine.protocol.verbs import SetMemory

LATE_S = 1.0
"""Seconds after which a command says for which stages it waits: most map 10 GiB in a tenth of that."""
_BOOT, _AGAIN = 0, -1
"""Placeholders for a revision: the first mapping, and the one with which a new generation begins."""


@dataclass(frozen=True, slots=True)
class _Requested:
    """The purpose of the newest `map_blocks` step."""

    utilization: float
    revision: int


@dataclass(eq=False)
class MemoryController:
    """Holds the agreed number of mapped blocks and the change under way."""

    _scheduler: Scheduler
    capacity: Capacity
    utilization: float
    _operations: Operations
    _event: Events
    _send: Callable[[Step], None]
    _blocked: Callable[[], bool]
    _fail: Callable[[str], None]
    _stay_down: Callable[[str], None]
    _rooms: RoomBook
    _unmapped: Callable[[], str]
    """Returns the names of the stages that have not ended the change of the mapping under way."""
    _clock: Callable[[], float]
    revision: int = field(init=False, default=0)
    _operation: Operation | None = field(init=False, default=None)
    _mapping: bool = field(init=False, default=True)
    """Not all stages have answered the newest `map_blocks` step; the first one is sent at boot."""
    _asked_at: float = field(init=False, default=0.0)
    """Time of that step."""
    _uneven: bool = field(init=False, default=False)
    """Some stages have more than `mapped_blocks`, because another one could not grow."""
    _failure: str = field(init=False, default="")
    _step: int | None = field(init=False, default=None)
    """Step that mapped the blocks of the change under way."""

    def __post_init__(self) -> None:
        self.mapped_blocks = self._target = self._before = self.capacity.plan(self.utilization).mapped
        self._requested = _Requested(self.utilization, _BOOT)
        self._agreed = self.utilization

    @property
    def agreed(self) -> float:
        """Utilization behind `mapped_blocks`; `utilization` is the newest request."""
        return self._agreed

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._operation is not None

    @property
    def begins(self) -> bool:
        """Whether stages map the first blocks of a generation; until then they have no block to use."""
        return self._mapping and self._requested.revision in (_BOOT, _AGAIN)

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
        plan = self._scheduler.resize.plan(memory.mapped)
        refusal = self.capacity.refusal(verb.utilization) or plan.refused or self._shortage(memory.mapped)
        if refusal:
            raise CommandError("DOES_NOT_FIT", refusal)
        lines = [*plan.lines(self.capacity.block_bytes), *self._room_lines(memory.mapped)]
        binding = self.capacity.binding(memory)
        lines.append(f"{binding} is binding: {memory.blocks} blocks fit, {memory.mapped} in whole quanta")
        same = self._is_so(verb.utilization, memory.mapped)
        return Plan(
            lines,
            self._end_unchanged if same else lambda each: self._begin(each, verb.utilization, memory.mapped),
            target=f"{verb.utilization:g}" if same else f"{self.utilization:g}>{verb.utilization:g}",
            revision=self.revision, figures=plan.figures(),
        )  # fmt: skip

    def advance(self) -> None:
        """Unmap blocks once nothing can reach them any more, or map new ones before anything does."""
        scheduler = self._scheduler
        if self._operation is None or self._blocked():
            return
        if self._mapping:
            if self._clock() - self._asked_at >= LATE_S:
                self._operations.defer(self._operation, f"waits for {self._unmapped()} to change its mapping")
        elif self._target == self.mapped_blocks and not self._uneven:
            self._end(scheduler.resize.finish(self._target))
        elif self._target >= self.mapped_blocks or scheduler.resize.ready():
            self._requested = _Requested(self.utilization, self.revision)
            self._map(self._target)
        else:
            live = scheduler.blocks.device.tail_live
            self._operations.defer(self._operation, f"{live} live blocks to leave the tail")

    def _map(self, blocks: int) -> None:
        """Send the step with which stages begin to map exactly that number of blocks."""
        self._mapping, self._asked_at = True, self._clock()
        self._send(self._scheduler.resize.map_step(blocks))

    def mapped(self, change: Change) -> None:
        """Note that all stages have ended the change of a `map_blocks` step."""
        asked, errors = self._requested, "; ".join(change.errors)
        self._mapping, self._step = False, change.number
        self._rooms.note_change()
        self.mapped_blocks = min(change.mapped)
        self._uneven = max(change.mapped) != self.mapped_blocks
        if not errors:
            self._agreed = asked.utilization
        elif asked.revision == _AGAIN:
            self._stay_down(f"the KV cache could not be mapped again: {errors}")
        elif asked.revision == _BOOT:
            self._fail(f"the KV cache could not be mapped: {errors}")
        elif asked.revision == self.revision:
            # One stage could not follow: all return to the blocks that every stage has.
            self._failure = errors
            self._target, self.utilization = self.mapped_blocks, self._agreed
        else:
            # Its change was superseded meanwhile; the one under way goes on from the present mapping.
            self._event("memory.error", f"utilization {asked.utilization:g}, superseded: {errors}")

    def restart(self, capacity: Capacity) -> None:
        """Map the agreed blocks on all stages, which have met in a new generation.

        A change under way begins again from there, because no request holds a block. Fewer blocks are mapped if a
        restarted stage has room for fewer at the agreed utilization.
        """
        scheduler = self._scheduler
        size = scheduler.blocks.device.size
        if self._mapping and self._requested.revision > _BOOT and size < self.mapped_blocks:
            # The blocks that a shrink released are gone, even if a stage still maps them.
            self._agreed = self._requested.utilization
        if self._operation is not None and self._operation.ended is not None:
            # Serving was blocked meanwhile, and the operation ended as failed.
            self._operation, self.utilization = None, self._agreed
        self.capacity = capacity
        # Its peak was measured again. If that leaves no room for one sequence, all available blocks are mapped.
        fits = capacity.refusal(self._agreed) is None
        if (most := capacity.plan(self._agreed if fits else 1.0).mapped) < size:
            size = most
            scheduler.resize.begin(size)
        self._requested, self._step = _Requested(self._agreed, _AGAIN), None
        self.mapped_blocks = size
        self._map(size)
        if self._operation is not None:
            self._target = capacity.plan(self.utilization).mapped
            scheduler.resize.begin(min(self._target, scheduler.blocks.device.size))

    # --- inside ---------------------------------------------------------------------------------------------

    def _shortage(self, blocks: int) -> str:
        """Return why the devices have no room to grow to `blocks` now; empty if they have, or it is not known."""
        if self._unsettled or blocks <= self.mapped_blocks:
            return ""
        return self._rooms.shortage(self.capacity, self.mapped_blocks, blocks)

    def _room_lines(self, blocks: int) -> list[str]:
        if blocks <= self.mapped_blocks:
            return []
        if self._unsettled:
            return ["free memory is not known while a change is under way: planned without it"]
        return [self._rooms.line(self.capacity, blocks - self.mapped_blocks)]

    @property
    def _unsettled(self) -> bool:
        """Whether stages may change their memory now, or have different numbers of blocks."""
        return self.busy or self._mapping or self._uneven

    def _is_so(self, utilization: float, blocks: int) -> bool:
        """Return whether all stages have the requested blocks, and no change is under way."""
        return not self._unsettled and (utilization, blocks) == (self.utilization, self.mapped_blocks)

    def _end_unchanged(self, operation: Operation) -> None:
        # No new revision: plans that operators have open on this one stay valid.
        text = f"nothing to change: {self.mapped_blocks} blocks are mapped"
        self._operations.end(operation, "applied", text, revision=self.revision)

    def _begin(self, operation: Operation, utilization: float, blocks: int) -> None:
        scheduler, older = self._scheduler, self._operation
        self.revision += 1
        if older is not None:
            text = f"superseded by utilization {utilization:g} (revision {self.revision})"
            self._operations.end(older, "superseded", text, revision=self.revision)
        self._operation = operation
        self._before = self.mapped_blocks
        self.utilization, self._target, self._failure = utilization, blocks, ""
        self._step = None
        scheduler.steps.revision = self.revision
        scheduler.resize.begin(min(blocks, scheduler.blocks.device.size))
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
        self._operations.end(
            operation, state, text, step=self._step, revision=self.revision, figures=figures
        )  # fmt: skip
