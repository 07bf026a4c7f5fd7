"""The console: takes updates, paints on a tick, restarts its workers, and outlives the link."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

from ppengine.protocol.control import Outcome
from ppengine.protocol.discovery import EndedEngine, EngineRecord
from ppengine.protocol.recording import Update
from ppengine.protocol.verbs import Verb, label_of
from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.worker import Worker, WorkerState

from ppconsole.link.config_file import ConfigFileError, config_path, read_config
from ppconsole.link.replay import ReplaySource
from ppconsole.link.settings import Settings, settings_path
from ppconsole.link.source import Source
from ppconsole.link.unattached import Unattached
from ppconsole.model.safe import clean
from ppconsole.model.state import ConsoleState
from ppconsole.model.thresholds import AlarmConfig
from ppconsole.screens.alarm_effects import AlarmEffects
from ppconsole.screens.command_palette import ConsoleCommands
from ppconsole.screens.copying import Copying
from ppconsole.screens.following import Following
from ppconsole.screens.hour import HourFeed
from ppconsole.screens.main_screen import MainScreen
from ppconsole.screens.navigation import Navigator
from ppconsole.upkeep import Upkeep
from ppconsole.view.commands import target_of
from ppconsole.view.display import DisplayModel
from ppconsole.view.notes import BAD_S, GOOD_S, Note, Notes
from ppconsole.view.playback import Playback
from ppconsole.widgets.driver import ConsoleDriver
from ppconsole.widgets.theme import choose_theme, themes

TICK_S, SOON_S = 1.0, 0.25
EARLY_S = 0.4
"""A tick comes with the next snapshot, at most this much earlier or later than a second after the last tick."""
PROBLEM_SHOWN_S = 10.0
RESTART_S = 1.0


class ConsoleApp(App[int]):
    """Makes the parts, gives them to the screens (see `screens.console.Console`) and paints."""

    CSS_PATH = Path(__file__).with_name("console.tcss")
    TITLE = "ppconsole"
    COMMANDS: ClassVar = {ConsoleCommands}
    ENABLE_COMMAND_PALETTE = True
    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(key, f"playback('{act}')", act, show=False)
            for key, act in (
                ("left", "back"),
                ("right", "on"),
                ("shift+left,left_square_bracket", "far-back"),
                ("shift+right,right_square_bracket", "far-on"),
                ("less_than_sign", "slower"),
                ("greater_than_sign", "faster"),
                ("M", "mark"),
                ("J", "jump"),
            )
        ),
        Binding("ctrl+s", "picture", "save a picture", show=False),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        source: Source | None,
        *,
        settings: Settings | None = None,
        read_only: bool = False,
        title: str = "",
        clock: Callable[[], float] = time.monotonic,
        theme: str | None = None,
        alarms: AlarmConfig | None = None,
        upkeep: Upkeep | None = None,
    ) -> None:
        # Chosen first: Textual takes NO_COLOR out of the environment. Without it colours become greys, not nothing.
        wanted = theme or choose_theme(os.environ)
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.source = source or Unattached()
        self.settings = settings or Settings()
        self.notes = Notes()
        self.copying = Copying(self, self)
        self.model = DisplayModel(ConsoleState(read_only=read_only, live_source=self.source.live), clock, title)
        self._let_playback()
        self.following = Following(self)
        self.main = MainScreen(self, self.following)
        self.navigation = Navigator(self, self.main, self.following)
        self._clock = clock
        self._upkeep = upkeep
        self._soon: Timer | None = None
        self._next: Timer | None = None
        self._fresh = False
        self._ticked_at = 0.0
        self._pasts: WeakSet[ReplaySource] = WeakSet()
        """Open pasts: the operator may quit in one."""
        self.hour = HourFeed(self)
        self.alarms = AlarmEffects(self, alarms or AlarmConfig(), self.bell)
        self._restarts: dict[str, Callable[[], object]] = {
            "link": self._start_source, "follow": self.following.start, "block map": self.main.block_map.start,
        }  # fmt: skip
        for each in themes():
            self.register_theme(each)
        self.theme = wanted

    # --- life -------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        """Show the main screen, start the source and the clock."""
        self.push_screen(self.main)
        if isinstance(self.source, Unattached):
            self.navigation.open_engines(must_choose=True)
        self._start_source()
        self._tick_in(TICK_S + EARLY_S)
        if self.settings.problem:
            self.report(self.settings.problem, bad=True)

    def _let_playback(self) -> None:
        """Let the keys of the past move the source, if it is a past."""
        if isinstance(self.source, ReplaySource):
            model = self.model
            model.playback = Playback(self.source, model.rewind, self.paint, lambda: model.state)

    def _start_source(self) -> None:
        self.run_worker(self.source.start(self.on_update), name="link", exit_on_error=False)

    def switch_to(self, engine: EngineRecord | EndedEngine) -> None:
        """Leave the present engine and attach to another one, or show one that has ended; none is touched."""
        self.run_worker(self._switch_to(engine), name="switch", group="switch", exclusive=True, exit_on_error=False)

    async def _switch_to(self, engine: EngineRecord | EndedEngine) -> None:
        from ppconsole.link.ended import EndedSource
        from ppconsole.link.engine_link import WARNINGS, EngineLink

        source: Source
        if isinstance(engine, EngineRecord):
            source = EngineLink(engine, warnings=WARNINGS, read_only=self.model.state.read_only, slow=True)
        else:
            source = await asyncio.to_thread(EndedSource, engine)
        await self.source.close()
        self.source = source
        self.model.restart(live_source=source.live)
        self._let_playback()
        self.alarms.forget()
        self.following.request = None
        self.main.forget()
        while self.screen is not self.main:
            self.pop_screen()
        self._start_source()
        self.paint()

    async def on_unmount(self) -> None:
        """Close the source; the engine is not touched."""
        self.hour.leave()
        await self.alarms.close()
        for source in (self.source, *self._pasts):
            await source.close()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show a failed worker in the banner, and restart those that must not stop."""
        if event.state is WorkerState.ERROR:
            error = event.worker.error
            self.model.problem = clean(f"{event.worker.name} failed: {type(error).__name__}: {error}")
            self.set_timer(PROBLEM_SHOWN_S, self._forget_problem)
            restart = self._restarts.get(event.worker.name)
            if restart is not None:
                self.set_timer(RESTART_S, restart)
            self.paint()

    def _forget_problem(self) -> None:
        self.model.problem = ""
        self.paint()

    # --- updates and painting -----------------------------------------------------------------------------------

    def on_update(self, update: Update) -> None:
        """Take one update. The next tick paints it; a change of the link or of a verdict is painted at once."""
        change = self.model.take(update)
        if change.epoch:
            self.main.forget()
            self.following.request = None
        if change.snapshot:
            self.alarms.look()
        if change.alarm:
            self.call_later(self.paint)
        if change.first or change.epoch:
            self.hour.start()
        if change.snapshot and not self._fresh:
            self._fresh = True
            early = TICK_S - EARLY_S - (self._clock() - self._ticked_at)
            if early <= 0 or change.first:  # the screen of a console that attaches is empty
                self.call_later(self.tick)
            else:
                self._tick_in(early)

    def tick(self) -> None:
        """Paint the visible screens, once a second."""
        self._fresh, self._ticked_at = False, self._clock()
        self._tick_in(TICK_S + EARLY_S)
        self.model.note_rate()
        self.paint()
        self.main.refresh_blocks()
        if self._upkeep is not None:
            self._upkeep.rest()

    async def on_event(self, event: events.Event) -> None:
        """Note keys for the upkeep."""
        if self._upkeep is not None and isinstance(event, events.Key):
            self._upkeep.note_key()
        await super().on_event(event)

    def _tick_in(self, seconds: float) -> None:
        """Set the next tick. No other timer runs: between two ticks the console sleeps."""
        _stop(self._next)
        self._next = self.set_timer(seconds, self.tick)

    def paint_soon(self) -> None:
        """Paint in a moment: for streamed text, which comes in pieces and must not wait for the next tick."""
        if self._soon is None:
            self._soon = self.set_timer(SOON_S, self.paint)

    def paint(self) -> None:
        """Paint the visible screens: the top one, and those below it as long as dialogs are on top."""
        _stop(self._soon)
        self._soon = None
        if not self.is_running:
            return  # on the way out, screens lose their widgets one by one
        for screen in reversed(self.screen_stack):
            painter = getattr(screen, "paint", None)
            if painter is not None:
                painter()
            if not isinstance(screen, ModalScreen):
                break

    def use_theme(self, name: str) -> None:
        """Change colours."""
        self.theme = name
        for board in self.screen.query("Lines"):
            board.refresh()

    # --- services for screens -----------------------------------------------------------------------------------

    def report_outcome(self, verb: Verb, outcome: Outcome) -> None:
        """Show how a verb ended."""
        step = "" if outcome.step is None else f" at step {outcome.step}"
        text = f"{label_of(verb)} {target_of(verb)}: {outcome.state}{step}. {outcome.text}"
        self.report(text, bad=outcome.state == "failed" or bool(outcome.conflicts))

    def report(self, text: str, *, bad: bool) -> None:
        """Show a message for some seconds."""
        note = self.notes.add(clean(text), bad=bad)
        self.set_timer(BAD_S if bad else GOOD_S, lambda: self._forget_note(note))
        self.paint()

    def _forget_note(self, note: Note) -> None:
        self.notes.remove(note)
        self.paint()

    def export(self) -> None:
        """Write an export into the current folder, and report its path."""
        from ppconsole.screens.past_console import export

        self.report("exporting: this takes the stacks, too", bad=False)
        self.run_worker(export(self), exit_on_error=False, name="export", exclusive=True)

    def open_past(self, source: ReplaySource, title: str, *, diagnosis: bool = False) -> None:
        """Open the screens of a past on top of the present ones; with `diagnosis`, that one first."""
        from ppconsole.screens.past_console import PastConsole

        self._pasts.add(source)
        past = PastConsole(self, self, source, title, self._clock)
        self.run_worker(past.open(diagnosis=diagnosis), name="past", exit_on_error=False)

    def leave(self) -> None:
        """Do nothing: below this one there is no other console."""

    def action_playback(self, name: str) -> None:
        """Move in the past that the present screen shows."""
        console = getattr(self.screen, "console", None)
        if console is not None and console.model.playback is not None and console.model.playback.act(name):
            self.paint()

    def action_picture(self) -> None:
        """Save an SVG of the screen in the current folder."""
        try:
            path = self.save_screenshot(path=".")
        except OSError as error:
            self.report(f"no picture: {error}", bad=True)
            return
        self.report(f"saved {path}", bad=False)


def _stop(timer: Timer | None) -> None:
    if timer is not None:
        timer.stop()


def run_console(source: Source | None, *, read_only: bool, title: str) -> int:
    """Run the console until the operator leaves; return the exit code. `title`: a note on the screen.

    Without a source it begins with the list of engines.

    `PPCONSOLE_THEME` (dark, light, terminal) sets the colours. `PPCONSOLE_MOUSE=1` takes the mouse; otherwise the
    terminal keeps it, so that text can be selected and copied.
    """
    settings, alarms = Settings(settings_path()), AlarmConfig()
    try:
        alarms = read_config(config_path())
    except ConfigFileError as error:
        settings.problem = f"no thresholds are in effect: {error}"
    upkeep = Upkeep(time.monotonic)
    app = ConsoleApp(source, settings=settings, read_only=read_only, title=title, alarms=alarms, upkeep=upkeep)
    app.driver_class = ConsoleDriver
    app.run(mouse=os.environ.get("PPCONSOLE_MOUSE") == "1")
    return app.return_code or 0
