"""The numbered events of one epoch: newest 10,000 for replay, and newest 1,000 warnings and errors.

Another gateway goes on with them, from their journal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from ppengine.gateway.event_journal import Entry, EventJournal
from ppengine.protocol.control import Replay, Replayed
from ppengine.protocol.reports import Happened
from ppengine.protocol.severity import is_at_least
from ppengine.protocol.snapshot import Event

KEPT, WARNINGS_KEPT = 10_000, 1000


class EventLog:
    """Numbers events from 1 without gaps and hands each to `publish` at once."""

    def __init__(self, publish: Callable[[Event], None], kept: int = KEPT, journal: EventJournal | None = None) -> None:
        self._publish, self._journal = publish, journal
        before: list[Entry] = []
        if journal is not None:
            before, journal.restored = journal.restored, before
        self._ring: deque[Event] = deque((entry.event for entry in before), maxlen=kept)
        self._warnings: deque[Event] = deque(filter(_warns, self._ring), maxlen=WARNINGS_KEPT)
        """Warnings and errors: under load, ends of requests fill the ring in half a minute."""
        self.newest = self._ring[-1].seq if self._ring else 0
        self.core = before[-1].core if before else 0
        """The core's own number of the newest event of the core."""
        self.lacks = False
        """The core has pushed an event that does not follow upon the newest one."""

    @property
    def oldest(self) -> int:
        """Oldest sequence that can be replayed; one above the newest when there is none."""
        return self._ring[0].seq if self._ring else self.newest + 1

    def add(self, event: Event) -> Event:
        """Number `event`, keep and publish it."""
        return self._enter([event])[0]

    def take(self, happened: Happened) -> None:
        """Add events of the core, each once; those after a gap are left out, for the core pushes them again."""
        if happened.first > max(self.core + 1, happened.oldest):
            self.lacks = True
            return
        fresh = happened.events[max(0, self.core + 1 - happened.first) :]
        if fresh:
            self.core = happened.first + len(happened.events) - 1
            self._enter(fresh, self.core - len(fresh) + 1)

    def has(self, kind: str, text: str) -> bool:
        """Return whether there is such an event among the newest."""
        return any(event.kind == kind and event.text == text for event in self._ring)

    def _enter(self, events: Sequence[Event], core: int = 0) -> list[Event]:
        """Number, write, keep and publish events; `core` is the core's number of the first, 0 if they are not its."""
        numbered = [
            msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(events, self.newest + 1)
        ]  # fmt: skip
        if self._journal is not None:
            self._journal.write([Entry(event, core + k if core else self.core) for k, event in enumerate(numbered)])
        self.newest += len(numbered)
        self._ring.extend(numbered)
        self._warnings.extend(filter(_warns, numbered))
        for event in numbered:
            self._publish(event)
        return numbered

    def say(self, kind: str, text: str, *, by: str = "", stage: int | None = None, op: str | None = None,
            request: str | None = None, step: int | None = None) -> Event:  # fmt: skip
        """Add an event of the gateway's own."""
        return self.add(
            Event(seq=0, wall=time.time(), kind=kind, text=text, by=by, stage=stage, op=op, request=request, step=step)
        )

    def replay(self, question: Replay) -> Replayed:
        """Return the requested events; `gone` if part of them has left the ring."""
        until = self.newest if question.until is None else min(question.until, self.newest)
        if question.level is not None:
            return Replayed(nonce=question.nonce, events=self._of_level(question, until), newest=self.newest)
        first = max(question.after + 1, self.oldest)
        skip = first - self.oldest
        events = list(islice(self._ring, skip, max(skip, skip + until - first + 1)))
        # A reader that is ahead has seen another epoch.
        gone = (question.after + 1 < self.oldest and question.after < until) or question.after > self.newest
        return Replayed(nonce=question.nonce, events=events, newest=self.newest, gone=gone)

    def _of_level(self, question: Replay, until: int) -> list[Event]:
        """Return the newest events of a level and above, also those that have left the ring."""
        level = question.level or "info"
        kept = self._ring if level == "info" else self._warnings
        found = [event for event in kept if question.after < event.seq <= until and is_at_least(event, level)]
        return found if question.most is None else found[max(0, len(found) - max(0, question.most)) :]


def _warns(event: Event) -> bool:
    """Return whether an event is a warning or an error."""
    return is_at_least(event, "warning")
