"""Rules of clients of the HTTP port: most open requests, requests a minute, and a drain, by the name of the API key.

The core counts, because a client's requests are spread over several HTTP processes. These take the rules with each
answer about the engine's state, and close the streams of a client that was kicked.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from msgspec.structs import replace

from ppengine.common.sizes import counted
from ppengine.core import ownership
from ppengine.core.live_requests import LiveRequests
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.scheduler.request import Request
from ppengine.protocol.clients import ClientRule
from ppengine.protocol.control import Command
from ppengine.protocol.verbs import DrainClient, Kick, Limit

RULES_MOST = SEEN_MOST = 1000
MINUTE_S = 60.0
KICK_S = 30.0
"""Seconds for which a kick is among the rules: HTTP processes take these twice a second."""
_AGAIN_S = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why requests of a client are refused, and the whole seconds after which to try again."""

    text: str
    again_s: int
    drained: bool = False


@dataclass(eq=False)
class ClientRules:
    """Keeps the rules, and carries out the verbs that change them."""

    _requests: LiveRequests
    _operations: Operations
    _clock: Callable[[], float]
    _rules: dict[str, ClientRule] = field(init=False, default_factory=dict)
    _kicked: dict[str, float] = field(init=False, default_factory=dict)
    """Time from which nothing is left of a kick, by client."""
    _begun: dict[str, deque[float]] = field(init=False, default_factory=dict)
    """Times of the requests of the last minute, of clients with a limit of them."""
    _drains: dict[str, Operation] = field(init=False, default_factory=dict)
    _seen: dict[str, None] = field(init=False, default_factory=dict)
    """The newest clients that have sent a request to this core, the newest last."""

    def rules(self) -> list[ClientRule]:
        """Return all rules, by name."""
        return [rule for _, rule in sorted(self._rules.items())]

    def restore(self, rules: Collection[ClientRule]) -> None:
        """Go on with the rules of the core before this one. Its counts of the last minute are gone."""
        self._rules = {rule.client: rule for rule in rules}
        self._kicked = {rule.client: self._clock() + KICK_S for rule in rules if rule.kick}

    def refusal(self, client: str, count: int) -> Refusal | None:
        """Return why `count` more requests of a client are refused; None if they are not."""
        rule = self._rules.get(client)
        if rule is None:
            return None
        if rule.draining:
            return Refusal(f"client {client} is drained and gets no new requests", _AGAIN_S, drained=True)
        if rule.most_open is not None and (now := len(self._open(client))) + count > rule.most_open:
            text = f"client {client} has {_open(now)}; {_more(count)} above its limit of {rule.most_open}"
            return Refusal(text, _AGAIN_S)
        if rule.per_minute is not None:
            begun, now_s = self._last_minute(client), self._clock()
            if (above := len(begun) + count - rule.per_minute) > 0:
                again = begun[min(above, len(begun)) - 1] + MINUTE_S - now_s if begun else MINUTE_S
                text = f"client {client} began {len(begun)} requests in the last minute; {_more(count)}"
                return Refusal(f"{text} above its limit of {rule.per_minute}", max(1, math.ceil(again)))
        return None

    def begun(self, client: str, count: int) -> None:
        """Count requests that were taken."""
        self._seen.pop(client, None)
        self._seen[client] = None
        if len(self._seen) > SEEN_MOST:
            del self._seen[next(iter(self._seen))]
        rule = self._rules.get(client)
        if rule is not None and rule.per_minute is not None:
            self._last_minute(client).extend([self._clock()] * count)

    def plan_limit(self, verb: Limit, command: Command) -> Plan:
        """Return the plan of a limit; `off` ends every limit of the client, and a drain."""
        client, before = verb.client, self._rules.get(verb.client)
        most_open, per_minute = verb.numbers
        if verb.limit == "off":
            if before is None or not before.text:
                raise CommandError("NOT_FOUND", f"client {client} has no limit{self._meant(client)}")
            line = f"end the limits of client {client}: {before.text}"
        elif most_open is not None:
            line = f"client {client} may have {_open(most_open)}; it has {len(self._open(client))}"
        else:
            line = f"client {client} may begin {per_minute} requests a minute"
        rule, unseen = self._changed(client), [] if verb.limit == "off" else self._unseen(client)
        if verb.limit == "off":
            rule = ClientRule(client=client, kick=rule.kick)
        elif most_open is not None:
            rule = replace(rule, most_open=most_open)
        else:
            rule = replace(rule, per_minute=per_minute)

        def begin(operation: Operation) -> None:
            if verb.limit == "off" and (drain := self._drains.pop(client, None)) is not None:
                self._operations.end(drain, "superseded", f"limit {client} off, by {command.by}")
            self._keep(rule)
            self._operations.end(operation, "applied", "; ".join([line, *unseen]))

        return Plan([line, *unseen], begin, target=f"{client} {verb.limit}")

    def plan_kick(self, verb: Kick, command: Command) -> Plan:
        """Return the plan of a kick: the client's open requests are aborted, and its streams closed."""
        client, found = verb.client, self._open(verb.client)
        if client not in self._rules and not found:
            raise CommandError("NOT_FOUND", f"client {client} has no open request{self._meant(client)}")
        owners = ownership.check_all(self._members(client), command)
        line = f"abort {counted(len(found), 'request')} of client {client} and close its streams"
        rule = self._changed(client)

        def begin(operation: Operation) -> None:
            # Operations are counted over all cores, so that a later kick has a greater number.
            self._kicked[client] = self._clock() + KICK_S
            self._keep(replace(rule, kick=self._operations.count))
            text = f"{counted(len(found), 'request')} of client {client} aborted"
            self._requests.abort_each(
                self._members(client), command.by, lambda: self._operations.end(operation, "applied", text)
            )

        return Plan([line, *ownership.lines(owners)], begin, target=client, owners=owners)

    def plan_drain(self, verb: DrainClient, command: Command) -> Plan:
        """Return the plan of a drain: open requests end, new ones are refused until `limit CLIENT off`."""
        client, count = verb.client, len(self._open(verb.client))
        lines = [f"refuse new requests of client {client}, finish {count}", *self._unseen(client)]
        rule = replace(self._changed(client), draining=True)

        def begin(operation: Operation) -> None:
            if (drain := self._drains.pop(client, None)) is not None:
                self._operations.end(drain, "superseded", f"drain-client {client}, by {command.by}")
            self._keep(rule)
            self._drains[client] = operation
            self.settle()

        return Plan([*lines, f"limit {client} off ends that"], begin, target=client)

    def settle(self) -> None:
        """End the drains of clients that have no request left, and report the progress of the others. Forget kicks."""
        for client in [client for client, until in self._kicked.items() if self._clock() >= until]:
            del self._kicked[client]
            self._keep(replace(self._rules[client], kick=0))
        for client, operation in list(self._drains.items()):
            if count := len(self._open(client)):
                self._operations.defer(operation, f"waits for {counted(count, 'request')} of client {client}")
            else:
                del self._drains[client]
                text = "; ".join([f"drained: client {client} has no request left", *self._unseen(client)])
                self._operations.end(operation, "applied", text)

    def _unseen(self, client: str) -> list[str]:
        """Return a line for a plan if no request of a client has come: its name may be mistyped."""
        if client in self._seen or self._open(client):
            return []
        return [f"no request of {client} has come since this core began{self._meant(client)}"]

    def _meant(self, client: str) -> str:
        """Return the known client whose name is like that of an unknown one, as a question; empty: none is."""
        known = {*self._seen, *self._rules, *(request.client for request in self._requests.live())} - {"", client}
        near = difflib.get_close_matches(client, sorted(known), n=1)
        return "" if client in self._seen or not near else f"; did you mean {near[0]}?"

    def _changed(self, client: str) -> ClientRule:
        """Return the rule of a client, or a new one. Raises CommandError if there are too many."""
        rule = self._rules.get(client)
        if rule is None and len(self._rules) >= RULES_MOST:
            raise CommandError("BUSY", f"{RULES_MOST} clients have a rule, the most; end one with limit CLIENT off")
        return rule or ClientRule(client=client)

    def _keep(self, rule: ClientRule) -> None:
        if rule.per_minute is None:
            self._begun.pop(rule.client, None)
        self._rules[rule.client] = rule
        if not rule.text and not rule.kick:
            del self._rules[rule.client]

    def _members(self, client: str) -> list[Request]:
        return [request for request in self._requests.live() if request.client == client]

    def _open(self, client: str) -> set[str]:
        """Return the client's open requests; samples of a prompt count once."""
        return {request.group for request in self._members(client)}

    def _last_minute(self, client: str) -> deque[float]:
        begun, horizon = self._begun.setdefault(client, deque()), self._clock() - MINUTE_S
        while begun and begun[0] <= horizon:
            begun.popleft()
        return begun


def _open(count: int) -> str:
    return f"{count} open request{'s' * (count != 1)}"


def _more(count: int) -> str:
    return "one more is" if count == 1 else f"{count} more are"
