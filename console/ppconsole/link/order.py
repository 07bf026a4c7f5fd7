"""Events in order: hold early events, report missing ones, drop repeated ones."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.snapshot import Event


class EventOrder:
    """Delivers each event of one epoch once and in order. `last` is the newest sequence delivered."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self._held: dict[int, Event] = {}

    @property
    def missing(self) -> tuple[int, int] | None:
        """(after, until): the range `after < seq <= until` that must be replayed before held events can go."""
        return (self.last, min(self._held) - 1) if self._held else None

    def take(self, event: Event) -> list[Event]:
        """Return the events that `event` completes; empty when it is old or has a gap before it."""
        if event.seq > self.last:
            self._held[event.seq] = event
        return self._ready()

    def fill(self, events: Sequence[Event], newest: int) -> list[Event]:
        """Take a replay up to `newest`; events that are still missing are lost and reported as a `link.gap`."""
        for event in events:
            if event.seq > self.last:
                self._held[event.seq] = event
        ready = self._ready()
        while self._held and min(self._held) - 1 <= newest:
            ready += self._skip_to(min(self._held))
        if self.last < newest:
            ready.append(_gap(self.last + 1, newest))
            self.last = newest
        return ready

    def _skip_to(self, seq: int) -> list[Event]:
        gap = _gap(self.last + 1, seq - 1)
        self.last = seq - 1
        return [gap, *self._ready()]

    def _ready(self) -> list[Event]:
        ready = []
        while self.last + 1 in self._held:
            self.last += 1
            ready.append(self._held.pop(self.last))
        return ready


def _gap(first: int, last: int) -> Event:
    text = f"events {first} to {last} had left the engine's ring before they were read"
    return Event(seq=last, wall=0.0, kind="link.gap", text=text)
