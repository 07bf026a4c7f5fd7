"""The readers: a stage, stacks, logs, events, trends, options, help."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import ClassVar

from ppengine.protocol.inspection import LogsDetail, StacksDetail
from ppengine.protocol.severity import Level
from ppengine.protocol.snapshot import Event
from textual.binding import Binding, BindingType

from ppconsole.model.ranks import words
from ppconsole.screens.console import NOTHING_SELECTED, Console, Selected
from ppconsole.screens.layout import Layout
from ppconsole.screens.line_screen import SCALE_KEYS, verb_keys
from ppconsole.screens.reader import SEARCHED_WIDTH, Reader
from ppconsole.view import (
    changes,
    drilldown,
    events,
    help_page,
    meaning,
    option_table,
    search,
    stage_detail,
    trend_rows,
)
from ppconsole.view.cells import Row, row
from ppconsole.view.keys import HELP_KEYS, LEVEL_KEY, SCALE_KEY, Key, reader_keys
from ppconsole.view.legend import Section

_SHOWN: dict[Level, str] = {"info": "", "warning": ": WARNINGS AND ERRORS", "error": ": ERRORS"}


class _OfStage(Reader):
    """A reader about one stage or, with None, about all: the verbs of its keys act on that stage."""

    BINDINGS: ClassVar[list[BindingType]] = verb_keys("stage", "memory", "engine")
    first_keys: ClassVar[tuple[Key, ...]] = ()
    """Keys of the screen's own."""

    def __init__(self, console: Console, stage: int | None = None) -> None:
        super().__init__(console)
        self.stage = stage

    def selected(self) -> Selected:
        """Return the stage."""
        return Selected(stage=self.stage)

    def shown_keys(self) -> tuple[Key, ...]:
        """Return the keys; those of verbs on a stage only where there is one."""
        return reader_keys(self.first_keys, self.stage)


class StageScreen(_OfStage):
    """One stage in full, or one rank of it beside the others, from the snapshot."""

    topic: ClassVar[str] = "stage"
    BINDINGS: ClassVar[list[BindingType]] = SCALE_KEYS
    first_keys: ClassVar[tuple[Key, ...]] = (SCALE_KEY,)

    def __init__(self, console: Console, stage: int, rank: int | None = None) -> None:
        super().__init__(console, stage)
        self._number, self._rank = stage, rank

    def selected(self) -> Selected:
        """Return the stage, and the rank."""
        return Selected(stage=self.stage, rank=self._rank)

    def heading(self) -> str:
        """Return the stage's number, and the rank's."""
        return words(self._number, self._rank).upper()

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "status --json"

    def body(self, width: int) -> list[Row]:
        """Return state, memory parts, streams and timeline of every rank, or of the selected one."""
        snapshot, span = self.console.model.shown.snapshot, self.console.model.state.span_ms
        found = stage_detail.rows(snapshot, self._number, self._rank, width, span) if snapshot else []
        return found or [row((f"  {self.heading().lower()} is not in the engine any more", "warn"))]


class StacksScreen(_OfStage):
    """Stacks, taken when the screen opens and on `t`: taking them stops stages and core for a moment."""

    topic: ClassVar[str] = "stacks"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("t", "take", "take again", show=False)]
    first_keys: ClassVar[tuple[Key, ...]] = (("t", "take again", None),)

    def __init__(self, console: Console, stage: int | None = None) -> None:
        super().__init__(console, stage)
        self._detail: StacksDetail | None = None

    def heading(self) -> str:
        """Return the title."""
        return "STACKS" if self.stage is None else f"STACKS OF STAGE {self.stage}"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "stacks" if self.stage is None else f"stacks --stage {self.stage}"

    def body(self, width: int) -> list[Row]:
        """Return the stacks."""
        return drilldown.stacks_rows(self._detail, self.problem, width)

    async def load(self) -> None:
        """Take the stacks."""
        answer = await self.console.source.inspect("stacks", stage=self.stage)
        self._detail = answer if isinstance(answer, StacksDetail) else None

    def action_take(self) -> None:
        """Take them again."""
        self._detail = None
        self.start_load()
        self.paint()


class LogsScreen(_OfStage):
    """Newest log lines of all processes or of one stage; it stays at the end unless scrolled up.

    In the past the end is the moment in view.
    """

    topic: ClassVar[str] = "logs"
    every_s: ClassVar[float] = 2.0
    follows_end: ClassVar[bool] = True
    follows_position: ClassVar[bool] = True

    def __init__(self, console: Console, stage: int | None = None) -> None:
        super().__init__(console, stage)
        self._detail: LogsDetail | None = None

    def heading(self) -> str:
        """Return the title."""
        return "LOGS" if self.stage is None else f"LOGS OF STAGE {self.stage}"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "logs" if self.stage is None else f"logs --stage {self.stage}"

    def body(self, width: int) -> list[Row]:
        """Return the lines; in the past, the moment in view behind them."""
        rows = drilldown.log_rows(self._detail, self.problem, width)
        playback = self.console.model.playback
        if self._detail is not None and self.loaded_at is not None and playback is not None and not playback.at_end:
            rows.append(drilldown.moment_row(self.loaded_at, width))
        return rows

    async def load(self) -> None:
        """Fetch the newest lines."""
        answer = await self.console.source.inspect("logs", stage=self.stage, lines=500)
        self._detail = answer if isinstance(answer, LogsDetail) else None


