"""The step of a submission before its plan: its grammar is compiled in a child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ppengine.core.constraints import FIELD, Constraints
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError
from ppengine.core.refusals import REFUSALS
from ppengine.core.submissions import check_ids_alone
from ppengine.protocol.control import Command
from ppengine.protocol.verbs import Submit


@dataclass(eq=False, slots=True)
class Submission:
    """A submission on its way to its plan."""

    client: bytes
    command: Command
    verb: Submit
    operation: Operation | None
    """None: of a dry run, or before its first wait."""
    go_on: Callable[[Submission], None]
    """Plans it, in a later turn. Raises a refusal."""
    refuse: Callable[[Submission, Exception], None]


@dataclass(eq=False)
class SubmissionSteps:
    """Has grammars of submissions compiled. A wait is an operation's: there is no request yet."""

    _constraints: Constraints
    _operations: Operations

    def begin(self, one: Submission) -> bool:
        """Return True if `one` can be planned now; otherwise it goes on later. Raises a refusal, also for a text."""
        check_ids_alone(one.verb, stops=True)
        if self._constraints.compile([one.verb.sampling], partial(self._compiled, one)):
            return True
        if one.operation is None and not one.command.dry_run:
            one.operation = self._operations.open(one.command, one.client, one.verb.request)
        return False

    @staticmethod
    def _compiled(one: Submission, error: str, later: bool) -> None:
        try:
            if error:
                raise CommandError("BUSY" if later else "INVALID", f"{FIELD}: {error}")
            one.go_on(one)
        except REFUSALS as problem:
            one.refuse(one, problem)
