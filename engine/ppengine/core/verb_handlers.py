"""The handler of each verb, chosen by the type of its message, and the progress of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from ppengine.core.client_rules import ClientRules
from ppengine.core.cordons import Cordons
from ppengine.core.engine_verbs import EngineVerbs
from ppengine.core.health import Health
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.many_requests import ManyRequests
from ppengine.core.plans import CommandError, Plan
from ppengine.core.recovery import Recovery
from ppengine.core.request_verbs import RequestVerbs
from ppengine.core.submit_verb import SubmitVerb
from ppengine.core.tiers.backend_verbs import BackendVerbs
from ppengine.protocol.control import Command
from ppengine.protocol.store_verbs import StoreVerb
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
    value_of,
)

Handler = Callable[[Any, Command], Plan]
"""Returns the plan of a verb. Raises a refusal."""


@dataclass(eq=False)
class VerbHandlers:
    """Knows the part of the core that plans each verb."""

    _health: Health
    _requests: LiveRequests
    _submit: SubmitVerb
    _engine: EngineVerbs
    _one: RequestVerbs
    _many: ManyRequests
    _recovery: Recovery
    _cordons: Cordons
    _checks: Checks
    _rules: ClientRules
    _backends: BackendVerbs

    def __post_init__(self) -> None:
        # Each handler takes the verb of its own type: a relation that no annotation of a dict expresses.
        self.by_type: dict[type[Verb], Handler] = {
            Submit: self._submit.plan,
            **dict.fromkeys(get_args(RequestVerb), self._one.plan),
            Many: self._many.plan,
            SetMemory: lambda verb, command: self._health.require().memory.plan_set_memory(verb, command),
            Pause: self._engine.plan_pause,
            Resume: self._engine.plan_resume,
            Drain: self._engine.plan_drain,
            SetCheck: self._checks.plan_set_check,
            RestartStage: self._recovery.plan_restart,
            Cordon: self._cordons.plan_cordon,
            Limit: self._rules.plan_limit,
            Kick: self._rules.plan_kick,
            DrainClient: self._rules.plan_drain,
            **dict.fromkeys(get_args(StoreVerb), self._backends.plan),
            Stop: self._engine.plan_stop,
        }
        """Handler of each verb's message type."""

    def check_revision(self, verb: Verb, seen: int) -> None:
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
        # All effects are examined below; the scheduler's own list of ended ones would only grow.
        self._health.require().scheduler.fences.settled()
        self._one.settle()
        self._many.settle()
        self._rules.settle()
        self._backends.settle()
        self._engine.settle()
