"""The core's events and facts on their way to the gateway, kept so that another gateway can have them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from ppengine.protocol.facts import Fact
from ppengine.protocol.reports import Happened
from ppengine.protocol.snapshot import Event

KEPT, FACTS_KEPT = 10_000, 1000
GAP = 2**32
"""Numbers that are left out behind a journal that could not be read; the gateway goes on behind such a gap."""
_PORTION = 1000
"""Most events in one message."""


class EventFeed:
    """Numbers the core's events from 1."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._facts: deque[Fact] = deque(maxlen=FACTS_KEPT)
        self._pushed = 0
        self.newest = 0

    def add(self, event: Event) -> int:
        """Number an event; return its number."""
        self.newest += 1
        self._events.append(event)
        return self.newest

    def restore(self, events: dict[int, Event], facts: Iterable[Fact], *, whole: bool) -> None:
        """Go on with the events and facts of the core before this one. Those behind a gap in the numbers are kept.

        Without the `whole` journal some numbers may be used that it does not have: this one begins far behind.
        """
        self._facts.extend(facts)
        for number in sorted(events):
            if number != self.newest + 1:
                self._events.clear()
            self._events.append(events[number])
            self.newest = number
        if not whole:
            self._events.clear()
            self.newest += GAP
        # The gateway may lack the last ones, and drops those that it has.
        self._pushed = self.newest - len(self._events)

    def kept(self, most: int) -> list[tuple[int, Event]]:
        """Return the newest `most` events with their numbers."""
        first = max(0, len(self._events) - most)
        oldest = self.newest - len(self._events) + 1
        return [(oldest + place, event) for place, event in enumerate(islice(self._events, first, None), first)]

    def keep(self, fact: Fact) -> None:
        """Keep a fact that is pushed."""
        self._facts.append(fact)

    def pending(self) -> list[Happened]:
        """Return the events that were not pushed yet."""
        after, self._pushed = self._pushed, self.newest
        return self.after(after)

    def after(self, number: int) -> list[Happened]:
        """Return the kept events with a number above `number`."""
        oldest = self.newest - len(self._events) + 1
        first = max(oldest, number + 1)
        events = list(islice(self._events, first - oldest, None))
        return [
            Happened(events=events[at : at + _PORTION], first=first + at, oldest=oldest)
            for at in range(0, len(events), _PORTION)
        ]

    def facts(self) -> list[Fact]:
        """Return the kept facts, the oldest first."""
        return list(self._facts)
