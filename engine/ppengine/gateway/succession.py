"""The begin of a gateway or of a core that replaces another one: the gateway asks the core for all that it lacks.

Until the answer to a new gateway is there it takes no message of a console; they wait in their sockets. A core that is
stopped delays that for a moment only. While a core is restarted, commands and questions wait in the gateway.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ppengine.gateway.commands import CommandDesk
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.sessions import Sessions
from ppengine.protocol.reports import Recall, Recalled

AGAIN_S, AGAIN_MOST_S = 0.5, 8.0
"""Seconds after which an unanswered question is asked again, doubled each time up to the second number.

A question is lost with the core that had it. Those to one that boots wait in its socket, and the first one counts.
"""
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
        recall: Callable[[Recall], bool],
        core_back: Callable[[], None] = lambda: None,
    ) -> None:
        """`follows`: another gateway of this engine was here before. `core_back`: another core has answered."""
        self._waiting = follows
        self._events, self._commands, self._sessions, self._recall = events, commands, sessions, recall
        self._adopted: list[str] | None = None
        self._begun: float | None = None
        self._ask_at, self._again_s = float("-inf"), AGAIN_S
        self._core_back = core_back
        self._gone: int | None = None
        """Pid of the core that ended and whose successor has not answered."""
        self._answered = 0
        """Pid of the core that answered last."""

    def turn(self, now: float) -> bool:
        """Ask what must be asked; return whether consoles can be served."""
        if self._waiting and self._adopted is None:
            self._adopted, self._begun = self._commands.adopt(), now
        if (self._waiting or self._events.lacks or self.core_away) and now >= self._ask_at:
            known = self._adopted or [] if self._gone is None else self._commands.open()
            if self._recall(Recall(after=self._events.core, commands=known)):
                self._ask_at = now + self._again_s
                self._again_s = min(2 * self._again_s, AGAIN_MOST_S)
        return not self._waiting or self._begun is None or now - self._begun > WAIT_S

    @property
    def core_away(self) -> bool:
        """Whether a core has ended and its successor has not answered."""
        return self._gone is not None

    def core_ended(self, pid: int) -> None:
        """Note that the core with `pid` has ended and that another one follows."""
        self._gone, self._ask_at, self._again_s = pid, float("-inf"), AGAIN_S

    def take(self, answer: Recalled, now: float) -> None:
        """Enter the core's answer."""
        if answer.pid and answer.pid == self._gone:
            return
        self._again_s = AGAIN_S
        self._events.lacks = self._events.core < answer.newest
        if answer.pid and answer.pid == self._answered:
            # A core that boots slowly is asked several times. What the first answer lacked has been sent since.
            answer = msgspec.structs.replace(answer, unknown=[])
        self._answered = answer.pid
        self._commands.recalled(answer, now)
        self._sessions.expect(answer.attended, now)
        self._waiting, self._adopted = False, []
        if self.core_away:
            self._gone = None
            self._core_back()
