"""Addresses of the edges of one generation, which stages on several nodes learn from the core."""

from __future__ import annotations

from ppengine.protocol.stage_lifecycle import EdgeAddress, EdgeSought

EDGES_MOST = 1024
"""More than an engine of 256 stages has; a stage cannot fill the memory of the core."""


class MeetingPoints:
    """Keeps the newest address of each edge, those of the newest generation alone."""

    def __init__(self) -> None:
        self._generation = 0
        self._known: dict[str, EdgeAddress] = {}

    def take(self, message: EdgeAddress) -> None:
        """Keep an address, unless it is of an older generation."""
        if message.generation > self._generation:
            self._generation = message.generation
            self._known.clear()
        if message.generation == self._generation and len(self._known) < EDGES_MOST:
            self._known[message.name] = message

    def find(self, message: EdgeSought) -> EdgeAddress | None:
        """Return the address that a stage asks for; None: it is not known yet, and the stage asks again."""
        known = self._known.get(message.name)
        return known if known is not None and known.generation == message.generation else None
