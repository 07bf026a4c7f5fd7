"""The steps in flight between the core and its stages, and the change of the mapping under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ppengine.core.stage_records import Stages
from ppengine.protocol.frames import encode
from ppengine.protocol.place import Place
from ppengine.protocol.prompt_scores import PromptScores
from ppengine.protocol.steps import LateMasks, Mapped, Retired, Sampled, Step


@dataclass(slots=True)
class InFlightStep:
    """One step that not every stage has retired."""

    number: int
    sent: float
    """Time at which it was sent, in seconds of the clock."""
    tokens: int
    moved: int
    """Blocks that it copies or swaps."""
    missing: set[Place]
    sampled: list[Sampled] = field(default_factory=list)
    prompts: list[PromptScores] = field(default_factory=list)
    digests: dict[int, int] = field(default_factory=dict)
    """By rank of the last stage: checksum of the tokens that it sampled."""

    @property
    def differing(self) -> list[int]:
        """Ranks of the last stage that sampled other tokens than rank 0."""
        return [rank for rank, digest in sorted(self.digests.items()) if digest != self.digests.get(0)]


@dataclass(slots=True)
class Change:
    """A change of the mapping that not every stage has ended."""

    number: int
    """Number of the step that began it."""
    blocks: int
    """Most blocks by which it changes the mapping."""
    missing: set[Place]
    mapped: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class StageTracker:
    """Sends steps and counts the stages that have retired them."""

    def __init__(self, stages: Stages, send: Callable[[bytes, bytes], None], clock: Callable[[], float]) -> None:
        """`send` takes the bytes for the other stages, empty if there are none, and for the last one."""
        self._stages = stages
        self._send = send
        self._clock = clock
        self._places = stages.places
        self._last = stages.places[-1].stage
        self._steps: deque[InFlightStep] = deque()
        self._change: Change | None = None
        self._map_blocks = 0
        """Blocks of the newest request to map."""

    @property
    def numbers(self) -> list[int]:
        """Steps in flight, oldest first."""
        return [step.number for step in self._steps]

    def reset(self) -> None:
        """Drop all steps in flight and the change under way: a new generation begins with nothing mapped."""
        self._steps.clear()
        self._change, self._map_blocks = None, 0

    def send(self, step: Step) -> None:
        """Send `step` to every stage, with its masks to the last one alone."""
        tokens = sum(row.count for row in step.rows)
        self._steps.append(InFlightStep(step.number, self._clock(), tokens, len(step.moves), set(self._places)))
        if step.map_blocks is not None:
            blocks = abs(step.map_blocks - self._map_blocks)
            self._change, self._map_blocks = Change(step.number, blocks, set(self._places)), step.map_blocks
        whole = encode(step)
        self._send(encode(msgspec.structs.replace(step, masks=[])) if step.masks else whole, whole)

    def send_masks(self, masks: LateMasks) -> None:
        """Send the masks of a step's late rows to the last stage."""
        self._send(b"", encode(masks))

    def acknowledge(self, message: Retired) -> bool:
        """Note one stage's retirement, unless late or repeated; return whether the oldest step has retired."""
        place = Place(message.stage, message.rank)
        for step in self._steps:
            if step.number == message.number and place in step.missing:
                step.missing.discard(place)
                record = self._stages[place]
                record.retired_step = max(record.retired_step, message.number)
                if place.stage == self._last:
                    step.digests[place.rank] = message.digest
                    if not place.rank:
                        step.sampled, step.prompts = message.sampled, message.prompts
                break
        return bool(self._steps) and not self._steps[0].missing

    @property
    def unmapped(self) -> str:
        """The stages that have not ended the change under way, in words."""
        missing = self._change.missing if self._change is not None else ()
        return ", ".join(self._stages[place].name for place in sorted(missing))

    def mapped(self, message: Mapped) -> bool:
        """Note that one stage has ended the change, unless late or repeated; return whether all have."""
        change, place = self._change, Place(message.stage, message.rank)
        if change is None or message.number != change.number or place not in change.missing:
            return False
        change.missing.discard(place)
        change.mapped.append(message.blocks)
        if message.error:
            change.errors.append(f"{self._stages[place].name}: {message.error}")
        return not change.missing

    def take_retired(self) -> list[InFlightStep]:
        """Return, in order, the steps that every stage has retired."""
        done = []
        while self._steps and not self._steps[0].missing:
            done.append(self._steps.popleft())
        return done

    def take_change(self) -> Change | None:
        """Return, once, the change that every stage has ended."""
        change = self._change
        if change is None or change.missing:
            return None
        self._change = None
        return change

    def holder(self, number: int) -> int | None:
        """Return the first stage that has not retired step `number`; None if the step is not in flight."""
        for step in self._steps:
            if step.number == number:
                return min(place.stage for place in step.missing) if step.missing else None
        return None

    def oldest(self, place: Place) -> InFlightStep | None:
        """Return the oldest step that the stage at `place` has not retired."""
        return next((step for step in self._steps if place in step.missing), None)

    def mapping_blocks(self, place: Place) -> int:
        """Return by how many blocks, at most, a change changes the mapping that the stage has not ended."""
        return self._change.blocks if self._change and place in self._change.missing else 0
