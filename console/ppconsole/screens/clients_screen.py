"""The Clients screen: API keys and routes of the HTTP port, with their load, latencies and errors; verbs on a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ppengine.protocol.clients import ClientInfo
from textual.binding import Binding, BindingType

from ppconsole.model.filters import quoted
from ppconsole.screens.console import Console, Selected
from ppconsole.screens.line_screen import verb_keys
from ppconsole.screens.reader import Reader
from ppconsole.view import clients_page
from ppconsole.view.cells import Row, row
from ppconsole.view.cursor import Cursor
from ppconsole.view.keys import CLIENTS_KEYS, Key


class ClientsScreen(Reader):
    """Everything comes with the snapshot. All rows of the selected key are marked, as verbs act on the key."""

    topic: ClassVar[str] = "clients"
    keys: ClassVar[tuple[Key, ...]] = CLIENTS_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "requests", "requests of the key", show=False),
        *verb_keys("client", "memory", "engine"),
    ]

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._cursor: Cursor[str] = Cursor()

    def heading(self) -> str:
        """Return the title."""
        return "CLIENTS"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "clients"

    def selected(self) -> Selected:
        """Return the selected key."""
        return Selected(client=self._cursor.sync(_keys(self._clients())))

    def body(self, width: int) -> list[Row]:
        """Return a row a client."""
        snapshot = self.console.model.shown.snapshot
        if snapshot is None:
            return [row(("  waiting for the first sample", "dim"))]
        found = clients_page.rows(snapshot.clients, width, self.selected().client)
        return [*found, *clients_page.slo_rows(snapshot.latency, width)]

    def action_scroll(self, by: int) -> None:
        """Move the selection, and the rows with it as far as needed."""
        clients = self._clients()
        self._cursor.move(_keys(clients), by)
        at = clients_page.row_of(clients, self._cursor.id)
        self.scroll_to_row(self.top_for(at))

    def action_requests(self) -> None:
        """Show the live requests of the selected key on the main screen."""
        if client := self.selected().client:
            self.console.model.set_filter(f"client={quoted(client)}")
            self.action_dismiss_reader()

    def _clients(self) -> Sequence[ClientInfo]:
        snapshot = self.console.model.shown.snapshot
        return [] if snapshot is None else snapshot.clients


def _keys(clients: Sequence[ClientInfo]) -> list[str]:
    """Return the names of the keys, in the order of their first rows."""
    return list(dict.fromkeys(client.key for client in clients))
