"""Connections that broke between two live stages: evidence for the diagnosis.

The core repairs such a failure by a new generation within a moment; this record lets the diagnosis report it.
"""

from __future__ import annotations

from collections.abc import Callable

from ppengine.protocol.reports import WireLoss


class LinkFailures:
    """The newest failure. A report of a stage about its peer becomes one if neither process has ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unconfirmed: WireLoss | None = None
        self._reported_at = 0.0
        self._newest: WireLoss | None = None
        self._since = self._healed_at = 0.0

    def reported(self, stage: int, peer: int, text: str, *, closed: bool) -> None:
        """Note the report of `stage` about its connection to `peer`; the first report explains later ones."""
        if self._unconfirmed is None:
            self._unconfirmed = WireLoss(stage=stage, peer=peer, text=text, closed=closed)
            self._reported_at = self._clock()

    def explain(self, stage: int) -> None:
        """Drop a failure at one of whose ends is `stage`: its process ended, and the connection with it."""
        self.drop()
        if self._newest is not None and stage in (self._newest.stage, self._newest.peer):
            self._newest = None

    def drop(self) -> None:
        """Drop the unconfirmed report."""
        self._unconfirmed = None

    def confirm(self) -> None:
        """Take the unconfirmed report for a failure: no process has ended in time."""
        if self._unconfirmed is not None:
            self._newest, self._since, self._healed_at = self._unconfirmed, self._reported_at, 0.0
            self._unconfirmed = None

    def heal(self, recomputed: int) -> None:
        """Note that all stages have met again, and how many requests are recomputed."""
        self.drop()
        if self._newest is not None and not self._healed_at:
            self._healed_at = self._clock()
            self._newest.recomputed = recomputed

    def report(self) -> list[WireLoss]:
        """Return the newest failure with its ages; the diagnosis decides for how long it is news."""
        failure, now = self._newest, self._clock()
        if failure is None:
            return []
        failure.since_s = now - self._since
        failure.healed_s = now - self._healed_at if self._healed_at else None
        return [failure]
