"""Verbs on the engine as a whole: pause, resume, drain, stop."""

from __future__ import annotations

from dataclasses import dataclass, field

from ppengine.common.sizes import counted
from ppengine.core import ownership
from ppengine.core.health import Health
from ppengine.core.live_requests import LiveRequests
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import Plan
from ppengine.core.scheduler import Scheduler
from ppengine.core.stage_records import Stages
from ppengine.protocol.control import Command
from ppengine.protocol.verbs import Drain, Pause, Resume, Stop

_NOT_PAUSED = "nothing to do: the engine is not paused"


@dataclass(eq=False)
class EngineVerbs:
    """Plans these verbs, and ends a pause and a drain once the requests that they wait for have ended."""

    _name: str
    """Name of the engine."""
    _health: Health
    _stages: Stages
    _requests: LiveRequests
    _operations: Operations
    _drain: Operation | None = field(init=False, default=None)
    """Waits for all requests."""
    _idle: Operation | None = field(init=False, default=None)
    """A pause that waits for the running requests."""

    def plan_pause(self, verb: Pause, command: Command) -> Plan:
        """Plan a pause: running requests end, or keep their blocks, or are aborted."""
        scheduler, requests = self._health.require().scheduler, self._requests.live()
        live, running = len(requests), _running(scheduler)
        owners = ownership.check_all(requests, command) if verb.mode == "abort" else {}
        line = {
            "wait": f"finish {running} running, start none of {live - running} others",
            "keep": f"stop scheduling; {counted(live, 'request')} with all blocks",
            "abort": f"abort {counted(live, 'request')} and stop scheduling",
        }[verb.mode]

        def begin(operation: Operation) -> None:
            self._supersede_pause(f"pause {verb.mode} by {command.by}")
            scheduler.pause(command.by, finish=verb.mode == "wait")
            if verb.mode == "abort":
                self._requests.abort_all(command.by, lambda: self._operations.end(operation, "applied", line))
            elif verb.mode == "wait" and running:
                self._idle = operation
                self.settle()
            else:
                text = "paused: nothing runs" if verb.mode == "wait" else line
                self._operations.end(operation, "applied", text)

        return Plan([line, *ownership.lines(owners)], begin, target=verb.mode, owners=owners)

    def plan_resume(self, verb: Resume, command: Command) -> Plan:
        """Plan the end of a pause."""
        scheduler = self._health.require().scheduler
        again = f"schedule again: {counted(len(self._requests.live()), 'request')}"

        def begin(operation: Operation) -> None:
            text = "scheduling again" if scheduler.paused_by else _NOT_PAUSED
            self._supersede_pause(f"resumed by {command.by}")
            scheduler.resume()
            self._operations.end(operation, "applied", text)

        return Plan([again if scheduler.paused_by else _NOT_PAUSED], begin)

    def plan_drain(self, verb: Drain, command: Command) -> Plan:
        """Plan that new requests are refused and the others finish, or that requests are taken again."""
        line = "take requests again" if verb.undo else f"refuse new requests, finish {len(self._requests.live())}"

        def begin(operation: Operation) -> None:
            self._health.draining = not verb.undo
            if self._drain is not None:
                self._operations.end(self._drain, "superseded", f"{line}, by {command.by}")
                self._drain = None
            if verb.undo:
                self._operations.end(operation, "applied", "takes requests again")
            else:
                self._drain = operation
                self.settle()

        return Plan([line], begin, target="--undo" if verb.undo else None)

    def plan_stop(self, verb: Stop, command: Command) -> Plan:
        """Plan the end of the engine."""
        left = len(self._requests.live())

        def begin(operation: Operation) -> None:
            self._operations.end(operation, "applied", f"stopping; {counted(left, 'request')} unfinished")
            self._health.leave(f"stop by {command.by}")

        line = f"stop the engine; {counted(left, 'request')} unfinished" if left else "stop the engine; it is idle"
        return Plan([line], begin, target=self._name)

    def settle(self) -> None:
        """End a pause or drain that has nothing left to wait for; report the progress of the other."""
        if self._idle is not None:
            if running := _running(self._health.require().scheduler):
                self._operations.defer(self._idle, f"waits for {counted(running, 'running request')}")
            else:
                self._operations.end(self._idle, "applied", "paused: nothing runs")
                self._idle = None
        if self._drain is not None:
            if left_over := len(self._requests.live()):
                cordoned = f"; {cordons}" if (cordons := self._stages.cordons) else ""
                self._operations.defer(self._drain, f"waits for {counted(left_over, 'request')}{cordoned}")
            else:
                self._operations.end(self._drain, "applied", "drained: no request left")
                self._drain = None

    def _supersede_pause(self, why: str) -> None:
        if self._idle is not None:
            self._operations.end(self._idle, "superseded", why)
            self._idle = None


def _running(scheduler: Scheduler) -> int:
    """Return how many requests run or are being loaded."""
    queues = scheduler.queues.counts()
    return queues.running + queues.loading
