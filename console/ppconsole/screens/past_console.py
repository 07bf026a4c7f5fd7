"""The past beside a live engine: screens of their own on a recording, and no way to act."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ppengine.protocol.control import Outcome
from ppengine.protocol.discovery import EndedEngine, EngineRecord
from ppengine.protocol.recording import Update
from ppengine.protocol.verbs import Verb
from textual.app import App

from ppconsole.link.last_hour import LastHour
from ppconsole.link.replay import ReplaySource
from ppconsole.model.state import ConsoleState
from ppconsole.screens.console import Console
from ppconsole.screens.following import Following
from ppconsole.screens.hour import HourFeed
from ppconsole.screens.main_screen import MainScreen
from ppconsole.screens.navigation import Navigator
from ppconsole.view.display import DisplayModel
from ppconsole.view.playback import Playback

OFF = "this is the past: each Esc goes back one screen"


class PastConsole:
    """A `Console` on a recording; everything that is not of the past is the app's."""

    def __init__(
        self, app: App[int], present: Console, source: ReplaySource, title: str, clock: Callable[[], float]
    ) -> None:
        self._app, self._present = app, present
        self.source = source
        self.settings, self.notes, self.copying = present.settings, present.notes, present.copying
        self.model = DisplayModel(ConsoleState(read_only=True, live_source=False, past=OFF), clock, title)
        self.model.playback = Playback(source, self.model.rewind, self.paint, lambda: self.model.state)
        following = Following(self)
        self.main = MainScreen(self, following)
        self.navigation = Navigator(app, self.main, following)
        live = present.model.trends
        # Reading the hour once more takes a second in a thread, in which the first keys would wait for it.
        self._hour = HourFeed(self, tuple(live.points) if isinstance(source, LastHour) and live.whole else ())

    async def open(self, *, diagnosis: bool = False) -> None:
        """Begin to play, and show the main screen; with `diagnosis`, that screen above it."""
        await self.source.start(self._take)
        self._app.push_screen(self.main)
        if diagnosis:
            self.navigation.open_reader("diagnosis")

    def switch_to(self, engine: EngineRecord | EndedEngine) -> None:
        """Leave the past, and attach to another engine."""
        self._hour.leave()
        self.run_worker(self.source.close(), name="past", exit_on_error=False)
        self._present.switch_to(engine)

    def open_past(self, source: ReplaySource, title: str, *, diagnosis: bool = False) -> None:
        """Open another past on top of this one."""
        self._present.open_past(source, title, diagnosis=diagnosis)

    def leave(self) -> None:
        """Close the recording, and return to the screen below."""
        self._app.pop_screen()
        self._hour.leave()
        self.run_worker(self.source.close(), name="past", exit_on_error=False)

    def _take(self, update: Update) -> None:
        if self.model.take(update).first:
            self._hour.start()
        self.paint_soon()

    def export(self) -> None:
        """Write an export of this moment into the current folder."""
        self.run_worker(export(self), name="export", exit_on_error=False, exclusive=True)

    def run_worker(
        self,
        work: Coroutine[Any, Any, None],
        name: str | None = None,
        group: str = "past",
        *,
        exit_on_error: bool = False,
        exclusive: bool = False,
    ) -> object:
        """Run `work` beside the screens."""
        return self._app.run_worker(work, name, group, exit_on_error=exit_on_error, exclusive=exclusive)

    def paint(self) -> None:
        """Paint the visible screens now."""
        self._present.paint()

    def paint_soon(self) -> None:
        """Paint the visible screens in a moment."""
        self._present.paint_soon()

    def report(self, text: str, *, bad: bool) -> None:
        """Show a message for some seconds."""
        self._present.report(text, bad=bad)

    def report_outcome(self, verb: Verb, outcome: Outcome) -> None:
        """Show how a verb ended."""
        self._present.report_outcome(verb, outcome)

    def use_theme(self, name: str) -> None:
        """Change colours."""
        self._present.use_theme(name)


async def export(console: Console) -> None:
    """Write an export into the current folder, and report its path."""
    from ppconsole.link.export import ExportError, export_into

    snapshot = console.model.state.snapshot
    if snapshot is None:
        return
    try:
        path, size = await export_into(Path.cwd(), console.source, snapshot, console.model.state.events)
    except ExportError as error:
        console.report(f"no export: {error}", bad=True)
    else:
        console.report(f"{size} bytes in {path}", bad=False)
