"""One record per stage process (a place): its phase, readiness, loss, cordon and past failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ppengine.common.groups import Groups
from ppengine.core.operations import Operation
from ppengine.core.signs_of_life import ORDERED, SignsOfLife
from ppengine.protocol.facts import LinkBroke, Lost
from ppengine.protocol.place import Place
from ppengine.protocol.stage_lifecycle import FIRST_GENERATION, StageReady

Phase = Literal["starting", "meeting", "serving", "draining", "lost"]
"""`starting`: the process loads. `draining`: it leaves an older generation. `meeting`: it waits for the others.

`lost`: it cannot go on, and no process was started in its place.
"""
FOLLOWING: dict[Phase, tuple[Phase, ...]] = {
    "starting": ("starting", "meeting", "lost"),
    "meeting": ("serving", "draining", "starting", "lost"),
    "serving": ("draining", "starting", "lost"),
    "draining": ("draining", "meeting", "starting", "lost"),
    "lost": ("starting",),
}
"""Phases that may follow each phase."""


@dataclass(slots=True)
class Loss:
    """The reason why a stage cannot go on; kept until all stages have met again."""

    why: str
    order: int
    """Rank among the present losses: the first one is the cause of the others."""
    due: float | None
    """Time at which the core acts on it, in seconds of the clock; None: it has."""
    fact: Lost | LinkBroke | None = None
    """Its last words, or the report of a neighbour; None: its process ended, and the supervisor notes that."""

    @property
    def unconfirmed(self) -> bool:
        """Whether only a neighbour reported it, and no process has ended."""
        return isinstance(self.fact, LinkBroke)


@dataclass(frozen=True, slots=True)
class PlacedCordon:
    """The author of a cordon, the reason, and its time in seconds of the clock."""

    by: str
    reason: str
    at: float


@dataclass(slots=True, eq=False)
class StageRecord:
    """Everything that the core knows about one stage process, except its steps in flight."""

    place: Place
    layers: tuple[int, int]
    name: str
    """Name for operators: `stage 1`, or `stage 1 rank 0` where stages have several ranks."""
    phase: Phase = "starting"
    started: int = FIRST_GENERATION
    """Generation for which its process was started."""
    ready: StageReady | None = None
    """Its newest report of readiness; None while the process loads."""
    progress: str = ""
    """Its newest line about loading."""
    life: SignsOfLife = field(default_factory=SignsOfLife)
    """Its newest sign of life while it starts."""
    retired_step: int = 0
    loss: Loss | None = None
    cordon: PlacedCordon | None = None
    deaths: deque[float] = field(default_factory=deque)
    """Times of the losses that count against an automatic restart."""
    wire_closed: float | None = None
    """Time at which a connection of the live process closed last."""
    restart: Operation | None = None
    """Restart that an operator requested and that has no outcome."""
    restart_due: bool = False
    """The next turn restarts it."""

    @property
    def stage(self) -> int:
        """Index of the stage."""
        return self.place.stage

    @property
    def cordoned(self) -> str:
        """Author of the cordon as `cordoned by eve`; empty without a cordon."""
        return f"cordoned by {self.cordon.by}" if self.cordon is not None else ""

    def transition(self, phase: Phase) -> None:
        """Enter `phase`. Raises ValueError if it may not follow the present one."""
        if phase not in FOLLOWING[self.phase]:
            raise ValueError(f"{self.name} is {self.phase}: it cannot become {phase}")
        self.phase = phase

    def start(self, generation: int, now: float) -> None:
        """Note that a process was ordered in its place for `generation`."""
        self.transition("starting")
        self.life.note(ORDERED, now)
        self.started, self.ready, self.progress = generation, None, f"{self.name}: starting"

    def resume(self, started: int, now: float, *, loaded: bool) -> None:
        """Take over a process of an older generation from the core before this one."""
        self.started, self.phase = started, "draining" if loaded else "starting"
        self.life.note("load", now)  # The phase with the most time: that core may have heard of any.

    def on_ready(self, message: StageReady) -> bool:
        """Note that it has loaded and met its neighbours; return whether its process is new."""
        started = self.phase == "starting"
        self.ready = message
        if self.phase in ("starting", "draining"):
            self.transition("meeting")
        return started


class Stages:
    """The records of all places, stage by stage in the order of the pipeline."""

    def __init__(self, layers: list[tuple[int, int]], tensor: int = 1) -> None:
        self.groups = groups = Groups(len(layers), tensor)
        self._records = {place: StageRecord(place, layers[place.stage], groups.text(place)) for place in groups.places}
        self._losses = 0

    def __iter__(self) -> Iterator[StageRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, place: tuple[int, int]) -> StageRecord:
        return self._records[Place(*place)]

    @property
    def places(self) -> list[Place]:
        """Keys of the records."""
        return list(self._records)

    def leader(self, stage: int) -> StageRecord:
        """Return the record of rank 0 of `stage`, which keeps the cordon and the restart of the whole stage."""
        return self._records[Place(stage, 0)]

    def ranks(self, stage: int) -> list[StageRecord]:
        """Return the records of all ranks of `stage`."""
        return [self._records[place] for place in self.groups.tensor_peers(Place(stage, 0))]

    def unknown(self, stage: int) -> str:
        """Return the error for an index without a stage; empty if there is one."""
        last = self.places[-1].stage
        return "" if Place(stage, 0) in self._records else f"no stage {stage}: this engine has 0 to {last}"

    def all_met(self, generation: int) -> bool:
        """Return whether every stage has loaded and has met its neighbours in `generation`."""
        return all(record.ready is not None and record.ready.generation == generation for record in self)

    @property
    def ready(self) -> list[StageReady]:
        """Readiness reports of the stages that have loaded."""
        return [record.ready for record in self if record.ready is not None]

    @property
    def on_gpus(self) -> list[int]:
        """Indices of the stages on GPUs."""
        return sorted({ready.stage for ready in self.ready if ready.device_kind != "cpu"})

    @property
    def retired_step(self) -> int:
        """Newest step that every stage has retired."""
        return min(record.retired_step for record in self)

    def lose(self, record: StageRecord, why: str, due: float, fact: Lost | LinkBroke | None = None) -> bool:
        """Note that a stage cannot go on, to be acted on at `due`; return False if that is known already.

        A confirmed reason replaces the report of a neighbour. After the core has acted on a loss, the next one counts.
        """
        known = record.loss
        if known is not None:
            confirms = known.unconfirmed and not isinstance(fact, LinkBroke)
            if not confirms and (known.due is not None or record.phase == "lost"):
                return False
        self._losses += 1
        order = self._losses if known is None else known.order
        record.loss = Loss(why, order, due, fact)
        return True

    @property
    def undisturbed(self) -> bool:
        """Whether no stage is lost, and none waits for a restart."""
        return not any(record.loss is not None or record.restart_due for record in self)

    @property
    def lost(self) -> list[StageRecord]:
        """Records with a loss, the cause of the others first."""
        lost = [(record.loss.order, record) for record in self if record.loss is not None]
        return [record for _, record in sorted(lost, key=lambda pair: pair[0])]

    @property
    def loss(self) -> str:
        """The first loss and its reason in one line; empty without one."""
        return next((f"{record.name} is lost: {record.loss.why}" for record in self.lost if record.loss), "")

    @property
    def cordons(self) -> str:
        """The cordons and their authors in one line; empty without one."""
        cordoned = [record for record in self if record.cordon is not None and record.place.rank == 0]
        return ", ".join(
            f"stage {record.stage} is {record.cordoned}"
            if index == 0
            else f"stage {record.stage} by {record.cordon.by}"
            for index, record in enumerate(cordoned)
            if record.cordon is not None
        )

    def cordon(self, stage: int, cordon: PlacedCordon | None) -> None:
        """Place or lift the cordon of `stage`: all of its ranks have it."""
        for record in self.ranks(stage):
            record.cordon = cordon

    def serve(self) -> None:
        """Note that all stages have met: none is lost."""
        for record in self:
            if record.phase != "serving":
                record.transition("serving")
            record.loss = None
