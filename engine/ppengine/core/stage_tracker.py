"""What the core knows of its stages: readiness, acknowledged steps, memory figures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppengine.protocol.reports import StageView
from ppengine.protocol.steps import FIRST_GENERATION, Mapped, Retired, Sampled, StageReady, Step

if TYPE_CHECKING:
    from ppengine.core.cordons import Cordons

StageKey = tuple[int, int]
"""(stage, tensor rank)."""


@dataclass(slots=True)
class Flight:
    """One step that not every stage has retired."""

    number: int
    sent_ns: int
    tokens: int
    moved: int
    """Blocks that it copies or swaps."""
    missing: set[StageKey]
    sampled: list[Sampled] = field(default_factory=list)


@dataclass(slots=True)
class Change:
    """A change of the mapping that not every stage has ended."""

    number: int
    """Of the step that began it."""
    blocks: int
    """By how many it changes the mapping, at most."""
    missing: set[StageKey]
    mapped: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class StageBoard:
    """Keeps count of stages and of the steps in flight between them."""

    def __init__(self, stages: int, layers: list[tuple[int, int]]) -> None:
        self.keys: list[StageKey] = [(index, 0) for index in range(stages)]
        self.last = self.keys[-1]
        self.ready: dict[StageKey, StageReady] = {}
        self.progress: dict[StageKey, str] = {}
        self.lost: dict[int, str] = {}
        """Stages that cannot go on, with the reason; the first one is the cause of the others."""
        self._lost_born: dict[int, int] = {}
        self._hearsay: set[int] = set()
        self._layers = layers
        self._flights: deque[Flight] = deque()
        self._retired: dict[StageKey, int] = dict.fromkeys(self.keys, 0)
        self._change: Change | None = None
        self._map_blocks = 0
        """What stages were told to map last."""

    def unknown(self, stage: int) -> str:
        """Return that there is no such stage, and which there are; empty when there is."""
        return "" if (stage, 0) in self.keys else f"no stage {stage}: this engine has 0 to {self.last[0]}"

    def all_ready(self, generation: int) -> bool:
        """Whether every stage has loaded and has met its neighbours in `generation`."""
        ready = [self.ready.get(key) for key in self.keys]
        return all(stage is not None and stage.generation == generation for stage in ready)

    @property
    def on_gpus(self) -> list[int]:
        """The stages that are on GPUs."""
        return [stage.stage for stage in self.ready.values() if stage.device_kind != "cpu"]

    @property
    def retired_step(self) -> int:
        """Newest step that every stage has retired."""
        return min(self._retired.values())

    @property
    def numbers(self) -> list[int]:
        """Steps in flight, oldest first."""
        return [flight.number for flight in self._flights]

    def lose(self, stage: int, why: str, born: int, *, hearsay: bool = False, anew: bool = False) -> bool:
        """Note that a stage cannot go on, whose process was started for generation `born`; False when that is known.

        What is known by hearsay, from a neighbour that saw its connection close, gives way to its exit status; and what
        is known of a process gives way to the end of the one that was started `anew` in its place.
        """
        if stage in self.lost and (hearsay or stage not in self._hearsay) and not anew:
            return False
        if hearsay:
            self._hearsay.add(stage)
        else:
            self._hearsay.discard(stage)
        self.lost[stage], self._lost_born[stage] = why, born
        return True

    def is_hearsay(self, stage: int) -> bool:
        """Whether a stage is lost by its neighbours' word alone."""
        return stage in self._hearsay

    def begin(self) -> None:
        """A new generation begins: what was in flight is dropped and will not retire, and who is new maps nothing."""
        self._flights.clear()
        self._change, self._map_blocks = None, 0

    def found(self) -> None:
        """All stages have met again: none is lost."""
        self.lost.clear()
        self._lost_born.clear()
        self._hearsay.clear()

    @property
    def loss(self) -> str:
        """What was lost first and why, in one line; empty when nothing was."""
        return next((f"stage {stage} is lost: {why}" for stage, why in self.lost.items()), "")

    def sent(self, step: Step) -> None:
        """Note that `step` went to every stage."""
        tokens = sum(row.count for row in step.rows)
        self._flights.append(Flight(step.number, time.monotonic_ns(), tokens, len(step.moves), set(self.keys)))
        if step.map_blocks is not None:
            blocks = abs(step.map_blocks - self._map_blocks)
            self._change, self._map_blocks = Change(step.number, blocks, set(self.keys)), step.map_blocks

    def acknowledge(self, message: Retired) -> bool:
        """Note one stage's retirement; late or repeated ones change nothing. Returns whether a step has retired."""
        key = (message.stage, message.rank)
        for flight in self._flights:
            if flight.number == message.number and key in flight.missing:
                flight.missing.discard(key)
                self._retired[key] = max(self._retired[key], message.number)
                if key == self.last:
                    flight.sampled = message.sampled
                break
        return bool(self._flights) and not self._flights[0].missing

    def mapped(self, message: Mapped) -> bool:
        """Note that one stage has ended a change; late or repeated answers change nothing. Returns whether all have."""
        change, key = self._change, (message.stage, message.rank)
        if change is None or message.number != change.number or key not in change.missing:
            return False
        change.missing.discard(key)
        change.mapped.append(message.blocks)
        if message.error:
            change.errors.append(f"stage {message.stage}: {message.error}")
        return not change.missing

    def take_retired(self) -> list[Flight]:
        """Return, in order, the flights that every stage has retired."""
        done = []
        while self._flights and not self._flights[0].missing:
            done.append(self._flights.popleft())
        return done

    def take_change(self) -> Change | None:
        """Return, once, the change that every stage has ended."""
        change = self._change
        if change is None or change.missing:
            return None
        self._change = None
        return change

    def holder(self, number: int) -> int | None:
        """Return the first stage that has not retired step `number`; None if it is not in flight."""
        for flight in self._flights:
            if flight.number == number:
                return min(stage for stage, _ in flight.missing) if flight.missing else None
        return None

    def views(
        self, capacities: Sequence[int], mapped: int | None, binding: int | None, cordons: Cordons
    ) -> list[StageView]:  # fmt: skip
        """Return what a report says of every stage."""
        now = time.monotonic_ns()
        views = []
        for key in self.keys:
            index, rank = key
            oldest = next((flight for flight in self._flights if key in flight.missing), None)
            ready = self.ready.get(key)
            view = StageView(
                index=index,
                rank=rank,
                ready=ready is not None,
                retired_step=self._retired[key],
                oldest_unretired_age_ms=None if oldest is None else (now - oldest.sent_ns) / 1e6,
                oldest_unretired_step=None if oldest is None else oldest.number,
                oldest_unretired_tokens=0 if oldest is None else oldest.tokens,
                oldest_unretired_moved=0 if oldest is None else oldest.moved,
                mapping_blocks=self._change.blocks if self._change and key in self._change.missing else 0,
                capacity=capacities[index] if capacities else None,
                mapped=mapped,
                binding=index == binding,
                layers=list(self._layers[index]),
                progress=self.progress.get(key, ""),
                lost="" if index in self._hearsay else self.lost.get(index, ""),
                lost_generation=self._lost_born.get(index, FIRST_GENERATION),
                cordon=cordons.info(index),
            )
            if ready is not None:
                view.total_bytes, view.weights_bytes = ready.total_bytes, ready.weights_bytes
                view.peak_bytes, view.block_bytes = ready.peak_bytes, ready.block_bytes
                view.swap_blocks, view.pid, view.host = ready.swap_blocks, ready.pid, ready.host
                view.device_kind, view.device_name = ready.device_kind, ready.device_name
                view.device_uuid = ready.device_uuid
            views.append(view)
        return views
