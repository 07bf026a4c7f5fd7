"""The Finished screen: the newest thousand requests that have ended; Enter opens the details that are known."""

from __future__ import annotations

from typing import ClassVar

from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.inspection import FinishedDetail
from textual import events
from textual.binding import Binding, BindingType

from ppconsole.model.filters import Filter, FilterError
from ppconsole.model.request_fields import FINISHED_FIELDS, finished_filter
from ppconsole.model.safe import clean
from ppconsole.model.sorting import Order, arranged
from ppconsole.screens.console import Console
from ppconsole.screens.filter_line import FilterLine
from ppconsole.screens.line_screen import SORT_KEY, line_key, verb_keys
from ppconsole.screens.reader import Reader
from ppconsole.screens.request_screen import RequestScreen
from ppconsole.view import finished_table
from ppconsole.view.cells import Row, column_at, fit, place, row
from ppconsole.view.cursor import Cursor
from ppconsole.view.keys import FINISHED_FILTER_KEYS, FINISHED_KEYS, Key, footer
from ppconsole.widgets.lines import Lines

_ABOVE = 2
"""Rows above those of the table: the line of figures, and the titles."""


class FinishedScreen(FilterLine, Reader):
    """Asks for the list every two seconds. Its body is as tall as the screen: it has the rows in view alone."""

    topic: ClassVar[str] = "finished"
    every_s: ClassVar[float] = 2.0
    keys: ClassVar[tuple[Key, ...]] = FINISHED_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "show in detail", show=False),
        SORT_KEY,
        Binding("R", "reverse", "reverse", show=False),
        Binding("q,H", "leave", "back", show=False),
        line_key("slash", "filter"),
        *verb_keys("memory", "engine"),
    ]

    def __init__(self, console: Console, wanted: str = "") -> None:
        """`wanted`: its first filter."""
        super().__init__(console)
        self._known: FinishedDetail | None = None
        self._order = Order("ended")
        self._filter, self._typed, self._wrong = Filter(), "", ""
        """The newest filter that could be understood, the one that is typed, and why that one cannot be."""
        self._cursor: Cursor[finished_table.Key] = Cursor()
        self._moved = False
        """The operator chose a row; until then the first one is selected, whichever that is."""
        self.filter_by(wanted)

    def heading(self) -> str:
        """Return the title with the number of requests, and the filter."""
        total = 0 if self._known is None else len(self._known.requests)
        shown = len(self._arranged())
        return f"FINISHED {shown if shown == total else f'{shown}/{total}'}{f'  /{self._typed}' if self._typed else ''}"

    async def load(self) -> None:
        """Fetch the list."""
        answer = await self.console.source.inspect("finished")
        self._known = answer if isinstance(answer, FinishedDetail) else None

    def body(self, width: int) -> list[Row]:
        """Return the line of figures, the titles and the rows in view."""
        shown, height = self._arranged(), self._rows_in_view()
        if not self._moved:
            self._cursor.forget()
        selected = self._cursor.sync([finished_table.key_of(one) for one in shown])
        top = self._cursor.window(len(shown), height)
        place_text = f"{top + 1}-{min(len(shown), top + height)} of {len(shown)}" if len(shown) > height else ""
        snapshot = self.console.model.shown.snapshot
        lines = [finished_table.summary(self._known, snapshot, place_text, self.problem, width)]
        lines += finished_table.rows(shown, self._order, selected, width, top, height)
        return lines if shown else [*lines, finished_table.nothing(self._known, self.problem, width)]

    def _rows_in_view(self) -> int:
        return max(1, self.size.height - 2 - self.line.is_open - _ABOVE)

    def _arranged(self) -> list[FinishedInfo]:
        found = [] if self._known is None else [one for one in self._known.requests if self._filter.matches(one)]
        return arranged(found, self._order, FINISHED_FIELDS)

    # --- the selection ------------------------------------------------------------------------------------------

    def action_scroll(self, by: int) -> None:
        """Move the selection."""
        self._moved = True
        self._cursor.move([finished_table.key_of(one) for one in self._arranged()], by)
        self.paint()

    def action_page(self, by: int) -> None:
        """Move by a page."""
        self.action_scroll(by * max(1, self._rows_in_view() - 1))

    def action_ends(self, end: int) -> None:
        """Select the first or the last row."""
        number = len(self._arranged())
        self.action_scroll(number if end else -number)

    def on_click(self, event: events.Click) -> None:
        """Select a row; sort by a column title, and reverse the order at the next click."""
        board = self.query_one("#reader-body", Lines)
        if event.widget is not board:
            return
        at, shown = event.get_content_offset_capture(board), self._arranged()
        number = self._cursor.top + at.y - _ABOVE
        if at.y == _ABOVE - 1:
            column = column_at(place(finished_table.COLUMNS, self.size.width), at.x)
            if column in FINISHED_FIELDS:
                self.sort(column)
            return
        if at.y >= _ABOVE and number < len(shown):
            self._moved = True
            self._cursor.choose(finished_table.key_of(shown[number]))
        self.paint()

    def action_open(self) -> None:
        """Open the details of the selected request."""
        shown = self._arranged()
        selected = self._cursor.sync([finished_table.key_of(one) for one in shown])
        for one in shown:
            if finished_table.key_of(one) == selected:
                self.app.push_screen(RequestScreen(self.console, one.id, one))

    # --- order and filter ---------------------------------------------------------------------------------------

    def sort_columns(self) -> tuple[str, ...]:
        """Return the columns of the table."""
        return tuple(FINISHED_FIELDS)

    @property
    def order(self) -> Order:
        """The order of the table."""
        return self._order

    def sort(self, column: str) -> None:
        """Sort by a column."""
        self._order_by(self._order.by(column, FINISHED_FIELDS))

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._order_by(self._order.reversed())

    def _order_by(self, order: Order) -> None:
        """Show the first rows of an order: no verb acts here, so the selection need not stay on its request."""
        self._order, self._moved = order, False
        self.paint()

    @property
    def filter_text(self) -> str:
        """The newest filter as it is written."""
        return self._typed

    @property
    def filter_error(self) -> str:
        """Why it cannot be understood."""
        return self._wrong

    def filter_by(self, text: str) -> None:
        """Show the requests that match `text`; one that cannot be understood keeps the last filter that could."""
        self._typed, self._wrong, self._moved = text.strip(), "", False
        try:
            self._filter = finished_filter(text)
        except FilterError as error:
            self._wrong = str(error)

    def shows_none(self) -> bool:
        """Return whether no request is in the table."""
        return not self._arranged()

    def line_foot(self, width: int) -> Row | None:
        """Return the key line while the line is open; of a filter, why it cannot be understood."""
        if not self.line.is_open or self.line.mode != "filter":
            return super().line_foot(width)
        if error := self.line_error:
            return row((fit(error, width), "warn"))
        return footer(FINISHED_FILTER_KEYS, width, role=None)

    def action_dismiss_reader(self) -> None:
        """Clear the filter; without one, go back."""
        if self._typed:
            self.filter_by("")
            self.paint()
        else:
            super().action_dismiss_reader()

    def action_leave(self) -> None:
        """Go back, with a filter or without."""
        super().action_dismiss_reader()

    def action_copy_cli(self) -> None:
        """Copy the shell line that prints the same."""
        wanted = clean(self._filter.text)
        self.console.copying.command(["finished", *(["--filter", wanted] if wanted else [])])
