"""The reasons why the engine does not serve, ranked: its state and its message come from the first one."""

from __future__ import annotations

from ppengine.core.serving import Serving
from ppengine.core.stage_records import Stages
from ppengine.protocol.snapshot import EngineState


class NotServingError(Exception):
    """The engine does not serve yet; the text is one line with its state and the reason."""


class Health:
    """The only writer of these reasons; other parts report them by its methods."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.serving: Serving | None = None
        """Scheduler and memory; None until all stages have met for the first time."""
        self.draining = False
        """New requests are refused."""
        self.recovering = False
        """Stages leave a generation or load; requests wait and keep what they have."""
        self.leaving = ""
        """Why the core ends at its next turn."""
        self.failed = ""
        """Why the core ends by itself; empty if an operator or a signal stopped it."""
        self.down = ""
        """Why serving is blocked until an operator restarts a stage."""
        self.gave_up = ""
        """Why all requests have ended and others are refused, until the stages serve."""
        self.follows = ""
        """How the core before this one ended, until all stages have met this one."""
        self._unfit = ""
        self._progress = "stages are loading"

    @property
    def unfit(self) -> bool:
        """Whether the memory of the stages does not hold one sequence, so that the engine cannot serve."""
        return bool(self._unfit)

    @property
    def blocked(self) -> bool:
        """Whether no step may be sent: the core leaves, a stage is lost, or not all have met in this generation."""
        lost = any(record.loss is not None for record in self._stages)
        return bool(self.leaving or self.recovering or self.down or lost)

    @property
    def state(self) -> EngineState:
        """Engine state as in a snapshot."""
        if self.leaving:
            return "stopped"
        if self._unfit or self.down or self.follows or self._stages.loss:
            return "degraded"
        if self.serving is None or self.recovering:
            return "loading"
        scheduler, memory = self.serving
        if memory.busy:
            return "resizing"
        if self.draining:
            return "draining"
        return "paused" if scheduler.paused_by else "serving"

    @property
    def message(self) -> str:
        """The first reason in one line; empty while steps of all requests are sent."""
        if blocked := self.failed or self._unfit or self.down:
            return blocked
        loss = self._stages.loss
        if self.recovering or (self.serving is None and not loss):
            first = loss or self.follows
            return f"{first}; {self._progress}" if first else self._progress
        if not loss and self.serving is not None and self.serving.scheduler.paused_by:
            return f"paused by {self.serving.scheduler.paused_by}; resume goes on"
        return loss

    @property
    def failure(self) -> str:
        """Why no more tokens will come, for readers that wait for them; empty if they will."""
        return self.down or self.gave_up or (f"the engine stopped: {self.leaving}" if self.leaving else "")

    @property
    def text(self) -> str:
        """State and message in one line, as refusals quote them."""
        return f"the engine is {self.state}: {self.message}"

    def require(self) -> Serving:
        """Return scheduler and memory. Raises NotServingError before all stages have met."""
        if self.serving is None:
            raise NotServingError(self.text)
        return self.serving

    def serve(self, serving: Serving) -> None:
        """Note that all stages have met for the first time."""
        self.serving = serving

    def refuse(self, why: str) -> None:
        """Note that the memory of the stages does not hold one sequence."""
        self._unfit = why

    def progress(self, text: str) -> None:
        """Note how far the stages are with loading or meeting."""
        self._progress = text

    def recover(self) -> None:
        """Note that a new generation begins."""
        self.recovering, self.down = True, ""

    def follow(self, why: str) -> None:
        """Note that this core follows another one, which ended: `why` in one line."""
        self.follows, self._progress = why, "the stages meet the next one"
        self.recover()

    def recovered(self) -> None:
        """Note that all stages have met again."""
        self.recovering, self.follows, self.gave_up = False, "", ""

    def stay_down(self, why: str) -> None:
        """Note that serving is blocked until an operator restarts a stage."""
        self.recovering, self.down = False, why

    def give_up(self, why: str) -> None:
        """Note that all requests have ended because a stage does not come up: `why` in one line."""
        self.gave_up = why

    def leave(self, why: str) -> None:
        """End the core at its next turn; the first reason counts."""
        self.leaving = self.leaving or why

    def fail(self, why: str) -> None:
        """End the core at its next turn with an error."""
        self.failed = why
        self.leave(why)
