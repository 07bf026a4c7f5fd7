"""Commands from consoles: one dispatcher, and one handler a verb, chosen by the type of its message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from ppengine.common.config import EngineConfig
from ppengine.common.sizes import counted
from ppengine.core import ownership
from ppengine.core.answers import Answers
from ppengine.core.client_rules import ClientRules
from ppengine.core.cordons import Cordons
from ppengine.core.health import Health
from ppengine.core.journal_records import Opened
from ppengine.core.journal_writer import JournalWriter
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.many_requests import ManyRequests
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.recovery import Recovery
from ppengine.core.refusals import REFUSALS, code_of
from ppengine.core.request_verbs import RequestVerbs
from ppengine.core.scheduler import Scheduler
from ppengine.core.stage_records import Stages
from ppengine.core.submission_steps import Submission, SubmissionSteps
from ppengine.core.submissions import Submissions
from ppengine.core.tiers.backend_verbs import BackendVerbs
from ppengine.protocol.control import Command, Outcome, Refused
from ppengine.protocol.reports import Attended
from ppengine.protocol.store_verbs import StoreVerb
from ppengine.protocol.verb_table import covers
from ppengine.protocol.verbs import (
    Cordon,
    Drain,
    DrainClient,
    Kick,
    Limit,
    Many,
    Pause,
    RequestVerb,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Stop,
    Submit,
    Verb,
    row_of,
    value_of,
)

ATTENDED_MOST = 1000
"""Requests noted with their console, before those that have ended are dropped."""
_NOT_PAUSED = "nothing to do: the engine is not paused"


@dataclass(eq=False)
class Commands:
    """Dispatches commands to the handlers of their verbs: checks, dry run, operation and refusal are done here once."""

    _config: EngineConfig
    _health: Health
    _one: RequestVerbs
    _many: ManyRequests
    _stages: Stages
    _requests: LiveRequests
    _submissions: Submissions
    _steps: SubmissionSteps
    _recovery: Recovery
    _cordons: Cordons
    _checks: Checks
    _rules: ClientRules
    _backends: BackendVerbs
    _operations: Operations
    _answers: Answers
    _journal: JournalWriter
    _drain: Operation | None = field(init=False, default=None)
    _idle: Operation | None = field(init=False, default=None)
    _attended: dict[str, Attended] = field(init=False, default_factory=dict)
    """Requests that end with their console, and some that have ended."""

    def __post_init__(self) -> None:
        # Each handler takes the verb of its own type: a relation that no annotation of a dict expresses.
        self.handlers: dict[type[Verb], Callable[[Any, Command], Plan]] = {
            Submit: self._plan_submit,
            **dict.fromkeys(get_args(RequestVerb), self._one.plan),
            Many: self._many.plan,
            SetMemory: lambda verb, command: self._health.require().memory.plan_set_memory(verb, command),
            Pause: self._plan_pause,
            Resume: self._plan_resume,
            Drain: self._plan_drain,
            SetCheck: self._checks.plan_set_check,
            RestartStage: self._recovery.plan_restart,
            Cordon: self._cordons.plan_cordon,
            Limit: self._rules.plan_limit,
            Kick: self._rules.plan_kick,
            DrainClient: self._rules.plan_drain,
            **dict.fromkeys(get_args(StoreVerb), self._backends.plan),
            Stop: self._plan_stop,
        }
        """Handler of each verb's message type."""

    def handle(self, client: bytes, command: Command) -> None:
        """Execute one command; every path answers, and a repeated command gets the answers of the first."""
        if self._answers.repeat(client, command.id):
            return
        try:
            if isinstance(command.verb, Submit):
                self._check(command)
                one = self._submission(client, command, command.verb, None)
                if self._steps.begin(one):
                    self._submit(one)
                return
            plan = self._plan(command)
        except REFUSALS as error:
            self._answers(client, Refused(id=command.id, code=code_of(error), text=str(error)))
        else:
            self._begin(client, command, plan)

    def _begin(self, client: bytes, command: Command, plan: Plan, operation: Operation | None = None) -> None:
        """Execute a plan, or answer with it. `operation`: the one that the command has already."""
        if command.dry_run:
            outcome = Outcome(
                id=command.id, op="", state="planned", text=plan.lines[0], plan=plan.lines, figures=plan.figures,
                revision=plan.revision, request=plan.request, conflicts=plan.conflicts, owners=plan.owners,
                override=bool(plan.owners) and not covers(command.role, "admin"),
            )  # fmt: skip
            self._answers(client, outcome)
        else:
            plan.begin(operation or self._operations.open(command, client, plan.target, request=plan.request))

    def _submission(self, client: bytes, command: Command, verb: Submit, operation: Operation | None) -> Submission:
        return Submission(client, command, verb, operation, self._submit, self._refuse)

    def _submit(self, one: Submission) -> None:
        """Plan a submission and execute it: all is checked again, for the core may have gone on meanwhile.

        One whose operation has ended is dropped: serving was blocked, and its client knows that it has failed.
        """
        if one.operation is not None and one.operation.ended is not None:
            return
        self._begin(one.client, one.command, self._plan(one.command), one.operation)

    def _refuse(self, one: Submission, error: Exception) -> None:
        if one.operation is None:
            self._answers(one.client, Refused(id=one.command.id, code=code_of(error), text=str(error)))
        else:
            self._operations.refuse(one.operation, code_of(error), str(error))

    def resume(self, opened: Opened) -> None:
        """Carry out a command that a core before this one has accepted and not ended: from its beginning."""
        client, command, verb = opened.client, opened.command, opened.command.verb
        operation = self._operations.reopen(opened.op, command, client)
        try:
            if isinstance(verb, Submit):
                one = self._submission(client, msgspec.structs.replace(command, if_rev=None), verb, operation)
                if self._steps.begin(one):
                    self._submit(one)
            else:
                self._plan(msgspec.structs.replace(command, if_rev=None)).begin(operation)
        except REFUSALS as error:
            self._operations.end(operation, "failed", f"the core was restarted meanwhile: {error}")

    def restore_attended(self, attended: Iterable[Attended]) -> None:
        """Go on with the requests that end with their console."""
        self._attended.update((one.request, one) for one in attended)

    def attended(self) -> list[Attended]:
        """Return the live requests that end with their console."""
        self._attended = {name: one for name, one in self._attended.items() if self._requests.members(name)}
        return list(self._attended.values())

    def _plan(self, command: Command) -> Plan:
        """Check a command and return its plan. Raises CommandError, and the refusals of its handler."""
        return self._check(command)(command.verb, command)

    def _check(self, command: Command) -> Callable[[Any, Command], Plan]:
        """Return the handler of a command that can be planned now. Raises CommandError."""
        health, verb = self._health, command.verb
        row = row_of(verb)
        if command.epoch != self._config.epoch:
            raise CommandError("STALE_EPOCH", f"this is epoch {self._config.epoch}, not {command.epoch}")
        mends = bool(health.follows) and isinstance(verb, RestartStage)
        if row.needs == "running" and (health.down or health.gave_up):
            # No step will retire any more, so no other verb would ever have an end.
            raise CommandError("FAILED", f"the engine is degraded: {health.message}; restart-stage or stop")
        if row.needs != "nothing" and health.serving is None and not mends:
            raise CommandError("BUSY", health.text)
        handler = self.handlers.get(type(verb))
        if handler is None:
            raise CommandError("UNSUPPORTED", f"{row.name} is not for the core")
        if command.if_rev is not None and row.has_revision:
            self._check_revision(verb, command.if_rev)
        return handler

    def _check_revision(self, verb: Verb, seen: int) -> None:
        """Raise CommandError unless `seen` is the revision of the verb's request, or of memory."""
        if not isinstance(verb, SetMemory):
            self._one.check_revision(value_of(verb, "request"), seen)
        elif conflict := self._health.require().memory.conflict(seen):
            raise CommandError("CONFLICT", conflict)

    @property
    def under_way(self) -> bool:
        """Whether a verb on many requests goes on in the next turn."""
        return self._requests.aborting or self._many.under_way

    def settle(self) -> None:
        """End the operations whose effect has happened; report the progress of the others."""
        self._requests.go_on()
        scheduler = self._health.require().scheduler
        # All effects are examined below; the scheduler's own list of ended ones would only grow.
        scheduler.fences.settled()
        self._one.settle()
        self._many.settle()
        self._rules.settle()
        self._backends.settle()
        if self._idle is not None:
            if running := _running(scheduler):
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

    # --- verbs ----------------------------------------------------------------------------------------------

    def _plan_submit(self, verb: Submit, command: Command) -> Plan:
        serving = self._health.require()
        if verb.sampling.prompt_logprobs is not None:
            raise CommandError("INVALID", "prompt_logprobs has no place in a console's output; use HTTP or Python")
        if self._health.draining:
            raise CommandError("BUSY", "the engine is draining and takes no new requests; drain --undo ends that")
        requests = self._submissions.requests(verb, owner=command.by, principal=ownership.principal(command))
        serving.scheduler.admission.check(requests)
        name, prompt = requests[0].group, len(requests[0].prompt_ids)

        def begin(operation: Operation) -> None:
            self._requests.admit(serving, requests, session="")
            if verb.abort_on_detach and command.console:
                self._attended[name] = Attended(request=name, console=command.console, user=command.by)
                self._journal.watched(self._attended[name])
                if len(self._attended) > ATTENDED_MOST:
                    self.attended()
            self._operations.end(operation, "applied", f"{prompt} prompt tokens queued", request=name)

        lines = [f"queue {len(requests)} sample(s) of {prompt} prompt tokens"]
        return Plan(lines, begin, target=name, request=None if command.dry_run else name)

    def _plan_pause(self, verb: Pause, command: Command) -> Plan:
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

    def _plan_resume(self, verb: Resume, command: Command) -> Plan:
        scheduler = self._health.require().scheduler
        again = f"schedule again: {counted(len(self._requests.live()), 'request')}"

        def begin(operation: Operation) -> None:
            text = "scheduling again" if scheduler.paused_by else _NOT_PAUSED
            self._supersede_pause(f"resumed by {command.by}")
            scheduler.resume()
            self._operations.end(operation, "applied", text)

        return Plan([again if scheduler.paused_by else _NOT_PAUSED], begin)

    def _supersede_pause(self, why: str) -> None:
        if self._idle is not None:
            self._operations.end(self._idle, "superseded", why)
            self._idle = None

    def _plan_drain(self, verb: Drain, command: Command) -> Plan:
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

    def _plan_stop(self, verb: Stop, command: Command) -> Plan:
        left = len(self._requests.live())

        def begin(operation: Operation) -> None:
            self._operations.end(operation, "applied", f"stopping; {counted(left, 'request')} unfinished")
            self._health.leave(f"stop by {command.by}")

        line = f"stop the engine; {counted(left, 'request')} unfinished" if left else "stop the engine; it is idle"
        return Plan([line], begin, target=self._config.name)


def _running(scheduler: Scheduler) -> int:
    """Return how many requests run or are being loaded."""
    queues = scheduler.queues.counts()
    return queues.running + queues.loading
