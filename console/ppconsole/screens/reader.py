"""A screen that shows rows to read: title, scrolling body, keys. Details, stacks, logs, events and help are such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.worker import Worker

from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.model.safe import clean
from ppconsole.screens.console import Console
from ppconsole.screens.line_screen import SCREEN_KEYS, LineScreen, line_key
from ppconsole.view import search
from ppconsole.view.cells import EMPTY, Row, Seg, spread, width_of
from ppconsole.view.keys import READER_KEYS, Key, footer
from ppconsole.widgets.lines import Lines
from ppconsole.widgets.note_strip import NoteStrip
from ppconsole.widgets.prompt import Mode

WHEEL = 3
"""Rows that a turn of the wheel scrolls."""
_MOVED_S = 0.5
"""Seconds by which the position in a past must have moved for the next load."""
SEARCHED_WIDTH = 1000
"""Rows are searched in this width, so that the part of a row that does not fit is searched, too."""


class Reader(LineScreen):
    """Shows `body()`; loads by `load()` when it opens and then every `every_s` seconds (0: never again)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss_reader", "back", show=False),
        Binding("up,k", "scroll(-1)", "up", show=False),
        Binding("down,j", "scroll(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown,space", "page(1)", "page down", show=False),
        Binding("g,home", "ends(0)", "first", show=False),
        Binding("G,end", "ends(1)", "last", show=False),
        Binding("question_mark", "help", "help", show=False),
        line_key("colon", "command"),
        line_key("slash", "search"),
        Binding("n", "find(1)", "next match", show=False),
        Binding("N", "find(-1)", "previous match", show=False),
        Binding("y", "copy_cli", "copy the CLI line", show=False),
        *SCREEN_KEYS,
    ]
    topic: ClassVar[str] = ""
    """The screen's name in the legend."""
    every_s: ClassVar[float] = 0.0
    follows_end: ClassVar[bool] = False
    follows_position: ClassVar[bool] = False
    """It loads again when the position in a past moves."""
    names_fault: ClassVar[bool] = True
    """The title names the fault; otherwise the body does."""
    keys: ClassVar[tuple[Key, ...]] = READER_KEYS

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.problem = ""
        self._wanted = ""
        """The text that is searched."""
        self._match = -1
        """The row of the match that was gone to."""
        self._top = 0
        self._at_end = self.follows_end
        self._height = 1
        self._total = 0
        self._loading: Worker[None] | None = None
        self._painted: Size | None = None
        """Size at the newest paint; None: the screen was not seen yet."""
        self.loaded_at: float | None = None
        """Position in the past at the newest load, in Unix seconds; None: this is no past."""

    def heading(self) -> str:
        """Return the title."""
        return ""

    def cli(self) -> str:
        """Return the CLI words that show the same; empty when there are none."""
        return ""

    def shown_keys(self) -> tuple[Key, ...]:
        """Return the keys that do something now."""
        return self.keys

    def body(self, width: int) -> list[Row]:
        """Return all rows."""
        return []

    async def load(self) -> None:
        """Fetch details that the snapshot lacks. LinkLost and QueryFailed become `problem`."""

    def compose(self) -> ComposeResult:
        """Title, body, line, keys."""
        yield Lines(id="reader-title", classes="one")
        yield Lines(id="reader-body")
        yield NoteStrip()
        yield self.made_line("hidden")
        yield Lines(id="reader-foot", classes="one")

    def on_mount(self) -> None:
        """Load now and by the clock, while this screen is the one that is seen."""
        self._composed = True
        self.start_load()
        if self.every_s:
            self.set_interval(self.every_s, self.start_load)

    def start_load(self) -> None:
        """Load, unless a load is under way or another screen is on top."""
        busy = self._loading is not None and self._loading.is_running
        if not busy and self.is_current:
            self.loaded_at = self._position()
            self._loading = self.run_worker(self._load(), exit_on_error=False, name=f"{self.heading()} load")

    def _position(self) -> float | None:
        playback = self.console.model.playback
        return None if playback is None else playback.position

    def _follow_position(self) -> None:
        """Load again if the position in the past has moved."""
        before, position = self.loaded_at, self._position() if self.follows_position else None
        if before is not None and position is not None and abs(position - before) >= _MOVED_S:
            self.start_load()

    async def _load(self) -> None:
        try:
            await self.load()
            self.problem = ""
        except (LinkLost, QueryFailed) as error:
            self.problem = str(error)
        if self._painted is not None:  # otherwise the first paint comes, and shows it
            self.paint()

    def on_resize(self) -> None:
        """Fit the new size."""
        if self.size != self._painted:
            self.paint()

    def on_screen_resume(self) -> None:
        """Paint the present state."""
        self.paint()

    def paint(self) -> None:
        """Show the rows that are in view."""
        if not self._composed or not self.is_attached:
            return
        self._follow_position()
        self._painted = self.size
        width, is_open = self.size.width, self.line.is_open
        height = self.size.height - 2 - is_open - self.show_notes()
        self.line.set_class(not is_open, "hidden")
        rows = self.body(width)
        self._height, self._total = max(1, height), len(rows)
        last = max(0, self._total - self._height)
        self._top = last if self._at_end else max(0, min(self._top, last))
        places = self._places(rows)
        self._paint_title(width, places, height)
        visible = rows[self._top : self._top + height]
        for at in set(places) & set(range(self._top, self._top + height)):
            visible[at - self._top] = search.marked(rows[at], self._wanted, at == self._match)
        self.query_one("#reader-body", Lines).show(visible or [EMPTY], faded=self.console.model.grey)
        foot = footer(self.shown_keys(), width, role=self.console.model.role())
        self.query_one("#reader-foot", Lines).show([self.line_foot(width) or foot])

    def _paint_title(self, width: int, places: Sequence[int], height: int) -> None:
        """Show heading, state, link and fault; at the right the matches, and which rows are in view."""
        where = ""
        if self._wanted:
            number = f"{places.index(self._match) + 1}/" if self._match in places else ""
            where = f"/{clean(self._wanted)} {number}{len(places)}  "
        if self._total > self._height:
            where += f"{self._top + 1}-{min(self._total, self._top + height)} of {self._total} "
        left: list[Seg] = [(f" {self.heading()} ", "chip.name"), *self.console.model.state_segs(), (" ", "")]
        room = width - sum(width_of(text) for text, _ in left)
        left += self.console.model.link_segs(room)
        if self.names_fault:
            room = width - width_of(where) - 1 - sum(width_of(text) for text, _ in left)
            left += self.console.model.fault_segs(room)
        self.query_one("#reader-title", Lines).show([spread(left, [(where, "dim")], width, "bar")])

    @property
    def top(self) -> int:
        """The row at the top."""
        return self._top

    def scroll_to_row(self, number: int) -> None:
        """Put a row at the top, as far as there are rows to fill the screen."""
        self._top, self._at_end = number, False
        self.paint()

    def top_for(self, number: int) -> int:
        """Return the row to put at the top so that row `number` is in view; the present one if it is."""
        return min(max(self._top, number - self._height + 1), max(0, number))

    def next_place(self, places: Sequence[int]) -> int:
        """Return the first of `places` below the top; from the last one on, 0."""
        last = self._total - self._height
        return next((place for place in places if self._top < min(place, last)), 0)

    def action_scroll(self, by: int) -> None:
        """Scroll by lines."""
        self._top += by
        self._at_end = self.follows_end and self._top >= self._total - self._height
        self.paint()

    def action_page(self, by: int) -> None:
        """Scroll by pages."""
        self.action_scroll(by * max(1, self._height - 1))

    def action_ends(self, end: int) -> None:
        """Go to the first or the last line."""
        self.action_scroll(self._total if end else -self._total)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll on."""
        self.action_scroll(WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll back."""
        self.action_scroll(-WHEEL)

    # --- search -------------------------------------------------------------------------------------------------

    def _places(self, rows: Sequence[Row]) -> list[int]:
        """Return the rows that match the search."""
        return self.places(rows, self._wanted) if self._wanted else []

    def places(self, rows: Sequence[Row], wanted: str) -> list[int]:
        """Return the rows that match `wanted`."""
        wide = self.body(SEARCHED_WIDTH)
        return search.found(wide if len(wide) == len(rows) else rows, wanted)

    def _look_for(self, text: str, after: int, step: int) -> None:
        """Search `text` and show its next match."""
        self._wanted = text
        rows = self.body(self.size.width)
        at = search.next_after(self._places(rows), after, step)
        self._match = -1 if at is None else at
        if at is None:
            self.paint()
        elif not self._top <= at < self._top + self._height:
            self.scroll_to_row(max(0, at - self._height // 3))
        else:
            self.scroll_to_row(self._top)

    def action_find(self, step: int) -> None:
        """Go to the next or the previous match."""
        if self._wanted:
            self._look_for(self._wanted, self._match if self._match >= 0 else self._top - 1, step)

    def given(self, mode: Mode, text: str) -> None:
        """Keep the search, or run the command. An empty search goes to the next match of the last one."""
        super().given(mode, text)
        if mode == "search" and not text:
            self.action_find(1)
        elif mode == "search" and self._match < 0:
            self.console.report(f"{self._wanted!r} is not here", bad=False)

    def typed(self, mode: Mode, text: str) -> None:
        """Search while typing, from the row that was at the top."""
        if mode == "search":
            self._look_for(text, self._top - 1, 1)

    def left(self, mode: Mode) -> None:
        """Leave the line; clear the search."""
        super().left(mode)
        if mode == "search":
            self._wanted, self._match = "", -1

    def open_line(self, mode: Mode, text: str, error: str = "") -> None:
        """Show the line and open it."""
        self.line.remove_class("hidden")
        super().open_line(mode, text, error)

    # --- leaving ------------------------------------------------------------------------------------------------

    def action_dismiss_reader(self) -> None:
        """Go back."""
        self.app.pop_screen()

    def action_look(self, name: str) -> None:
        """Open another reader, or go back to it if it is the screen below; its own key goes back, too."""
        below = self.app.screen_stack[-2]
        if self.topic == name or (isinstance(below, Reader) and below.topic == name):
            self.action_dismiss_reader()
        else:
            self.console.navigation.open_reader(name, self.selected().stage)

    def action_help(self) -> None:
        """Open the keys and the legend of this screen."""
        self.console.navigation.open_help(self.topic, self.shown_keys(), self.selected())

    def action_copy_cli(self) -> None:
        """Copy the shell line that shows the same."""
        self.console.copying.command(self.cli().split())
