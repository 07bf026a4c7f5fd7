"""Verbs on one request: the plan, the effects on its samples, and the end of the operation."""

from __future__ import annotations

from dataclasses import dataclass, field

from ppengine.core import ownership
from ppengine.core.health import Health
from ppengine.core.journal_writer import JournalWriter
from ppengine.core.live_requests import LiveRequests
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.scheduler import ActionResult
from ppengine.core.scheduler import Refused as NotPossible
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.results import ActionState
from ppengine.core.stage_tracker import StageTracker
from ppengine.protocol.control import Command
from ppengine.protocol.verbs import Abort, RequestVerb

_REPORTED_FIRST: tuple[ActionState, ...] = ("pending", "failed", "superseded", "applied")
"""Order in which the effects on several samples are reported."""

Effects = list[tuple[ActionResult, Request]]
"""Effects of one verb on the samples of one request."""


def reported(effects: Effects) -> tuple[ActionResult, Request]:
    """Return the effect to report of several samples: a group moves together and ends with the last of them."""
    return effects[0] if len(effects) == 1 else min(effects, key=lambda pair: _REPORTED_FIRST.index(pair[0].state))


@dataclass(eq=False)
class RequestVerbs:
    """Plans and begins verbs on one request, and ends their operations when their effects have happened."""

    _health: Health
    _requests: LiveRequests
    _tracker: StageTracker
    _operations: Operations
    _journal: JournalWriter
    _under_way: list[tuple[Effects, Operation]] = field(init=False, default_factory=list)

    def plan(self, verb: RequestVerb, command: Command) -> Plan:
        """Return the plan of a verb. Raises CommandError and Refused."""
        members = self.members(verb.request)
        owner = ownership.check(members[0], command)
        able = self.able(verb, members)

        def begin(operation: Operation) -> None:
            try:
                effects = self.begin(verb, able, command.by)
            except NotPossible as error:
                self._operations.end(operation, "failed", error.text, request=operation.request)
                return
            self._under_way.append((effects, operation))
            self.settle()

        serving = self._health.require()
        lines, figures = serving.scheduler.actions.plan(verb, able[0].id, serving.memory.capacity.block_bytes)
        owners = {owner: 1} if owner else {}
        return Plan(
            [*lines, *ownership.lines(owners)], begin, target=verb.request, request=verb.request,
            revision=members[0].revision, figures=figures, owners=owners,
        )  # fmt: skip

    def members(self, name: str) -> list[Request]:
        """Return the live samples of a request. Raises CommandError if there are none."""
        members = self._requests.members(name)
        if not members:
            raise CommandError("NOT_FOUND", self._requests.gone_text(name))
        return members

    def check_revision(self, name: str, seen: int) -> None:
        """Raise CommandError unless `seen` is the revision of a request."""
        request = self.members(name)[0]
        last = request.history[-1][1] if request.history else request.state
        if request.revision != seen:
            raise CommandError("CONFLICT", f"{name} has moved on: revision {request.revision}, you saw {seen} ({last})")

    def able(self, verb: RequestVerb, members: list[Request]) -> list[Request]:
        """Return the samples to which the verb applies.

        Raises Refused if it applies to none, or if one lacks room.
        """
        able: list[Request] = []
        first: NotPossible | None = None
        for member in members:
            try:
                self._health.require().scheduler.actions.check(verb, member.id)
                able.append(member)
            except NotPossible as error:
                if error.code == "DOES_NOT_FIT":
                    raise
                first = first or error
        if first is not None and not able:
            raise first
        return able

    def begin(self, verb: RequestVerb, able: list[Request], by: str) -> Effects:
        """Begin a verb on samples. Raises Refused if an earlier sample took the room of a later."""
        serving, effects = self._health.require(), Effects()
        for sample in able:
            try:
                if isinstance(verb, Abort):
                    effect = self._requests.abort(serving, sample, by)
                else:
                    effect = serving.scheduler.actions.begin(verb, sample.id, by=by)
            except NotPossible as error:
                raise NotPossible(error.code, f"{len(effects)} of {len(able)} samples: {error.text}") from None
            effects.append((effect, sample))
        return effects

    def settle(self) -> None:
        """End the operations whose effect has happened; report the progress of the others."""
        left = []
        for effects, operation in self._under_way:
            effect, request = reported(effects)
            if effect.state == "pending":
                self._operations.defer(operation, self.where(request))
                left.append((effects, operation))
            else:
                self.note(effects)
                revision = effects[0][1].revision
                self._operations.end(operation, effect.state, effect.text, step=effect.step, revision=revision)
        self._under_way = left

    def note(self, effects: Effects) -> None:
        """Note in the journal what a verb has changed."""
        for _, request in effects:
            if not request.finished:
                self._journal.changed(request)

    def where(self, request: Request) -> str:
        """Return the place at which an effect on a request waits, in words."""
        if not request.in_flight:
            return "waits for its copies"
        number = request.in_flight[0]
        stage = self._tracker.holder(number)
        return f"in flight: m{number}" + ("" if stage is None else f" at stage {stage}")
