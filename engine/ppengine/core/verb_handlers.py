"""Commands from consoles: check, plan, or do. One handler a verb, chosen by the verb's type and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from ppengine.core.operations import Operation
from ppengine.core.scheduler import ActionResult, DoesNotFit, PreemptMode
from ppengine.core.scheduler import Refused as NotPossible
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.results import ActionState
from ppengine.protocol.control import Command, ErrorCode, Outcome, Refused
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
)

if TYPE_CHECKING:
    from ppengine.core.engine import Engine

Act = Abort | Preempt | SwapOut | SwapIn | Release
ActName = Literal["abort", "preempt", "swap-out", "swap-in", "release"]
VERB_NAMES: dict[type, ActName] = {
    Abort: "abort", Preempt: "preempt", SwapOut: "swap-out", SwapIn: "swap-in", Release: "release",
}  # fmt: skip


_TOLD_FIRST: tuple[ActionState, ...] = ("pending", "failed", "superseded", "applied")
"""Which of the effects on several samples an operation tells of."""


class CommandError(Exception):
    """A command that has no effect, with the code and the one line that says why."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Commands:
    """Turns commands into effects of the scheduler and operations that report them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._effects: list[tuple[list[tuple[ActionResult, Request]], Operation]] = []
        self._drain: Operation | None = None
        self._idle: Operation | None = None

    def handle(self, client: bytes, command: Command) -> None:
        """Execute one command; every path answers."""
        try:
            self._dispatch(client, command)
        except CommandError as error:
            self._engine.reply(client, Refused(id=command.id, code=error.code, text=error.text))
        except NotPossible as error:
            self._engine.reply(client, Refused(id=command.id, code=error.code, text=error.text))
        except DoesNotFit as error:
            self._engine.reply(client, Refused(id=command.id, code="DOES_NOT_FIT", text=error.text))
        except ValueError as error:
            self._engine.reply(client, Refused(id=command.id, code="INVALID", text=str(error)))

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

    def _dispatch(self, client: bytes, command: Command) -> None:
        verb = command.verb
        if command.epoch != self._engine.config.epoch:
            raise CommandError("STALE_EPOCH", f"this is epoch {self._engine.config.epoch}, not {command.epoch}")
        if isinstance(verb, Stop):
            self._stop(client, command)
        elif not self._engine.serving:
            raise CommandError("BUSY", f"the engine is {self._engine.state}: {self._engine.message}")
        elif isinstance(verb, RestartStage):
            self._engine.recovery.handle(client, command, verb)
        elif isinstance(verb, Cordon):
            self._engine.cordons.handle(client, command, verb)
        elif self._engine.recovery.down:
            # No step will retire any more, so nothing else that is asked for would ever have an end.
            raise CommandError("FAILED", f"the engine is degraded: {self._engine.message}; restart-stage or stop")
        elif isinstance(verb, Submit):
            self._submit(client, command, verb)
        elif isinstance(verb, Act):
            self._act(client, command, verb)
        elif isinstance(verb, SetMemory):
            self._engine.resizer.handle(client, command, verb)
        elif isinstance(verb, Pause):
            self._pause(client, command, verb)
        elif isinstance(verb, Resume):
            self._resume(client, command)
        elif isinstance(verb, Drain):
            self._drain_verb(client, command, verb)
        elif isinstance(verb, SetCheck):
            self._engine.checks.handle(client, command, verb)
        else:
            raise CommandError("UNSUPPORTED", f"{type(verb).__name__.lower()} is not for the core")

    def _submit(self, client: bytes, command: Command, verb: Submit) -> None:
        engine = self._engine
        if engine.draining:
            raise CommandError("BUSY", "the engine is draining and takes no new requests; drain --undo ends that")
        requests = engine.submissions.requests(verb, owner=command.by)
        engine.scheduler.admission.check(requests)
        name = requests[0].group
        if command.dry_run:
            plan = [f"queue {len(requests)} sample(s) of {len(requests[0].prompt_ids)} prompt tokens"]
            engine.reply(client, Outcome(id=command.id, op="", state="planned", text=plan[0], plan=plan))
            return
        engine.admit(requests, session="")
        operation = engine.operations.open(command, client, name, request=name)
        text = f"{len(requests[0].prompt_ids)} prompt tokens queued"
        engine.operations.end(operation, "applied", text, request=name)

    def _act(self, client: bytes, command: Command, verb: Act) -> None:
        engine = self._engine
        members = engine.members(verb.request)
        if not members:
            raise CommandError("NOT_FOUND", engine.gone_text(verb.request))
        request = members[0]
        if command.if_rev is not None and command.if_rev != request.revision:
            last = request.history[-1][1] if request.history else request.state
            raise CommandError(
                "CONFLICT",
                f"{verb.request} has moved on: revision {request.revision}, you saw {command.if_rev} ({last})",
            )
        scheduler, by = engine.scheduler, command.by
        mode = verb.mode if isinstance(verb, Preempt) else None
        hold = verb.hold if isinstance(verb, Preempt | SwapOut) else False
        calls: dict[type, Callable[[Request], ActionResult]] = {
            Abort: lambda member: engine.abort(member, by),
            Preempt: lambda member: scheduler.actions.preempt(member.id, mode, hold, by=by),
            SwapOut: lambda member: scheduler.actions.swap_out(member.id, hold, by=by),
            SwapIn: lambda member: scheduler.actions.swap_in(member.id, by=by),
            Release: lambda member: scheduler.actions.release(member.id, by=by),
        }
        if command.dry_run:
            plan, figures = scheduler.actions.plan(VERB_NAMES[type(verb)], request.id, mode, hold)
            text = plan[0] if plan else "nothing to do"
            outcome = Outcome(
                id=command.id, op="", state="planned", text=text, plan=plan, figures=figures,
                revision=request.revision, request=verb.request,
            )  # fmt: skip
            engine.reply(client, outcome)
            return
        effects: list[tuple[ActionResult, Request]] = []
        problem = ""
        for member in self._able(verb, members, mode, hold):
            try:
                effects.append((calls[type(verb)](member), member))
            except NotPossible as error:
                # What earlier samples took, this one lacks.
                if not effects:
                    raise
                problem = f"{len(effects)} of {len(members)} samples: {error.text}"
                break
        operation = engine.operations.open(command, client, verb.request, request=verb.request)
        if problem:
            engine.operations.end(operation, "failed", problem, request=verb.request)
            return
        self._effects.append((effects, operation))
        self.settle()

    def _able(self, verb: Act, members: list[Request], mode: PreemptMode | None, hold: bool) -> list[Request]:
        """Return the samples to which the verb applies. Raises Refused when it is none, or when one lacks room."""
        able, first = [], None
        for member in members:
            try:
                self._engine.scheduler.actions.plan(VERB_NAMES[type(verb)], member.id, mode, hold)
                able.append(member)
            except NotPossible as error:
                if error.code == "DOES_NOT_FIT":
                    raise
                first = first or error
        if first is not None and not able:
            raise first
        return able

    def _pause(self, client: bytes, command: Command, verb: Pause) -> None:
        engine = self._engine
        scheduler = engine.scheduler
        running = engine.running
        plan = {
            "wait": f"finish {running} running, start none of {len(engine.live()) - running} others",
            "keep": f"stop scheduling; {len(engine.live())} requests keep their blocks",
            "abort": f"abort {len(engine.live())} requests and stop scheduling",
        }[verb.mode]
        if command.dry_run:
            engine.reply(client, Outcome(id=command.id, op="", state="planned", text=plan, plan=[plan]))
            return
        operation = engine.operations.open(command, client, verb.mode)
        self._supersede_pause(f"pause {verb.mode} by {command.by}")
        scheduler.batcher.draining, scheduler.paused = True, verb.mode != "wait"
        if verb.mode == "abort":
            engine.abort_all(by=command.by)
        if verb.mode == "wait" and running:
            self._idle = operation
            self.settle()
        else:
            engine.operations.end(operation, "applied", plan)

    def _resume(self, client: bytes, command: Command) -> None:
        engine = self._engine
        if command.dry_run:
            text = f"schedule again: {len(engine.live())} requests"
            engine.reply(client, Outcome(id=command.id, op="", state="planned", text=text, plan=[text]))
            return
        operation = engine.operations.open(command, client, None)
        self._supersede_pause(f"resumed by {command.by}")
        engine.scheduler.paused = engine.scheduler.batcher.draining = False
        engine.operations.end(operation, "applied", "scheduling again")

    def _supersede_pause(self, why: str) -> None:
        if self._idle is not None:
            self._engine.operations.end(self._idle, "superseded", why)
            self._idle = None

    def _drain_verb(self, client: bytes, command: Command, verb: Drain) -> None:
        engine = self._engine
        left = len(engine.live())
        text = "take requests again" if verb.undo else f"refuse new requests, finish {left}"
        if command.dry_run:
            engine.reply(client, Outcome(id=command.id, op="", state="planned", text=text, plan=[text]))
            return
        operation = engine.operations.open(command, client, "--undo" if verb.undo else None)
        engine.draining = not verb.undo
        if self._drain is not None:
            engine.operations.end(self._drain, "superseded", f"{text}, by {command.by}")
            self._drain = None
        if verb.undo:
            engine.operations.end(operation, "applied", "takes requests again")
        else:
            self._drain = operation
            self.settle()

    def _stop(self, client: bytes, command: Command) -> None:
        engine = self._engine
        left = len(engine.live()) if engine.serving else 0
        text = f"stop the engine; {left} requests end unfinished" if left else "stop the engine; it is idle"
        if command.dry_run:
            engine.reply(client, Outcome(id=command.id, op="", state="planned", text=text, plan=[text]))
            return
        operation = engine.operations.open(command, client, engine.config.name)
        engine.operations.end(operation, "applied", f"stopping; {left} requests unfinished")
        engine.leave(f"stop by {command.by}")

    def _where(self, request: Request) -> str:
        if not request.in_flight:
            return "waits for its copies"
        number = request.in_flight[0]
        stage = self._engine.board.holder(number)
        return f"in flight: m{number}" + ("" if stage is None else f" at stage {stage}")
