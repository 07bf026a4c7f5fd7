"""The marked requests: verbs act on all of them, and on the selected one if there is none."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.snapshot import Snapshot


class Marked:
    """Requests by id, in the order of marking. The mark of a request that has ended, or is not listed, goes."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self.lost = False
        """Whether all marks went with their requests: until the next key no verb may hit the selected one instead."""

    def sync(self, snapshot: Snapshot | None) -> tuple[str, ...]:
        """Drop the marks of requests that have ended; return the others."""
        if self._ids and snapshot is not None:
            live = {request.id for request in snapshot.requests if request.state != "finished"}
            self._ids = {each: None for each in self._ids if each in live}
            self.lost = not self._ids
        return tuple(self._ids)

    def add(self, ids: Sequence[str]) -> None:
        """Mark requests."""
        self._ids |= dict.fromkeys(ids)
        self.lost = False

    def remove(self, ids: Sequence[str]) -> None:
        """Unmark requests."""
        for each in ids:
            self._ids.pop(each, None)

    def toggle(self, ids: Sequence[str]) -> None:
        """Mark all of `ids`; where all are marked, unmark them."""
        if set(ids) <= set(self._ids):
            self._ids = {each: None for each in self._ids if each not in set(ids)}
        else:
            self._ids |= dict.fromkeys(ids)
        self.lost = False

    def clear(self) -> None:
        """Unmark all."""
        self._ids, self.lost = {}, False
