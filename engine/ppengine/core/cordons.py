"""Cordoned stages: running requests go on, no new one begins, and the core does not restart the stage by itself.

A cordon gives an operator time to look at the stage, as for a node in Kubernetes. It outlives consoles and the
stage's process, but not the engine's boot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppengine.core.health import Health
from ppengine.core.live_requests import LiveRequests
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.recovery import Recovery
from ppengine.core.restart_policy import RestartPolicy
from ppengine.core.stage_records import PlacedCordon, Stages
from ppengine.protocol.control import Command
from ppengine.protocol.verbs import Cordon


@dataclass(eq=False)
class Cordons:
    """Places and lifts cordons; they are in the records of the stages."""

    _stages: Stages
    _health: Health
    _requests: LiveRequests
    _policy: RestartPolicy
    _recovery: Recovery
    _operations: Operations
    _clock: Callable[[], float]

    def plan_cordon(self, verb: Cordon, command: Command) -> Plan:
        """Plan to place or lift a cordon. A second one on a stage changes nothing: the first author stays."""
        stage = verb.stage
        if text := self._stages.unknown(stage):
            raise CommandError("NOT_FOUND", text)
        lines, figures, start = self._plan(verb)

        def begin(operation: Operation) -> None:
            if verb.undo:
                self._stages.cordon(stage, None)
                if start:
                    self._recovery.start_lost()
            elif self._stages.leader(stage).cordon is None:
                self._stages.cordon(stage, PlacedCordon(command.by, command.reason, self._clock()))
            self._health.require().scheduler.batcher.cordon = self._stages.cordons
            self._operations.end(operation, "applied", "; ".join(lines), figures=figures)

        return Plan(lines, begin, target=f"--stage {stage}{' --undo' if verb.undo else ''}", figures=figures)

    def _plan(self, verb: Cordon) -> tuple[list[str], dict[str, float], list[int]]:
        """Return the effects in lines and in figures, and the lost stages to restart."""
        stage, live = verb.stage, self._requests.live()
        new = sum(1 for request in live if not request.begun)
        figures = {"new": float(new), "begun": float(len(live) - new)}
        cordoned = self._stages.leader(stage).cordoned
        if bool(cordoned) != verb.undo:
            now = f"is {cordoned} already" if cordoned else "is not cordoned"
            return [f"nothing changes: stage {stage} {now}"], figures, []
        if not verb.undo:
            lines = [f"finish {len(live) - new} that have started, start none of {new} others, nor any new ones"]
            if self._policy.automatic:
                lines.append(f"stage {stage} is not restarted by itself while it is cordoned")
            return lines, figures, []
        others = ", ".join(
            f"stage {other.stage} stays {other.cordoned}"
            for other in self._stages
            if other.cordoned and other.stage != stage and not other.place.rank
        )
        lines = [others or f"start requests again, {new} wait"]
        kept = self._policy.kept_down(stage)
        lines += [f"stage {other}, which is lost, is restarted" for other in kept]
        return lines, figures, kept
