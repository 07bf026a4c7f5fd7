"""Decisions about lost stages: which are restarted, which only meet again, and which stay down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.core.events import Events
from ppengine.core.health import Health
from ppengine.core.operations import Operations
from ppengine.core.restarts import Refusal, reconnects, refusal
from ppengine.core.stage_records import StageRecord, Stages
from ppengine.core.start_tries import StartTries
from ppengine.protocol.facts import Fact, LinkBroke, Lost


@dataclass(eq=False)
class RestartPolicy:
    """Judges each loss once; `Recovery` carries out the restarts."""

    _restart: str
    """`auto` or `never`, as in the profile."""
    _stages: Stages
    _health: Health
    _tries: StartTries
    _operations: Operations
    _event: Events
    _note: Callable[[Fact], None]
    _clock: Callable[[], float]
    _refusal: Refusal | None = field(init=False, default=None)
    """The newest reason why a stage was not restarted."""

    @property
    def automatic(self) -> bool:
        """Whether lost stages are restarted without an operator."""
        return bool(self._health.serving or self._health.follows) and self._restart == "auto"

    def lose_silent(self) -> None:
        """Note that a stage which gives no sign of life does not come up; its process is replaced."""
        now = self._clock()
        for record in self._stages:
            starts = self._health.recovering and record.phase == "starting" and record.cordon is None
            if starts and (why := record.life.missing(now)):
                self._stages.lose(record, why, now)

    def judge(self, *, requested: bool) -> tuple[list[StageRecord], list[StageRecord]]:
        """Report the losses that are due; return the stages to restart, and those which need a new generation alone.

        In a turn with a requested restart, all that are lost are restarted with it: no loss keeps the engine down.
        """
        now, restarted, reconnected = self._clock(), [], []
        link: LinkBroke | None = None
        for record in self._stages.lost:
            loss = record.loss
            if loss is None or loss.due is None or loss.due > now:
                continue
            loss.due = None
            closed = isinstance(loss.fact, LinkBroke) and loss.fact.closed
            if isinstance(loss.fact, LinkBroke):
                link = link or loss.fact  # The first report explains the others.
            if closed and not self._health.down and reconnects(record, now) and self.automatic:
                reconnected.append(record)
            else:
                restarted.append(record)
        if link is not None:
            self._note(link)
        for record in restarted:
            loading = record.phase == "starting"
            if record.phase != "lost":
                record.transition("lost")
            self._event("stage.lost", f"{record.name}: {record.loss.why if record.loss else ''}", stage=record.stage)
            if record.loss is not None and isinstance(record.loss.fact, Lost):
                self._note(record.loss.fact)
            if not self._health.down:
                self._judge_one(record, now, loading=loading, requested=requested)
        return restarted, reconnected

    def _judge_one(self, record: StageRecord, now: float, *, loading: bool, requested: bool) -> None:
        """Stay down if a lost stage must not be restarted automatically; try one again that did not come up."""
        first = self._stages.loss
        if self.automatic and loading and not record.cordoned:
            self._tries.failed()
            return
        refused = refusal(record, first, now) if self.automatic else Refusal(first)
        self._refusal = None if requested else refused
        if self._refusal is not None:
            self.stay_down(self._refusal.text)

    def kept_down(self, without: int) -> list[int]:
        """Return the lost stages that would be restarted if stage `without` had no cordon."""
        lost = self._stages.lost
        others = any(record.cordon is not None for record in lost if record.stage != without)
        only_cordon = self._health.down and self._refusal is not None and self._refusal.cordon
        stages = sorted({record.stage for record in lost})
        return stages if only_cordon and without in stages and not others else []

    def stay_down(self, why: str) -> None:
        """Block serving until an operator restarts a stage: `why` in one line."""
        self._health.stay_down(why)
        self._tries.reset()
        for record in self._stages:
            record.restart = None
            if record.loss is not None:
                record.loss.due = None
        for operation in self._operations.live:
            self._operations.end(operation, "failed", f"{why}; how far it came is not known")
