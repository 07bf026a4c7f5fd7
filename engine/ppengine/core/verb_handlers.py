"""Commands from consoles: one dispatcher, and one handler a verb, chosen by the type of its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ppengine.core.operations import Operation
from ppengine.core.plans import CommandError, Plan
from ppengine.core.scheduler import ActionResult, DoesNotFit, PreemptMode
from ppengine.core.scheduler import Refused as NotPossible
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.results import ActionState
from ppengine.protocol.control import Command, Outcome, Refused
from ppengine.protocol.verbs import (
    Abort,
    Cordon,
    Drain,
    Pause,
    Preempt,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Stop,
    Submit,
    SwapIn,
    SwapOut,
    Verb,
    name_of,
    row_of,
    value_of,
)

if TYPE_CHECKING:
    from ppengine.core.engine import Engine

Act = Abort | Preempt | SwapOut | SwapIn | Release
_TOLD_FIRST: tuple[ActionState, ...] = ("pending", "failed", "superseded", "applied")
"""Order in which an operation reports the effects on several samples."""


class Commands:
    """Dispatches commands to the handlers of their verbs: checks, dry run, operation and refusal are done here once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._effects: list[tuple[list[tuple[ActionResult, Request]], Operation]] = []
        self._drain: Operation | None = None
        self._idle: Operation | None = None
        # Each handler takes the verb of its own type: a relation that no annotation of a dict expresses.
        self.handlers: dict[type[Verb], Callable[[Any, Command], Plan]] = {
            Submit: self._plan_submit,
            **dict.fromkeys((Abort, Preempt, SwapOut, SwapIn, Release), self._plan_act),
            SetMemory: lambda verb, command: engine.resizer.plan_set_memory(verb, command),
            Pause: self._plan_pause,
            Resume: self._plan_resume,
            Drain: self._plan_drain,
            SetCheck: lambda verb, command: engine.checks.plan_set_check(verb, command),
            RestartStage: lambda verb, command: engine.recovery.plan_restart(verb, command),
            Cordon: lambda verb, command: engine.cordons.plan_cordon(verb, command),
            Stop: self._plan_stop,
        }
        """Handler of each verb's message type."""

    def handle(self, client: bytes, command: Command) -> None:
        """Execute one command; every path answers."""
        engine = self._engine
        try:
            plan = self._plan(command)
        except (CommandError, NotPossible) as error:
            engine.reply(client, Refused(id=command.id, code=error.code, text=error.text))
        except DoesNotFit as error:
            engine.reply(client, Refused(id=command.id, code="DOES_NOT_FIT", text=error.text))
        except ValueError as error:
            engine.reply(client, Refused(id=command.id, code="INVALID", text=str(error)))
        else:
            if command.dry_run:
                outcome = Outcome(
                    id=command.id, op="", state="planned", text=plan.lines[0], plan=plan.lines, figures=plan.figures,
                    revision=plan.revision, request=plan.request,
                )  # fmt: skip
                engine.reply(client, outcome)
            else:
                plan.begin(engine.operations.open(command, client, plan.target, request=plan.request))

    def _plan(self, command: Command) -> Plan:
        """Check a command and return its plan. Raises CommandError, and the refusals of its handler."""
        engine, verb = self._engine, command.verb
        row = row_of(verb)
        if command.epoch != engine.config.epoch:
            raise CommandError("STALE_EPOCH", f"this is epoch {engine.config.epoch}, not {command.epoch}")
        if row.needs != "nothing" and not engine.serving:
            raise CommandError("BUSY", f"the engine is {engine.state}: {engine.message}")
        if row.needs == "running" and engine.recovery.down:
            # No step will retire any more, so no other verb would ever have an end.
            raise CommandError("FAILED", f"the engine is degraded: {engine.message}; restart-stage or stop")
        handler = self.handlers.get(type(verb))
        if handler is None:
            raise CommandError("UNSUPPORTED", f"{row.name} is not for the core")
        if command.if_rev is not None and row.has_revision:
            self._check_revision(verb, command.if_rev)
        return handler(verb, command)

    def _check_revision(self, verb: Verb, seen: int) -> None:
        """Raise CommandError unless `seen` is the revision of the verb's request, or of memory."""
        if isinstance(verb, SetMemory):
            conflict = self._engine.resizer.conflict(seen)
        else:
            name = value_of(verb, "request")
            request = self._members(name)[0]
            last = request.history[-1][1] if request.history else request.state
            text = f"{name} has moved on: revision {request.revision}, you saw {seen} ({last})"
            conflict = text if seen != request.revision else ""
        if conflict:
            raise CommandError("CONFLICT", conflict)

    def settle(self) -> None:
        """End the operations whose effect has happened; say of the others where they wait."""
        engine = self._engine
        # Each effect is looked at below; the scheduler's own list of those that ended would only grow.
        engine.scheduler.fences.settled()
        left = []
        for effects, operation in self._effects:
            # A group of samples moves together; the operation ends with the last of them.
            effect, request = min(effects, key=lambda pair: _TOLD_FIRST.index(pair[0].state))
            if effect.state == "pending":
                engine.operations.defer(operation, self._where(request))
                left.append((effects, operation))
            else:
                engine.operations.end(
                    operation, effect.state, effect.text, step=effect.step, revision=effects[0][1].revision
                )  # fmt: skip
        self._effects = left
        if self._idle is not None:
            if running := engine.running:
                engine.operations.defer(self._idle, f"waits for {running} running requests")
            else:
                engine.operations.end(self._idle, "applied", "paused: nothing runs")
                self._idle = None
        if self._drain is not None:
            if left_over := len(engine.live()):
                cordoned = f"; {engine.cordons}" if str(engine.cordons) else ""
                engine.operations.defer(self._drain, f"waits for {left_over} requests{cordoned}")
            else:
                engine.operations.end(self._drain, "applied", "drained: no request left")
                self._drain = None

    # --- verbs ----------------------------------------------------------------------------------------------

    def _plan_submit(self, verb: Submit, command: Command) -> Plan:
        engine = self._engine
        if engine.draining:
            raise CommandError("BUSY", "the engine is draining and takes no new requests; drain --undo ends that")
        requests = engine.submissions.requests(verb, owner=command.by)
        engine.scheduler.admission.check(requests)
        name, prompt = requests[0].group, len(requests[0].prompt_ids)

        def begin(operation: Operation) -> None:
            engine.admit(requests, session="")
            engine.operations.end(operation, "applied", f"{prompt} prompt tokens queued", request=name)

        lines = [f"queue {len(requests)} sample(s) of {prompt} prompt tokens"]
        return Plan(lines, begin, target=name, request=None if command.dry_run else name)

    def _plan_act(self, verb: Act, command: Command) -> Plan:
        scheduler, members, by = self._engine.scheduler, self._members(verb.request), command.by
        mode = verb.mode if isinstance(verb, Preempt) else None
        hold = verb.hold if isinstance(verb, Preempt | SwapOut) else False
        calls: dict[type, Callable[[Request], ActionResult]] = {
            Abort: lambda member: self._engine.abort(member, by),
            Preempt: lambda member: scheduler.actions.preempt(member.id, mode, hold, by=by),
            SwapOut: lambda member: scheduler.actions.swap_out(member.id, hold, by=by),
            SwapIn: lambda member: scheduler.actions.swap_in(member.id, by=by),
            Release: lambda member: scheduler.actions.release(member.id, by=by),
        }
        able, lines, figures = self._able(verb, members, mode, hold)
        return Plan(
            lines, lambda operation: self._begin_act(operation, able, len(members), calls[type(verb)]),
            target=verb.request, request=verb.request, revision=members[0].revision, figures=figures,
        )  # fmt: skip

    def _begin_act(
        self, operation: Operation, able: list[Request], count: int, call: Callable[[Request], ActionResult]
    ) -> None:
        effects: list[tuple[ActionResult, Request]] = []
        for member in able:
            try:
                effects.append((call(member), member))
            except NotPossible as error:
                # An earlier sample took the blocks that this one needs.
                problem = f"{len(effects)} of {count} samples: {error.text}"
                self._engine.operations.end(operation, "failed", problem, request=operation.request)
                return
        self._effects.append((effects, operation))
        self.settle()

    def _members(self, name: str) -> list[Request]:
        """Return the live samples of a request. Raises CommandError where there is none."""
        members = self._engine.members(name)
        if not members:
            raise CommandError("NOT_FOUND", self._engine.gone_text(name))
        return members

    def _able(
        self, verb: Act, members: list[Request], mode: PreemptMode | None, hold: bool
    ) -> tuple[list[Request], list[str], dict[str, float]]:
        """Return the samples to which the verb applies, and the plan of the first, in lines and figures.

        Raises Refused when it applies to none, or when one lacks room.
        """
        able: list[Request] = []
        plans: list[tuple[list[str], dict[str, float]]] = []
        first: NotPossible | None = None
        for member in members:
            try:
                plans.append(self._engine.scheduler.actions.plan(name_of(verb), member.id, mode, hold))
                able.append(member)
            except NotPossible as error:
                if error.code == "DOES_NOT_FIT":
                    raise
                first = first or error
        if first is not None and not able:
            raise first
        return able, *plans[0]

    def _plan_pause(self, verb: Pause, command: Command) -> Plan:
        engine, running = self._engine, self._engine.running
        line = {
            "wait": f"finish {running} running, start none of {len(engine.live()) - running} others",
            "keep": f"stop scheduling; {len(engine.live())} requests keep their blocks",
            "abort": f"abort {len(engine.live())} requests and stop scheduling",
        }[verb.mode]

        def begin(operation: Operation) -> None:
            self._supersede_pause(f"pause {verb.mode} by {command.by}")
            engine.scheduler.batcher.draining, engine.scheduler.paused = True, verb.mode != "wait"
            if verb.mode == "abort":
                engine.abort_all(by=command.by)
            if verb.mode == "wait" and running:
                self._idle = operation
                self.settle()
            else:
                engine.operations.end(operation, "applied", line)

        return Plan([line], begin, target=verb.mode)

    def _plan_resume(self, verb: Resume, command: Command) -> Plan:
        engine = self._engine

        def begin(operation: Operation) -> None:
            self._supersede_pause(f"resumed by {command.by}")
            engine.scheduler.paused = engine.scheduler.batcher.draining = False
            engine.operations.end(operation, "applied", "scheduling again")

        return Plan([f"schedule again: {len(engine.live())} requests"], begin)

    def _supersede_pause(self, why: str) -> None:
        if self._idle is not None:
            self._engine.operations.end(self._idle, "superseded", why)
            self._idle = None

    def _plan_drain(self, verb: Drain, command: Command) -> Plan:
        engine = self._engine
        line = "take requests again" if verb.undo else f"refuse new requests, finish {len(engine.live())}"

        def begin(operation: Operation) -> None:
            engine.draining = not verb.undo
            if self._drain is not None:
                engine.operations.end(self._drain, "superseded", f"{line}, by {command.by}")
                self._drain = None
            if verb.undo:
                engine.operations.end(operation, "applied", "takes requests again")
            else:
                self._drain = operation
                self.settle()

        return Plan([line], begin, target="--undo" if verb.undo else None)

    def _plan_stop(self, verb: Stop, command: Command) -> Plan:
        engine = self._engine
        left = len(engine.live()) if engine.serving else 0

        def begin(operation: Operation) -> None:
            engine.operations.end(operation, "applied", f"stopping; {left} requests unfinished")
            engine.leave(f"stop by {command.by}")

        line = f"stop the engine; {left} requests end unfinished" if left else "stop the engine; it is idle"
        return Plan([line], begin, target=engine.config.name)

    def _where(self, request: Request) -> str:
        if not request.in_flight:
            return "waits for its copies"
        number = request.in_flight[0]
        stage = self._engine.board.holder(number)
        return f"in flight: m{number}" + ("" if stage is None else f" at stage {stage}")
