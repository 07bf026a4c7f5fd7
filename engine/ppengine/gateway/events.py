"""The numbered events of one epoch: newest 10,000 for replay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

import msgspec

from ppengine.protocol.control import Replay, Replayed
from ppengine.protocol.snapshot import Event

KEPT = 10_000


class EventLog:
    """Numbers events from 1 without gaps and hands each to `publish` at once."""

    def __init__(self, publish: Callable[[Event], None], kept: int = KEPT) -> None:
        self._publish = publish
        self._ring: deque[Event] = deque(maxlen=kept)
        self.newest = 0

    @property
    def oldest(self) -> int:
        """Oldest sequence that can be replayed; one above the newest when there is none."""
        return self._ring[0].seq if self._ring else self.newest + 1

    def add(self, event: Event) -> Event:
        """Number `event`, keep and publish it."""
        self.newest += 1
        numbered = msgspec.structs.replace(event, seq=self.newest)
        self._ring.append(numbered)
        self._publish(numbered)
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
        first = max(question.after + 1, self.oldest)
        skip = first - self.oldest
        events = list(islice(self._ring, skip, max(skip, skip + until - first + 1)))
        # A reader that is ahead has seen another epoch.
        gone = (question.after + 1 < self.oldest and question.after < until) or question.after > self.newest
        return Replayed(nonce=question.nonce, events=events, newest=self.newest, gone=gone)
