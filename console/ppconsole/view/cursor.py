"""The selection: it belongs to an id, never to a position on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Id = TypeVar("Id")


class Cursor(Generic[Id]):
    """Follows one id through sorting, inserting and removing.

    When a chosen id disappears or ends, the one that took its place is selected, and `lost` has the old one.
    """

    def __init__(self) -> None:
        self.id: Id | None = None
        self.index = 0
        self.top = 0
        self.lost: Id | None = None
        """The chosen id that disappeared or ended, until the next choice."""
        self._chosen = False
        self._listed = False
        """Whether the chosen id has been listed."""
        self._before: Sequence[Id] = ()
        """The live ids of the last look."""

    def sync(self, ids: Sequence[Id], live: int | None = None) -> Id | None:
        """Find the id again among `ids` (in display order); return the selected one, None if there is none.

        Before a choice the first one is selected. `live`: the number of ids before those that have ended; None: all.
        An id that ends is followed no further; one that had ended when it was chosen is.
        """
        alive = ids[:live]
        before, self._before = self._before, alive
        has_ended = bool(alive) and self.id in before and self.id not in alive
        if self.id in ids and not has_ended:
            self.index, self._listed = ids.index(self.id), True
            return self.id
        if not self._chosen:
            self.id, self.index = (ids[0], 0) if ids else (None, 0)
            return self.id
        if not self._listed or not ids:
            return None
        self.lost = self.id
        self.id = self._successor(before, alive or ids)
        self.index = ids.index(self.id)
        return self.id

    def _successor(self, before: Sequence[Id], ids: Sequence[Id]) -> Id:
        """Return the first id behind the lost one that is still listed; without one, the last before it."""
        left = set(ids)
        nearest = (*before[self.index :], *reversed(before[: self.index]))
        return next((each for each in nearest if each in left), ids[-1])

    def move(self, ids: Sequence[Id], delta: int, live: int | None = None) -> None:
        """Select the id `delta` positions further on; from one that is not listed, begin at its former place."""
        if not ids:
            return
        if self.sync(ids, live) is None:
            delta = 0 if delta > 0 else delta
        self.index = max(0, min(len(ids) - 1, self.index + delta))
        self.choose(ids[self.index])
        self._listed = True

    def choose(self, value: Id) -> None:
        """Select `value`, whether it is listed yet or not."""
        self.id, self._chosen, self._listed, self.lost = value, True, False, None

    def forget(self) -> None:
        """Go back to the first row (after a new filter or a new epoch)."""
        self.id, self.index, self.top = None, 0, 0
        self._chosen, self._listed, self.lost = False, False, None

    def window(self, total: int, height: int) -> int:
        """Return the first visible position so that the selection stays in view in `height` rows."""
        if self.index < self.top:
            self.top = self.index
        elif self.index >= self.top + height:
            self.top = self.index - height + 1
        self.top = max(0, min(self.top, total - height))
        return self.top
