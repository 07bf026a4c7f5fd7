"""The Topology screen: places, their neighbours, the ways of messages, and cards with their links."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType

from ppconsole.model.topology import topology_of
from ppconsole.screens.line_screen import verb_keys
from ppconsole.screens.reader import Reader
from ppconsole.view import topology_page
from ppconsole.view.cells import Row, row
from ppconsole.view.keys import Key, reader_keys
from ppconsole.view.marks import faulty_places


class TopologyScreen(Reader):
    """Everything comes with the snapshot."""

    topic: ClassVar[str] = "topology"
    keys: ClassVar[tuple[Key, ...]] = reader_keys((), None)
    BINDINGS: ClassVar[list[BindingType]] = verb_keys("memory", "engine")

    def heading(self) -> str:
        """Return the title."""
        return "TOPOLOGY"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "topology"

    def body(self, width: int) -> list[Row]:
        """Return places, ways and cards."""
        snapshot = self.console.model.shown.snapshot
        if snapshot is None:
            return [row(("  waiting for the first sample", "dim"))]
        return topology_page.rows(topology_of(snapshot), width, faulty_places(snapshot))
