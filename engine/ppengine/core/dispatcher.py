"""Commands from consoles: checks, dry run, operation, answer and refusal are done here, once for all verbs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ppengine.core.answers import Answers
from ppengine.core.health import Health
from ppengine.core.journal_records import Opened
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.refusals import REFUSALS, code_of
from ppengine.core.submission_steps import Submission, SubmissionSteps
from ppengine.core.verb_handlers import Handler, VerbHandlers
from ppengine.protocol.control import Command, Outcome, Refused
from ppengine.protocol.verb_table import covers
from ppengine.protocol.verbs import RestartStage, Submit, row_of


@dataclass(eq=False)
class Dispatcher:
    """Has each command planned by the handler of its verb, and executes the plan."""

    _epoch: str
    _health: Health
    _handlers: VerbHandlers
    _steps: SubmissionSteps
    _operations: Operations
    _answers: Answers

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

    def _plan(self, command: Command) -> Plan:
        """Check a command and return its plan. Raises CommandError, and the refusals of its handler."""
        return self._check(command)(command.verb, command)

    def _check(self, command: Command) -> Handler:
        """Return the handler of a command that can be planned now. Raises CommandError."""
        health, verb = self._health, command.verb
        row = row_of(verb)
        if command.epoch != self._epoch:
            raise CommandError("STALE_EPOCH", f"this is epoch {self._epoch}, not {command.epoch}")
        mends = bool(health.follows) and isinstance(verb, RestartStage)
        if row.needs == "running" and (health.down or health.gave_up):
            # No step will retire any more, so no other verb would ever have an end.
            raise CommandError("FAILED", f"the engine is degraded: {health.message}; restart-stage or stop")
        if row.needs != "nothing" and health.serving is None and not mends:
            raise CommandError("BUSY", health.text)
        handler = self._handlers.by_type.get(type(verb))
        if handler is None:
            raise CommandError("UNSUPPORTED", f"{row.name} is not for the core")
        if command.if_rev is not None and row.has_revision:
            self._handlers.check_revision(verb, command.if_rev)
        return handler
