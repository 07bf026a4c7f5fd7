"""Questions for outputs that wait for an answer: more of a request, news of a session, or an end in a session."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ppengine.protocol.control import Fetch
from ppengine.protocol.offline import Follow
from ppengine.protocol.text_messages import ReadOutput

MAX_WAITING = 10_000
"""Most waiting questions; later ones are answered at once with the present output."""

Kind = Literal["more of", "news of", "end in"]
Topic = tuple[Kind, str]
"""The condition that a question waits for: a kind, and the name of a request or session."""
Question = Fetch | Follow | ReadOutput


@dataclass(slots=True)
class Waiter:
    """A question, and the time of the clock at which it is answered without news."""

    client: bytes
    question: Question
    deadline: float


class LongPolls:
    """Keeps the questions by their topics, and the topics that have changed since the last turn."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiters: dict[Topic, list[Waiter]] = {}
        self._count = 0
        self._earliest = math.inf
        """No deadline of a waiting question is before this."""
        self.changed: dict[Kind, set[str]] = {"more of": set(), "news of": set(), "end in": set()}
        """Names of topics by kind, since the last turn. A set of topics would take three times as long."""

    def waits(self, question: Question) -> bool:
        """Return whether a question without news may wait for some."""
        return question.wait_ms > 0 and self._count < MAX_WAITING

    def add(self, client: bytes, question: Question) -> None:
        """Let a question wait."""
        deadline = self._clock() + min(question.wait_ms, 60_000) / 1e3
        self._waiters.setdefault(_topic(question), []).append(Waiter(client, question, deadline))
        self._count += 1
        self._earliest = min(self._earliest, deadline)

    def replace(self, client: bytes, question: Question) -> None:
        """Drop the waiting question that this one continues."""
        waiters = self._waiters.pop(topic := _topic(question), [])
        self._keep(topic, waiters, [one for one in waiters if not _is_of(one, client, question.nonce)])

    def serve(self, answer: Callable[[Waiter, bool], bool], *, every: bool) -> None:
        """Answer the questions whose topic has changed or whose time is over, and `every` one if so.

        `answer` takes a question and whether it is the last time, and returns whether the question has ended.
        """
        now = self._clock()
        every = every or now >= self._earliest
        topics = list(self._waiters) if every else self._due()
        for names in self.changed.values():
            names.clear()
        for topic in topics:
            waiters = self._waiters.pop(topic)
            self._keep(topic, waiters, [waiter for waiter in waiters if not answer(waiter, now >= waiter.deadline)])
        if every:
            deadlines = (waiter.deadline for waiters in self._waiters.values() for waiter in waiters)
            self._earliest = min(deadlines, default=math.inf)

    @property
    def next_deadline(self) -> float | None:
        """A time of the clock before which no question times out; None if none waits."""
        return self._earliest if self._waiters else None

    def _keep(self, topic: Topic, before: list[Waiter], left: list[Waiter]) -> None:
        self._count -= len(before) - len(left)
        if left:
            self._waiters[topic] = left

    def _due(self) -> list[Topic]:
        """Return the topics of waiting questions that have changed, by a look at the fewer of both."""
        waiters, changed = self._waiters, self.changed
        if sum(map(len, changed.values())) < len(waiters):
            topics = ((kind, name) for kind, names in changed.items() for name in names)
            return [topic for topic in topics if topic in waiters]
        return [topic for topic in waiters if topic[1] in changed[topic[0]]]


def _is_of(waiter: Waiter, client: bytes, nonce: int) -> bool:
    return waiter.client == client and waiter.question.nonce == nonce


def _topic(question: Question) -> Topic:
    if not isinstance(question, Follow):
        return "more of", question.request
    return ("end in" if question.finished_only else "news of"), question.session
