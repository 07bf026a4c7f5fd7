"""The Tiers screen and one backend of it: where KV blocks are kept, and verbs on backends."""

from __future__ import annotations

from typing import ClassVar

from ppengine.protocol.snapshot import Snapshot
from textual.binding import Binding, BindingType

from ppconsole.model.tier_rates import HostMeter
from ppconsole.screens.console import Console, Selected
from ppconsole.screens.line_screen import verb_keys
from ppconsole.screens.reader import Reader
from ppconsole.view import backend_detail, tiers_page
from ppconsole.view.cells import Row, row
from ppconsole.view.cursor import Cursor
from ppconsole.view.keys import BACKEND_KEYS, TIERS_KEYS, Key


class TiersScreen(Reader):
    """Everything comes with the snapshot. Both rows of the selected backend are marked."""

    topic: ClassVar[str] = "tiers"
    keys: ClassVar[tuple[Key, ...]] = TIERS_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "show_backend", "the backend in full", show=False),
        *verb_keys("backend", "memory", "engine"),
    ]

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._cursor: Cursor[str] = Cursor()
        self._meter = HostMeter()

    def heading(self) -> str:
        """Return the title."""
        return "TIERS"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "store ls"

    def selected(self) -> Selected:
        """Return the selected backend."""
        return Selected(backend=self._cursor.sync(_names(self._snapshot())))

    def body(self, width: int) -> list[Row]:
        """Return tiers, backends and stores."""
        snapshot = self._snapshot()
        rates = None if snapshot is None else self._meter.note(snapshot)
        return tiers_page.rows(snapshot, width, self.selected().backend, rates)

    def action_scroll(self, by: int) -> None:
        """Move the selection, and the rows with it as far as needed."""
        snapshot = self._snapshot()
        self._cursor.move(_names(snapshot), by)
        at = tiers_page.row_of(snapshot.tiers, self._cursor.id) if snapshot and snapshot.tiers else 0
        self.scroll_to_row(self.top_for(at))

    def action_show_backend(self) -> None:
        """Show the selected backend in full."""
        if name := self.selected().backend:
            self.app.push_screen(BackendScreen(self.console, name))

    def _snapshot(self) -> Snapshot | None:
        return self.console.model.shown.snapshot


class BackendScreen(Reader):
    """One backend: all figures, its stores, its events."""

    topic: ClassVar[str] = "backend"
    keys: ClassVar[tuple[Key, ...]] = BACKEND_KEYS
    BINDINGS: ClassVar[list[BindingType]] = verb_keys("backend", "memory", "engine")

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(console)
        self._backend = name

    def heading(self) -> str:
        """Return the title."""
        return f"BACKEND {self._backend}"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "store ls"

    def selected(self) -> Selected:
        """Return the backend, while it is there."""
        known = self._backend in _names(self.console.model.shown.snapshot)
        return Selected(backend=self._backend if known else None)

    def body(self, width: int) -> list[Row]:
        """Return everything that is known about it."""
        shown = self.console.model.shown
        found = backend_detail.rows(shown.snapshot, self._backend, shown.events, width) if shown.snapshot else []
        return found or [row((f"  backend {self._backend} is not in the engine any more", "warn"))]


def _names(snapshot: Snapshot | None) -> list[str]:
    return [] if snapshot is None or snapshot.tiers is None else [each.name for each in snapshot.tiers.backends]
