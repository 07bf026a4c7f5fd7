"""A screen that shows rows to read: title, scrolling body, keys. Details, stacks, logs, events and help are such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.worker import Worker

from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.screens.console import Console
from ppconsole.view.cells import EMPTY, Row, Seg, spread
from ppconsole.view.keys import READER_KEYS, Key, footer
from ppconsole.widgets.lines import Lines


class Reader(Screen[None]):
    """Shows `body()`; loads by `load()` when it opens and then every `every_s` seconds (0: never again)."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss_reader", "back", show=False),
        Binding("up,k", "scroll(-1)", "up", show=False),
        Binding("down,j", "scroll(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown,space", "page(1)", "page down", show=False),
        Binding("g,home", "ends(0)", "first", show=False),
        Binding("G,end", "ends(1)", "last", show=False),
        Binding("question_mark", "help", "help", show=False),
        Binding("y", "copy_cli", "copy the CLI line", show=False),
    ]
    topic: ClassVar[str] = ""
    """The screen's name in the legend."""
    every_s: ClassVar[float] = 0.0
    follows_end: ClassVar[bool] = False
    keys: ClassVar[tuple[Key, ...]] = READER_KEYS

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.problem = ""
        self._composed = False
        self._top = 0
        self._at_end = self.follows_end
        self._height = 1
        self._total = 0
        self._loading: Worker[None] | None = None

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
        """Title, body, keys."""
        yield Lines(id="reader-title", classes="one")
        yield Lines(id="reader-body")
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
            self._loading = self.run_worker(self._load(), exit_on_error=False, name=f"{self.heading()} load")

    async def _load(self) -> None:
        try:
            await self.load()
            self.problem = ""
        except (LinkLost, QueryFailed) as error:
            self.problem = str(error)
        self.paint()

    def on_resize(self) -> None:
        """Fit the new size."""
        self.paint()

    def on_screen_resume(self) -> None:
        """Paint the present state."""
        self.paint()

    def paint(self) -> None:
        """Show the rows that are in view."""
        if not self._composed or not self.is_attached:
            return
        width, height = self.size.width, self.size.height - 2
        rows = self.body(width)
        self._height, self._total = max(1, height), len(rows)
        last = max(0, self._total - self._height)
        self._top = last if self._at_end else max(0, min(self._top, last))
        where = "" if last == 0 else f"{self._top + 1}-{min(self._total, self._top + height)} of {self._total} "
        grey = self.console.model.grey
        left: list[Seg] = [(f" {self.heading()} ", "chip.name"), (" ", ""), *self.console.model.link_segs()]
        self.query_one("#reader-title", Lines).show([spread(left, [(where, "dim")], width, "bar")])
        visible = rows[self._top : self._top + height]
        self.query_one("#reader-body", Lines).show(visible or [EMPTY], faded=grey)
        foot = footer(self.shown_keys(), width, verbs=not self.console.model.verbs_off())
        self.query_one("#reader-foot", Lines).show([foot])

    @property
    def top(self) -> int:
        """The row at the top."""
        return self._top

    def scroll_to_row(self, number: int) -> None:
        """Put a row at the top, as far as there are rows to fill the screen."""
        self._top, self._at_end = number, False
        self.paint()

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

    def action_dismiss_reader(self) -> None:
        """Go back."""
        self.app.pop_screen()

    def go_to(self, topic: str) -> None:
        """Open another reader, or go back to it if it is the screen below."""
        below = self.app.screen_stack[-2]
        if isinstance(below, Reader) and below.topic == topic:
            self.app.pop_screen()
        else:
            self.console.navigation.open_reader(topic)

    def action_help(self) -> None:
        """Open the keys and the legend of this screen."""
        self.console.navigation.open_help(self.topic, self.shown_keys())

    def action_copy_cli(self) -> None:
        """Copy the shell line that shows the same."""
        self.console.copy_cli(self.cli().split())
