"""The steps of a submission before its plan: its grammar is compiled, then its chat rendered, each in a child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from ppengine.common.template_process import TemplateProcess
from ppengine.core.constraints import FIELD, Constraints
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError
from ppengine.core.refusals import REFUSALS
from ppengine.core.submissions import Submissions
from ppengine.protocol.chat_messages import Rendered
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
    """Takes submissions through the steps that they need. A wait is an operation's: there is no request yet."""

    _submissions: Submissions
    _templates: TemplateProcess
    _constraints: Constraints
    _operations: Operations

    def begin(self, one: Submission) -> bool:
        """Return True if `one` can be planned now; otherwise it goes on later. Raises as the steps."""
        sampling = one.verb.sampling
        if not self._constraints.compile([sampling], partial(self._compiled, one)):
            self._wait(one)
            return False
        return self._render(one)

    def _compiled(self, one: Submission, error: str, later: bool) -> None:
        try:
            if error:
                raise CommandError("BUSY" if later else "INVALID", f"{FIELD}: {error}")
            if self._render(one):
                one.go_on(one)
        except REFUSALS as problem:
            one.refuse(one, problem)

    def _render(self, one: Submission) -> bool:
        """Return True if `one` is no chat; otherwise have it rendered."""
        if not one.verb.chat:
            return True
        chat, most = self._submissions.chat(one.verb)
        self._templates.check_room()
        self._wait(one)
        defer = None if one.operation is None else partial(self._operations.defer, one.operation)
        self._templates.render(chat, most, partial(self._rendered, one), defer)
        return False

    def _rendered(self, one: Submission, rendered: Rendered) -> None:
        try:
            if rendered.error:
                raise CommandError(rendered.code, rendered.error)
            one.verb = self._submissions.rendered(one.verb, rendered.text)
            one.command = msgspec.structs.replace(one.command, verb=one.verb)
            one.go_on(one)
        except REFUSALS as problem:
            one.refuse(one, problem)

    def _wait(self, one: Submission) -> None:
        if one.operation is None and not one.command.dry_run:
            one.operation = self._operations.open(one.command, one.client, one.verb.request)
