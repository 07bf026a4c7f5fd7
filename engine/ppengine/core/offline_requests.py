"""Requests of programs, by session: many prompts in one message, all of them or none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ppengine.core.client_rules import ClientRules
from ppengine.core.constraints import FIELD, BadGrammarError, Constraints, TooManyGrammarsError
from ppengine.core.health import Health
from ppengine.core.journal_writer import JournalWriter
from ppengine.core.live_requests import LiveRequests
from ppengine.core.outputs import OutputHub
from ppengine.core.scheduler import DoesNotFit, Scheduler
from ppengine.core.scheduler.request import Request
from ppengine.core.submissions import Submissions, check_ids_alone
from ppengine.protocol.offline import AbortMany, Added, AddMany
from ppengine.protocol.prompt_scores import values_of
from ppengine.protocol.token_ids import compact

AGAIN_S = 1
"""Seconds after which there may be room for log-probabilities of prompts."""
ADDED_MOST = 1000
"""Messages whose requests are known by number."""


class _LaterError(ValueError):
    """The engine takes no prompts now."""


@dataclass(eq=False)
class OfflineRequests:
    """Queues the prompts of a session."""

    _health: Health
    _submissions: Submissions
    _constraints: Constraints
    _requests: LiveRequests
    _rules: ClientRules
    _outputs: OutputHub
    _journal: JournalWriter
    _reply: Callable[[bytes, msgspec.Struct], None]
    added: OrderedDict[tuple[str, int], list[str]] = field(init=False, default_factory=OrderedDict)
    """Requests of the newest messages, by session and number: one that is repeated is carried out once."""
    _preparing: dict[tuple[str, int], tuple[bytes, AddMany]] = field(init=False, default_factory=dict)
    """Messages whose grammars are being compiled, with the client, by session and number."""

    def add_many(self, client: bytes, message: AddMany) -> None:
        """Queue the requests of a message: all of them or none, and once however often it comes; or check them."""
        key = message.session, message.nonce
        if key in self.added:
            self._reply(client, Added(nonce=message.nonce, requests=self.added[key]))
            return
        preparing, self._preparing[key] = key in self._preparing, (client, message)
        samplings = (one.sampling for one in message.submissions)
        try:
            if not preparing and self._constraints.compile(samplings, partial(self._compiled, key)):
                self._compiled(key)
        except (BadGrammarError, TooManyGrammarsError) as error:
            text = str(error).removeprefix(f"{FIELD}: ")
            self._compiled(key, text, later=isinstance(error, TooManyGrammarsError))

    def _compiled(self, key: tuple[str, int], error: str = "", later: bool = False) -> None:
        """Go on with a message whose grammars are compiled, unless its client has left."""
        client, message = self._preparing.pop(key, (b"", None))
        if message is None:
            return
        if error:
            text = f"{FIELD}: {error}"
            self._reply(client, Added(nonce=message.nonce, requests=[], error=text, later=later))
            return
        self._add(client, message)

    def _add(self, client: bytes, message: AddMany) -> None:
        key = message.session, message.nonce
        health = self._health
        lost, serving = bool(health.down or health.gave_up), health.serving
        try:
            if serving is None or lost:
                raise _LaterError(health.text)
            if health.draining:
                raise _LaterError("the engine is draining and takes no new requests; drain --undo ends that")
            refusal = self._rules.refusal(message.client, len(message.submissions)) if message.client else None
            if refusal is not None:
                again = 0 if refusal.drained else refusal.again_s
                text, drained = refusal.text, refusal.drained
                self._reply(client, Added(nonce=message.nonce, requests=[], error=text, later=drained, again_s=again))
                return
            groups = self._groups(serving.scheduler, message)
            if message.check:
                self._reply(client, Added(nonce=message.nonce, requests=[]))
                return
            if lack := self._outputs.scores.lack(
                sum(values_of(len(one.prompt_ids), one.sampling.prompt_logprobs) for one, *_ in groups)
            ):
                self._reply(client, Added(nonce=message.nonce, requests=[], error=lack, again_s=AGAIN_S))
                return
        except ValueError as problem:
            later = isinstance(problem, _LaterError)
            self._reply(client, Added(nonce=message.nonce, requests=[], error=str(problem), lost=lost, later=later))
            return
        for group in groups:
            self._requests.admit(serving, group, session=message.session)
        self._rules.begun(message.client, len(groups))
        names = self.added[key] = [group[0].group for group in groups]
        while len(self.added) > ADDED_MOST:  # A journal has those since its newest file began.
            self.added.popitem(last=False)
        self._journal.added(*key, names)
        self._reply(client, Added(nonce=message.nonce, requests=names))

    def open_session(self, session: str) -> None:
        """Abort the requests that an earlier process has left in a session."""
        self._preparing = {key: waiting for key, waiting in self._preparing.items() if key[0] != session}
        self._requests.abort_many(self._outputs.open_in(session))

    def abort(self, message: AbortMany) -> None:
        """Abort requests of a session, also those that are being prepared."""
        names, keys = set(message.requests), {(message.session, number) for number in message.messages}
        for key, (_, waiting) in list(self._preparing.items()):
            named = key[0] == message.session and any(one.request in names for one in waiting.submissions)
            if named or key in keys:
                del self._preparing[key]
        more = [name for key in keys for name in self.added.get(key, ())]
        names.update(more)
        self._outputs.drop_scores(names)
        self._requests.abort_many([*message.requests, *more])

    def _groups(self, scheduler: Scheduler, message: AddMany) -> list[list[Request]]:
        """Return the requests of each prompt. Raises ValueError with the first prompt that is refused."""
        groups: list[list[Request]] = []
        seen: set[str] = set()
        owner = message.owner or message.session
        count, given = len(message.submissions), len(message.tokens)
        if given not in (0, count):
            raise ValueError(f"{count} prompts and the tokens of {given}")
        tokens = message.tokens or [compact()] * count
        for number, (verb, ids) in enumerate(zip(message.submissions, tokens, strict=True), message.first):
            try:
                check_ids_alone(verb, stops=False)
                group = self._submissions.requests(
                    verb, owner=owner, client=message.client, tokens=ids, arrived=message.arrived
                )  # fmt: skip
                scheduler.admission.check(group)
            except (DoesNotFit, ValueError) as problem:
                raise ValueError(f"prompt {number}: {problem}") from None
            for request in group:
                if request.id in seen:
                    raise ValueError(f"request id {request.id} is given twice; ids are used once")
                seen.add(request.id)
            groups.append(group)
        return groups
