"""The begin of a gateway that replaces another one: it asks the core for everything that only the core knows.

Until the answer is there it takes no message of a console; they wait in their sockets. A core that is stopped delays
that for a moment only.
"""

from __future__ import annotations

from collections.abc import Callable

from ppengine.gateway.commands import CommandDesk
from ppengine.gateway.events import EventLog
from ppengine.gateway.sessions import Sessions
from ppengine.protocol.reports import Recall, Recalled

AGAIN_S = 0.5
"""Seconds after which an unanswered question is asked again."""
WAIT_S = 1.0
"""Most seconds for which consoles wait for the core's answer."""


class Succession:
    """Asks the core at the begin, and whenever one of its events is missing."""

    def __init__(
        self,
        follows: bool,
        events: EventLog,
        commands: CommandDesk,
        sessions: Sessions,
        recall: Callable[[Recall], None],
    ) -> None:
        """`follows`: another gateway of this engine was here before."""
        self._waiting = follows
        self._events, self._commands, self._sessions, self._recall = events, commands, sessions, recall
        self._adopted: list[str] | None = None
        self._begun: float | None = None
        self._asked = float("-inf")

    def turn(self, now: float) -> bool:
        """Ask what must be asked; return whether consoles can be served."""
        if self._waiting and self._adopted is None:
            self._adopted, self._begun = self._commands.adopt(), now
        if (self._waiting or self._events.lacks) and now - self._asked >= AGAIN_S:
            self._asked = now
            self._recall(Recall(after=self._events.core, commands=self._adopted or []))
        return not self._waiting or self._begun is None or now - self._begun > WAIT_S

    def take(self, answer: Recalled, now: float) -> None:
        """Enter the core's answer."""
        self._events.lacks = self._events.core < answer.newest
        self._commands.recalled(answer, now)
        self._sessions.expect(answer.attended, now)
        self._waiting, self._adopted = False, []
