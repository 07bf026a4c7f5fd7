"""The list of engines, running and ended: arrows choose, letters filter, Enter attaches."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

from ppengine.protocol.discovery import EndedEngine, EngineRecord, RuntimeDirError, list_engines
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ppconsole.link.ended_list import EndedList
from ppconsole.model.safe import clean
from ppconsole.screens.console import Console
from ppconsole.view import engine_table
from ppconsole.view.cells import Seg, spread
from ppconsole.view.cursor import Cursor
from ppconsole.view.keys import ENGINES_KEYS, footer
from ppconsole.widgets.lines import Lines
from ppconsole.widgets.note_strip import NoteStrip

EVERY_S = 2.0
ANSWER_S = 2.0


class EnginesScreen(Screen[EngineRecord | EndedEngine | None]):
    """Returns the chosen engine, or None. The list is looked up again every two seconds."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "up", show=False), Binding("down", "move(1)", "down", show=False),
        Binding("pageup,home", "move(-100000)", "first", show=False),
        Binding("pagedown,end", "move(100000)", "last", show=False),
        Binding("enter", "choose", "attach", show=False), Binding("escape", "leave", "back", show=False),
    ]  # fmt: skip

    def __init__(self, present: str, console: Console) -> None:
        super().__init__()
        self._present = present
        self.console = console
        self._engines: list[tuple[EngineRecord, str]] = []
        self._ended: list[EndedEngine] = []
        self._ended_list = EndedList()
        self._known = False
        self._wanted = ""
        self._cursor: Cursor[str] = Cursor()
        self._top = 0
        """The first row in view, without the header."""
        self._composed = False

    def compose(self) -> ComposeResult:
        """Title, list, keys."""
        yield Lines(id="reader-title", classes="one")
        yield Lines(id="reader-body")
        yield NoteStrip()
        yield Lines(id="reader-foot", classes="one")

    def on_mount(self) -> None:
        """Look for engines from now on."""
        self._composed = True
        self.run_worker(self._watch(), exit_on_error=False, name="engines")
        self.paint()

    def on_resize(self) -> None:
        """Fit the new size."""
        self.paint()

    async def _watch(self) -> None:
        """List the engines now and again. A new one is listed before its state is known."""
        from ppconsole.link.survey import survey

        while True:
            try:
                states = {record.id: state for record, state in self._engines}
                self._engines = [(record, states.get(record.id, "…")) for record in list_engines()]
                self._ended = self._ended_list.read([record.id for record, _ in self._engines])
                self._known = True
                self.paint()
                self._engines = [(record, word) for record, _, word in await survey(ANSWER_S)]
            except RuntimeDirError as error:
                self.console.report(str(error), bad=True)
            self.paint()
            await asyncio.sleep(EVERY_S)

    def paint(self) -> None:
        """Show the engines that match."""
        if not self._composed or not self.is_attached:
            return
        width = self.size.width
        height = max(1, self.size.height - 3 - self.query_one(NoteStrip).fit(self.console.notes))
        ids = self._ids()
        lines = self._lines(width, self._cursor.sync(ids))
        at = next((place for place, line in enumerate(lines) if line.id is not None and line.id == self._cursor.id), 0)
        self._top = max(0, min(max(min(self._top, at), at - height + 1), len(lines) - height))
        body = [line.row for line in lines[self._top : self._top + height]]
        typed: list[Seg] = [(f" /{clean(self._wanted)}", "accent")] if self._wanted else []
        title: list[Seg] = [(" ENGINES ", "chip.name"), *typed]
        number: list[Seg] = [(f"{len(ids)} of {len(self._engines) + len(self._ended)} ", "dim")]
        self.query_one("#reader-title", Lines).show([spread(title, number, width, "bar")])
        self.query_one("#reader-body", Lines).show([engine_table.head(width), *body])
        self.query_one("#reader-foot", Lines).show([footer(ENGINES_KEYS, width, role=None)])

    def _lines(self, width: int, selected: str | None) -> list[engine_table.Line]:
        """Return the rows below the header: engines that run, then those that have ended."""
        now, live, ended = time.time(), self._shown(), self._shown_ended()
        lines = engine_table.live_lines(live, selected, self._present, width, now)
        if not live and not (ended and self._wanted):
            lines.append(engine_table.Line(None, engine_table.nothing(self._known, clean(self._wanted), width)))
        return [*lines, *engine_table.ended_lines(ended, selected, self._present, width, now)]

    def _shown(self) -> list[tuple[EngineRecord, str]]:
        return engine_table.matching(self._engines, self._wanted)

    def _shown_ended(self) -> list[EndedEngine]:
        live = {record.id for record, _ in self._engines}
        return [one for one in engine_table.matching_ended(self._ended, self._wanted) if one.record.id not in live]

    def _ids(self) -> list[str]:
        """Return the ids of the engines that match, in the order of the list."""
        ended = [one.record.id for one in self._shown_ended()]
        return [*(record.id for record, _ in self._shown()), *ended]

    def on_key(self, event: events.Key) -> None:
        """Filter by the letters that are typed."""
        if event.key == "backspace":
            self._filter(self._wanted[:-1])
        elif event.is_printable and event.character:
            self._filter(self._wanted + event.character)
        else:
            return
        event.stop()

    def _filter(self, text: str) -> None:
        self._wanted = text
        self._cursor.forget()
        self.paint()

    def action_move(self, by: int) -> None:
        """Move the selection."""
        self._cursor.move(self._ids(), by)
        self.paint()

    def on_click(self, event: events.Click) -> None:
        """Select a row."""
        board = self.query_one("#reader-body", Lines)
        at = self._top + event.get_content_offset_capture(board).y - 1
        lines = self._lines(self.size.width, None)
        if event.widget is board and 0 <= at < len(lines) and (chosen := lines[at].id) is not None:
            self._cursor.choose(chosen)
            self.paint()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Select the next engine."""
        self.action_move(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Select the engine before."""
        self.action_move(-1)

    def action_choose(self) -> None:
        """Return the selected engine."""
        selected = self._cursor.sync(self._ids())
        live = (record for record, _ in self._shown() if record.id == selected)
        ended = (one for one in self._shown_ended() if one.record.id == selected)
        if (chosen := next(live, None) or next(ended, None)) is not None:
            self.dismiss(chosen)

    def action_leave(self) -> None:
        """Clear the filter; without one, leave the list."""
        if self._wanted:
            self._filter("")
        else:
            self.dismiss(None)
