"""The selection: it belongs to an id, never to a position on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Id = TypeVar("Id")


class Cursor(Generic[Id]):
    """Follows one id through sorting, inserting and removing.

    When a chosen id disappears, nothing is selected until the next move: a verb must not
    hit the neighbour that took its place.
    """

    def __init__(self) -> None:
        self.id: Id | None = None
        self.index = 0
        self.top = 0
        self._chosen = False

    def sync(self, ids: Sequence[Id]) -> Id | None:
        """Find the id again among `ids` (in display order); return it, or None when it is gone."""
        if self.id in ids:
            self.index = ids.index(self.id)
            return self.id
        if not self._chosen:
            self.id, self.index = (ids[0], 0) if ids else (None, 0)
            return self.id
        return None

    def move(self, ids: Sequence[Id], delta: int) -> None:
        """Select the id `delta` positions further on; from one that is gone, begin at its former place."""
        if not ids:
            return
        if self.sync(ids) is None:
            delta = 0 if delta > 0 else delta
        self.index = max(0, min(len(ids) - 1, self.index + delta))
        self.id, self._chosen = ids[self.index], True

    def choose(self, value: Id) -> None:
        """Select `value`, whether it is listed yet or not."""
        self.id, self._chosen = value, True

    def forget(self) -> None:
        """Go back to the first row (after a new filter or a new epoch)."""
        self.id, self.index, self.top, self._chosen = None, 0, 0, False

    def window(self, total: int, height: int) -> int:
        """Return the first visible position so that the selection stays in view in `height` rows."""
        if self.index < self.top:
            self.top = self.index
        elif self.index >= self.top + height:
            self.top = self.index - height + 1
        self.top = max(0, min(self.top, total - height))
        return self.top
