"""The Clients screen: API keys and routes of the HTTP port, with their load, latencies and errors."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType

from ppconsole.screens.line_screen import verb_keys
from ppconsole.screens.reader import Reader
from ppconsole.view import clients_page
from ppconsole.view.cells import Row, row
from ppconsole.view.keys import Key, reader_keys


class ClientsScreen(Reader):
    """Everything comes with the snapshot."""

    topic: ClassVar[str] = "clients"
    keys: ClassVar[tuple[Key, ...]] = reader_keys((), None)
    BINDINGS: ClassVar[list[BindingType]] = verb_keys("memory", "engine")

    def heading(self) -> str:
        """Return the title."""
        return "CLIENTS"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "clients"

    def body(self, width: int) -> list[Row]:
        """Return a row a client."""
        snapshot = self.console.model.shown.snapshot
        if snapshot is None:
            return [row(("  waiting for the first sample", "dim"))]
        return clients_page.rows(snapshot.clients, width)