class EventsScreen(Reader):
    """All events that this console has; in a past with a mark, those between the mark and the moment in view."""

    topic: ClassVar[str] = "events"
    follows_end: ClassVar[bool] = True
    keys: ClassVar[tuple[Key, ...]] = reader_keys((LEVEL_KEY,), None)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(LEVEL_KEY[0], "level", "warnings, errors, or all events", show=False), *verb_keys("memory", "engine"),
    ]  # fmt: skip

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._at_end = self._interval() is None  # the figures are at the top
        self._made: dict[int, tuple[Event, list[Row]]] = {}
        """Each event with its rows, by identity: an event does not change."""
        self._made_for = 0
        """Width of those rows."""

    def heading(self) -> str:
        """Return the title."""
        title = "EVENTS SINCE THE MARK" if self._interval() else "EVENTS"
        return f"{title}{_SHOWN[self._level]}"

    @property
    def _level(self) -> Level:
        return self.console.model.state.level

    def action_level(self) -> None:
        """Show warnings and errors alone, then errors alone, then all events again."""
        self.console.model.raise_level()
        self.action_ends(0 if self._interval() else 1)

    def _interval(self) -> tuple[changes.Moment, changes.Moment] | None:
        playback = self.console.model.playback
        return None if playback is None else playback.interval()

    def _head(self, width: int) -> list[Row]:
        """Return the figures at the mark and now; none without a mark."""
        interval = self._interval()
        return changes.rows(*interval, width) if interval else []

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "events" if self._level == "info" else f"events --level {self._level}"

    def body(self, width: int) -> list[Row]:
        """Return the events in full."""
        rows = [*self._head(width), *(line for each in self._rows(width) for line in each)]
        return rows or [row((f"  {events.NOTHING[self._level]}", "dim"))]

    def _rows(self, width: int) -> list[list[Row]]:
        if interval := self._interval():
            return changes.event_rows(*interval, width, self._level)
        known = self._made if self._made_for == width else {}
        shown = events.of_level(self.console.model.shown.events, self._level)
        made = {id(each): known.get(id(each)) or (each, events.event_rows(each, width)) for each in shown}
        if width != SEARCHED_WIDTH:
            self._made, self._made_for = made, width
        return [made[id(each)][1] for each in shown]

    def places(self, rows: Sequence[Row], wanted: str) -> list[int]:
        """Return the row of each event that matches: the one with the text, or the first if it is broken over two."""
        found, at = [], len(self._head(self.size.width))
        whole = self._rows(SEARCHED_WIDTH)
        for lines, line in zip(self._rows(self.size.width), whole, strict=True):
            if search.found(line, wanted):
                found.append(at + next(iter(search.found(lines, wanted)), 0))
            at += len(lines)
        return found


class TrendsScreen(Reader):
    """The trends on the whole screen."""

    topic: ClassVar[str] = "trends"
    keys: ClassVar[tuple[Key, ...]] = reader_keys((("t", "time span", None),), None)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "span", "time span", show=False), Binding("T", "dismiss_reader", "back", show=False),
        *verb_keys("memory", "engine"),
    ]  # fmt: skip

    def __init__(self, console: Console, layout: Layout) -> None:
        super().__init__(console)
        self._panels = layout

    def heading(self) -> str:
        """Return the title and the span."""
        return f"TRENDS  {trend_rows.span_line(self._panels.span_s, self.console.model.shown_trends)}"

    def cli(self) -> str:
        """Return the verb that prints the newest figures."""
        return "status"

    def body(self, width: int) -> list[Row]:
        """Return one chart a figure, as tall as the screen allows."""
        height = self.size.height - 2 - self.line.is_open
        model = self.console.model
        return trend_rows.screen(model.shown_trends, self._panels.span_s, width, height, model.marks)

    def action_span(self) -> None:
        """Change the time span."""
        self._panels.change_span()
        self.paint()


class OptionsScreen(Reader):
    """The options of prompts."""

    topic: ClassVar[str] = "set"

    def heading(self) -> str:
        """Return the title."""
        return "SET"

    def body(self, width: int) -> list[Row]:
        """Return one row an option."""
        return option_table.rows(self.console.settings.prompt, width)


class HelpScreen(Reader):
    """The selected row in words, keys and legend of one screen; with a `topic` its entries. Tab: the next section."""

    keys: ClassVar[tuple[Key, ...]] = HELP_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "section", "next section", show=False)]

    def __init__(
        self, console: Console, screen: str, keys: tuple[Key, ...] = (), selected: Selected = NOTHING_SELECTED,
        topic: tuple[Section, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(console)
        self._screen, self._keys, self._selected, self._topic = screen, keys, selected, topic
        self._headings: tuple[int, ...] = (0,)

    def heading(self) -> str:
        """Return the screen's name."""
        return f"HELP: {self._screen if self._topic else self._screen.upper()}"

    def cli(self) -> str:
        """Return the command that prints the legend."""
        return shlex.join(("help", self._screen if self._topic else "columns"))

    def body(self, width: int) -> list[Row]:
        """Return the help."""
        if self._topic:
            return self._numbered(help_page.of_sections(self._topic, width))
        chosen = self._selected
        snapshot = self.console.model.shown.snapshot
        selected = meaning.of_selection(snapshot, chosen.request, chosen.stage, chosen.rank)
        theme = "mono" if self.app.no_color else self.app.theme
        model = self.console.model
        past = model.playback is not None
        return self._numbered(
            help_page.page(self._screen, self._keys, width, selected, theme, model.state.role, past=past)
        )

    def _numbered(self, made: help_page.Page) -> list[Row]:
        self._headings = made.headings
        return made.rows

    def action_section(self) -> None:
        """Scroll to the next section; from the last one to the top."""
        self.scroll_to_row(self.next_place(self._headings))

    def action_help(self) -> None:
        """Do nothing: this is the help."""
