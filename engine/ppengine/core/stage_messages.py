"""Messages of stages, and of the supervisor about their processes: each goes to the part that it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.core.events import Events
from ppengine.core.health import Health
from ppengine.core.live_checks import Checks
from ppengine.core.meeting_points import MeetingPoints
from ppengine.core.recovery import Recovery
from ppengine.core.signs_of_life import ORDERED, PROCESS
from ppengine.core.stage_records import StageRecord, Stages
from ppengine.core.stage_tracker import StageTracker
from ppengine.core.startup import Startup
from ppengine.protocol.check_messages import LedgerPicture, ShadowAnswer, ShadowReady, StageFindings
from ppengine.protocol.facts import LinkBroke, Lost
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.stage_lifecycle import (
    Drained,
    EdgeAddress,
    EdgeSought,
    NewGeneration,
    StageFailed,
    StageProgress,
    StageReady,
)
from ppengine.protocol.steps import Mapped, Retired

CONFIRM_S = 0.5
"""Seconds for which the core waits for the supervisor's exit status after a neighbour reported a stage as lost."""


@dataclass(eq=False)
class StageMessages:
    """Notes readiness, progress and losses in the records of the stages; `Recovery` acts on them in its next turn."""

    _stages: Stages
    _tracker: StageTracker
    _recovery: Recovery
    _startup: Startup
    _health: Health
    _checks: Checks
    _event: Events
    _clock: Callable[[], float]
    _notify_stage: Callable[[Place, NewGeneration | EdgeAddress], None]
    _meeting_points: MeetingPoints = field(init=False, default_factory=MeetingPoints)

    def take(self, message: object) -> bool:
        """Take one message of a stage or of the shadow; return whether it calls for a turn."""
        match message:
            case Retired(fatal=False):
                return message.generation == self._recovery.generation and self._tracker.acknowledge(message)
            case Retired():
                self._on_fatal(message)
            case Mapped():
                return message.generation == self._recovery.generation and self._tracker.mapped(message)
            case StageReady():
                self._on_ready(message)
                self._startup.begin(self._recovery.generation)
            case StageProgress():
                self._on_progress(message)
            case StageFailed():
                self._on_failed(message)
            case Drained():
                self._on_drained(message)
            case EdgeAddress():
                self._meeting_points.take(message)
                return False
            case EdgeSought():
                if (address := self._meeting_points.find(message)) is not None:
                    self._notify_stage(Place(message.stage, message.rank), address)
                return False
            case StageFindings() | LedgerPicture():
                if message.generation == self._recovery.generation:
                    self._checks.take(message)
            case ShadowReady() | ShadowAnswer():
                self._checks.take(message)
        return True

    def on_process(self, info: ProcessInfo) -> None:
        """Note how a process of a stage is; the end of a replaced one does not matter."""
        if info.stage is None:
            return
        record = self._stages[info.stage, info.rank or 0]
        self._recovery.takeover.note(record, info)
        if info.generation != record.started:
            return
        if info.exit_code is not None:
            self._stages.lose(record, info.detail or f"exit code {info.exit_code}", self._clock())
        elif record.life.sign == ORDERED and not info.replaced:
            record.life.note(PROCESS, self._clock())

    def _on_fatal(self, message: Retired) -> None:
        """Note that a stage cannot go on; if it names a peer as the cause, the peer is lost instead."""
        if message.generation != self._recovery.generation:
            return
        if message.peer is None:
            self._fail(self._stages[message.stage, message.rank], message.error)
            return
        closed = message.error.startswith("lost stage")
        reporter = self._stages[message.stage, message.rank]
        peer = self._stages[message.peer, message.rank if message.peer_rank is None else message.peer_rank]
        why = f"its connection to {reporter.name} closed" if closed else message.error
        link = LinkBroke(
            mono_ns=self._now_ns(), stage=message.stage, rank=message.rank, peer=peer.stage,
            peer_rank=peer.place.rank, text=message.error, closed=closed,
        )  # fmt: skip
        self._stages.lose(peer, why, self._clock() + CONFIRM_S, link)

    def _on_failed(self, message: StageFailed) -> None:
        """Note that a stage could not load; its process ends."""
        record = self._stages[message.stage, message.rank]
        if message.generation == record.started:
            self._fail(record, message.text)

    def _on_progress(self, message: StageProgress) -> None:
        """Note a line about loading; send the generation to a stage that may have missed its beginning."""
        record = self._stages[message.stage, message.rank]
        record.progress = message.text
        if message.generation >= record.started:
            record.life.note(message.phase, self._clock())
        self._health.progress(message.text)
        if message.generation < self._recovery.generation:
            self._notify_stage(record.place, NewGeneration(self._recovery.generation, record.started))

    def _on_drained(self, message: Drained) -> None:
        """Note that a stage has left the older generations."""
        record = self._stages[message.stage, message.rank]
        if message.generation == self._recovery.generation and record.phase == "draining":
            record.transition("meeting")

    def _on_ready(self, message: StageReady) -> None:
        """Note that a stage has met its neighbours."""
        record = self._stages[message.stage, message.rank]
        if message.generation == self._recovery.generation and record.phase != "lost" and record.on_ready(message):
            self._event("stage.ready", f"{record.name} is ready", stage=record.stage)

    def _fail(self, record: StageRecord, words: str) -> None:
        """Note the last words of a stage."""
        pid = None if record.ready is None else record.ready.pid
        fact = Lost(mono_ns=self._now_ns(), place=record.place, generation=record.started, words=words, pid=pid)
        self._stages.lose(record, words, self._clock(), fact)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)
