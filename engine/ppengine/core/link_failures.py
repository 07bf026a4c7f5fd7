"""Wires that broke between two stages of which neither process ended: evidence for the diagnosis.

Such a loss is healed by a new generation within a moment, and but for this memory nobody would ever read of it.
"""

from __future__ import annotations

from collections.abc import Callable

from ppengine.protocol.reports import WireLoss


class Losses:
    """Keeps the newest loss. What a stage says of its peer is a loss once no process turns out to have ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: WireLoss | None = None
        self._heard_at = 0.0
        self._newest: WireLoss | None = None
        self._since = self._healed_at = 0.0

    def heard(self, stage: int, peer: int, text: str, *, closed: bool) -> None:
        """Note what `stage` says of its wire to `peer`; the first word explains those that follow."""
        if self._heard is None:
            self._heard = WireLoss(stage=stage, peer=peer, text=text, closed=closed)
            self._heard_at = self._clock()

    def explain(self, *stages: int) -> None:
        """Forget a loss between whose ends is one of `stages`: its process ended, and the wire with it."""
        self.drop()
        if self._newest is not None and {self._newest.stage, self._newest.peer} & set(stages):
            self._newest = None

    def drop(self) -> None:
        """Forget what was heard and is no loss yet."""
        self._heard = None

    def confirm(self) -> None:
        """Take what was heard for a loss: its wire is left, and no process has ended."""
        if self._heard is not None:
            self._newest, self._since, self._healed_at = self._heard, self._heard_at, 0.0
            self._heard = None

    def heal(self, recomputed: int) -> None:
        """All stages have met again."""
        self.drop()
        if self._newest is not None and not self._healed_at:
            self._healed_at = self._clock()
            self._newest.recomputed = recomputed

    def report(self) -> list[WireLoss]:
        """Return the newest loss with its ages; the diagnosis knows for how long it is news."""
        loss, now = self._newest, self._clock()
        if loss is None:
            return []
        loss.since_s = now - self._since
        loss.healed_s = now - self._healed_at if self._healed_at else None
        return [loss]
