"""The menu of `S`: the letter of a column sorts the table by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from ppconsole.model.request_fields import LETTERS
from ppconsole.model.sorting import Order
from ppconsole.screens.confirm import MAX_WIDTH
from ppconsole.view import sort_menu
from ppconsole.widgets.lines import Lines

_FRAME = 6
"""Cells beside the rows: border, padding, and a margin."""


class SortPicker(ModalScreen[str | None]):
    """Returns the chosen column, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,S", "dismiss(None)", "cancel", show=False),
        Binding("up", "move(-1)", "up", show=False), Binding("down,tab", "move(1)", "down", show=False),
        Binding("enter", "choose", "sort", show=False), Binding("R", "reverse", "reverse", show=False),
    ]  # fmt: skip

    def __init__(self, columns: Sequence[str], order: Order) -> None:
        super().__init__()
        self._columns, self._order = tuple(columns), order
        self._letters = {LETTERS[column]: column for column in self._columns}
        self._at = self._columns.index(order.column) if order.column in self._columns else 0

    def compose(self) -> ComposeResult:
        """Yield the rows."""
        with Vertical(id="dialog"):
            yield Lines(id="dialog-body")

    def on_mount(self) -> None:
        """Show the menu."""
        self.paint()

    def on_resize(self) -> None:
        """Fit the new size."""
        self.paint()

    def paint(self) -> None:
        """Show the columns."""
        if not self.is_mounted:
            return
        size = self.app.size
        width = min(MAX_WIDTH, size.width - _FRAME)
        rows = sort_menu.rows(self._columns, self._order, self._at, width, size.height - 4)
        self.query_one("#dialog").styles.width = width + 4
        board = self.query_one("#dialog-body", Lines)
        board.styles.height = len(rows)
        board.show(rows)

    def on_key(self, event: events.Key) -> None:
        """Sort by the column of a letter."""
        if event.character in self._letters:
            event.stop()
            self.dismiss(self._letters[event.character])

    def action_move(self, by: int) -> None:
        """Select another column."""
        self._at = (self._at + by) % len(self._columns)
        self.paint()

    def action_choose(self) -> None:
        """Sort by the selected column."""
        self.dismiss(self._columns[self._at])

    def action_reverse(self) -> None:
        """Reverse the present order."""
        self.dismiss(self._order.column)
