"""Collecting what a source delivers, and waiting for it with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ppconsole.link.attachment import Timing
from ppengine.protocol.recording import LinkState, Update
from ppengine.protocol.snapshot import Event, Snapshot

FAST = Timing(
    ping_s=0.1, stale_s=0.4, lost_s=1.0, hello_s=0.5, ask_s=2.0, jitter_s=0.02, backoff_s=0.05, backoff_cap_s=0.2
)


class Seen:
    """The updates so far; give `take` to `Source.start`."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def take(self, update: Update) -> None:
        self.updates.append(update)

    @property
    def states(self) -> list[str]:
        """Link states without repeats."""
        names = [update.state for update in self.updates if isinstance(update, LinkState)]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]

    @property
    def texts(self) -> list[str]:
        return [update.text for update in self.updates if isinstance(update, LinkState)]

    @property
    def events(self) -> list[Event]:
        return [update for update in self.updates if isinstance(update, Event)]

    @property
    def snapshots(self) -> list[Snapshot]:
        return [update for update in self.updates if isinstance(update, Snapshot)]

    async def until(self, reached: Callable[[Seen], bool], seconds: float = 60.0) -> None:
        """Wait until `reached(self)`; fail after `seconds` with what was seen."""
        deadline = time.monotonic() + seconds
        while not reached(self):
            assert time.monotonic() < deadline, f"not reached: {self.states} {self.texts} {len(self.events)} events"
            await asyncio.sleep(0.01)
