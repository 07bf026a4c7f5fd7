"""Cordoned stages: what runs goes on, nothing new is admitted, and the stage is not started anew by itself.

As for a node in Kubernetes, so that somebody can look at the stage. It outlives consoles and the stage's process, not
the engine's boot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppengine.core.operations import Operation
from ppengine.core.plans import CommandError, Plan
from ppengine.protocol.control import Command
from ppengine.protocol.snapshot import CordonInfo
from ppengine.protocol.verbs import Cordon

if TYPE_CHECKING:
    from ppengine.core.engine import Engine


@dataclass(frozen=True, slots=True)
class _Placed:
    """Who cordoned a stage, why, and when on the engine's clock."""

    by: str
    reason: str
    at: float


class Cordons:
    """Owns the cordons; scheduler and recovery ask what they forbid."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._placed: dict[int, _Placed] = {}

    def __contains__(self, stage: int) -> bool:
        return stage in self._placed

    def __str__(self) -> str:
        """Return who keeps requests from beginning, in one line; empty: nobody does."""
        return ", ".join(
            f"stage {stage}{'' if index else ' is cordoned'} by {placed.by}"
            for index, (stage, placed) in enumerate(sorted(self._placed.items()))
        )

    def of(self, stage: int) -> str:
        """Return who cordoned `stage`, in words; empty: nobody did."""
        placed = self._placed.get(stage)
        return f"cordoned by {placed.by}" if placed is not None else ""

    def info(self, stage: int) -> CordonInfo | None:
        """Return what a report says of `stage`."""
        placed = self._placed.get(stage)
        if placed is None:
            return None
        return CordonInfo(by=placed.by, since_s=self._engine.clock() - placed.at, reason=placed.reason)

    def plan_cordon(self, verb: Cordon, command: Command) -> Plan:
        """Plan to place or lift a cordon. A second one on a stage changes nothing: the first author stays."""
        engine, stage = self._engine, verb.stage
        if text := engine.board.unknown(stage):
            raise CommandError("NOT_FOUND", text)
        lines, figures, start = self._plan(verb)

        def begin(operation: Operation) -> None:
            if not verb.undo:
                self._placed.setdefault(stage, _Placed(command.by, command.reason, engine.clock()))
            else:
                self._placed.pop(stage, None)
                engine.recovery.start(start)
            engine.scheduler.batcher.cordon = str(self)
            engine.operations.end(operation, "applied", "; ".join(lines), figures=figures)

        return Plan(lines, begin, target=f"--stage {stage}{' --undo' if verb.undo else ''}", figures=figures)

    def _plan(self, verb: Cordon) -> tuple[list[str], dict[str, float], list[int]]:
        """Return what happens in words and in figures, and which lost stages are started anew."""
        engine, stage = self._engine, verb.stage
        live = engine.live()
        new = sum(1 for request in live if not request.begun)
        figures = {"new": float(new), "begun": float(len(live) - new)}
        if (stage in self) != verb.undo:
            now = f"is {self.of(stage)} already" if stage in self else "is not cordoned"
            return [f"nothing changes: stage {stage} {now}"], figures, []
        if not verb.undo:
            lines = [f"finish {len(live) - new} that have begun, begin none of {new} others, nor of those that come"]
            if engine.config.profile.parallel.restart == "auto":
                lines.append(f"stage {stage} is not started anew by itself while it is cordoned")
            return lines, figures, []
        others = ", ".join(f"stage {other} stays {self.of(other)}" for other in sorted(self._placed) if other != stage)
        lines = [others or f"begin requests again, {new} wait"]
        kept = engine.recovery.kept_down(stage)
        lines += [f"stage {other}, which is lost, is started anew" for other in kept]
        return lines, figures, kept
