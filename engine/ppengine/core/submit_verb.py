"""The verb that submits a request, and the consoles that requests end with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ppengine.core import ownership
from ppengine.core.health import Health
from ppengine.core.journal_writer import JournalWriter
from ppengine.core.live_requests import LiveRequests
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.submissions import Submissions
from ppengine.protocol.control import Command
from ppengine.protocol.reports import Attended
from ppengine.protocol.verbs import Submit

ATTENDED_MOST = 1000
"""Requests noted with their console, before those that have ended are dropped."""


@dataclass(eq=False)
class SubmitVerb:
    """Plans submissions, and notes which requests end with their console."""

    _health: Health
    _submissions: Submissions
    _requests: LiveRequests
    _operations: Operations
    _journal: JournalWriter
    _attended: dict[str, Attended] = field(init=False, default_factory=dict)
    """Requests that end with their console, and some that have ended."""

    def plan(self, verb: Submit, command: Command) -> Plan:
        """Return the plan of a submission, whose grammar is compiled. Raises a refusal."""
        serving = self._health.require()
        if verb.sampling.prompt_logprobs is not None:
            raise CommandError("INVALID", "prompt_logprobs has no place in a console's output; use HTTP or Python")
        if self._health.draining:
            raise CommandError("BUSY", "the engine is draining and takes no new requests; drain --undo ends that")
        requests = self._submissions.requests(
            verb, owner=command.by, principal=ownership.principal(command), arrived=command.arrived
        )  # fmt: skip
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

    def restore_attended(self, attended: Iterable[Attended]) -> None:
        """Go on with the requests that end with their console."""
        self._attended.update((one.request, one) for one in attended)

    def attended(self) -> list[Attended]:
        """Return the live requests that end with their console."""
        self._attended = {name: one for name, one in self._attended.items() if self._requests.members(name)}
        return list(self._attended.values())
