"""The steps of a submission before its plan, each in a child: grammar, chat, tokens of a long text."""

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
from ppengine.core.submissions import INLINE_CHARACTERS, Submissions, by_tokens
from ppengine.protocol.chat_messages import Rendered, Tokenized
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
        return self._prepare(one)

    def _compiled(self, one: Submission, error: str, later: bool) -> None:
        try:
            if error:
                raise CommandError("BUSY" if later else "INVALID", f"{FIELD}: {error}")
            if self._prepare(one):
                one.go_on(one)
        except REFUSALS as problem:
            one.refuse(one, problem)

    def _prepare(self, one: Submission) -> bool:
        """Return True if `one` is neither a chat nor a long text; otherwise have it rendered, or tokenized."""
        if one.verb.chat:
            chat, most = self._submissions.chat(one.verb)
            self._templates.check_room()
            self._wait(one)
            self._templates.render(chat, most, partial(self._rendered, one), self._defer(one))
            return False
        text = self._submissions.long_text(one.verb)
        if text is None:
            return True
        self._templates.check_room()
        self._wait(one)
        self._templates.tokenize([text], partial(self._tokenized, one), self._defer(one))
        return False

    def _rendered(self, one: Submission, answer: Rendered | Tokenized) -> None:
        try:
            if answer.error or not isinstance(answer, Rendered):
                raise CommandError(answer.code, answer.error)
            if len(answer.text) <= INLINE_CHARACTERS:
                self._go_on(one, self._submissions.rendered(one.verb, answer.text))
            else:
                self._templates.tokenize(
                    [answer.text], partial(self._tokenized, one), self._defer(one), special=False
                )  # fmt: skip
        except REFUSALS as problem:
            one.refuse(one, problem)

    def _tokenized(self, one: Submission, answer: Rendered | Tokenized) -> None:
        try:
            if answer.error or not isinstance(answer, Tokenized):
                raise CommandError(answer.code, answer.error)
            self._go_on(one, by_tokens(one.verb, answer.token_ids[0]))
        except REFUSALS as problem:
            one.refuse(one, problem)

    @staticmethod
    def _go_on(one: Submission, verb: Submit) -> None:
        """Plan `one` by the tokens of its prompt."""
        one.verb, one.command = verb, msgspec.structs.replace(one.command, verb=verb)
        one.go_on(one)

    def _defer(self, one: Submission) -> Callable[[str], None] | None:
        return None if one.operation is None else partial(self._operations.defer, one.operation)

    def _wait(self, one: Submission) -> None:
        if one.operation is None and not one.command.dry_run:
            one.operation = self._operations.open(one.command, one.client, one.verb.request)
