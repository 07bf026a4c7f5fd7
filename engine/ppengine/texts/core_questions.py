"""Questions to the core on `front`, asked again until they are answered: a core may be restarted meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.text_messages import OutputPart, ReadOutput

AGAIN_S = 2.5
"""Seconds after which a question without an answer is repeated."""
LOOK_S = 0.25
"""Seconds between two looks for such questions: turns come a thousand times a second."""
ANSWER_S = 10.0
"""Seconds after the wait of a question for which it is repeated: its console is answered by the gateway then."""

Question = ReadOutput | Inspect
Answer = OutputPart | Inspected | Failed


@dataclass(slots=True)
class _Asked:
    question: Question
    take: Callable[[Answer], None]
    until: float
    asked_at: float


class CoreQuestions:
    """Each question has a number and one answer. `send` sends a message to the core."""

    answer_s = ANSWER_S

    def __init__(self, send: Callable[[msgspec.Struct], None], clock: Callable[[], float]) -> None:
        self.send, self._clock = send, clock
        # A successor must not repeat the numbers of this process.
        self._count = secrets.randbits(48)
        self._asked: dict[int, _Asked] = {}
        self._look_at = 0.0
        """Time of the next look at open questions."""

    def number(self) -> int:
        """Return a number for a question."""
        self._count += 1
        return self._count

    def ask(self, question: Question, take: Callable[[Answer], None], until: float) -> None:
        """Ask a question; `take` gets the answer. It is repeated `until` that time of the clock."""
        now = self._clock()
        self._asked[question.nonce] = _Asked(question, take, until, now)
        self.send(question)

    def take(self, answer: Answer) -> None:
        """Give an answer to the one who waits for it."""
        asked = self._asked.pop(answer.nonce, None)
        if asked is not None:
            asked.take(answer)

    def turn(self) -> None:
        """Repeat questions without an answer, and drop those that are over their time."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for nonce, asked in list(self._asked.items()):
            if now > asked.until:
                del self._asked[nonce]
            elif now - asked.asked_at > AGAIN_S:
                asked.asked_at = now
                self.send(asked.question)

    @property
    def open_count(self) -> int:
        """Number of open questions."""
        return len(self._asked)
