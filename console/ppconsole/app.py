"""The console: takes updates, paints on a tick, sends verbs after a confirm, outlives the link."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from ppengine.protocol.control import Outcome, Verb
from ppengine.protocol.snapshot import Event, Snapshot
from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.worker import Worker, WorkerState

from ppconsole.link.source import Source, Update
from ppconsole.model.facts import freshness, why_no_verbs
from ppconsole.model.reduce import reduce
from ppconsole.model.safe import clean
from ppconsole.model.state import SORT_KEYS, ConsoleState
from ppconsole.screens.command_palette import ConsoleCommands
from ppconsole.screens.following import Following
from ppconsole.screens.main_screen import MainScreen
from ppconsole.view.banner import Link, link_segs
from ppconsole.view.cells import Seg
from ppconsole.view.commands import cli_line, name_of, shell_line, target_of
from ppconsole.widgets.stdout_driver import StdoutDriver
from ppconsole.widgets.theme import choose_theme, themes

TICK_S, SOON_S = 1.0, 0.25
EARLY_S = 0.4
"""A tick comes with the next snapshot, but no more than so much earlier or later than a second after the last one."""
HISTORY = 120
PROBLEM_SHOWN_S = 10.0
RESTART_S = 1.0


class ConsoleApp(App[int]):
    """Holds the state; screens are drawn from it. Times are monotonic seconds of `clock`."""

    CSS_PATH = Path(__file__).with_name("console.tcss")
    TITLE = "ppconsole"
    COMMANDS: ClassVar = {ConsoleCommands}
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "picture", "save a picture", show=False),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        source: Source,
        *,
        read_only: bool = False,
        title: str = "",
        clock: Callable[[], float] = time.monotonic,
        theme: str | None = None,
    ) -> None:
        # Chosen first: Textual takes NO_COLOR out of the environment. Without it colours become greys, not nothing.
        wanted = theme or choose_theme(os.environ)
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.source = source
        self.title_text = clean(title)
        self.clock = clock
        self.state = ConsoleState(read_only=read_only, live_source=source.live)
        self.history: deque[float] = deque(maxlen=HISTORY)
        self.following = Following(self)
        self.main = MainScreen()
        self._frozen: ConsoleState | None = None
        self._frozen_at = 0.0
        self._problem = ""
        self._soon: Timer | None = None
        self._next: Timer | None = None
        self._fresh = False
        self._ticked_at = 0.0
        self._restarts: dict[str, Callable[[], object]] = {
            "link": self._start_source, "follow": self.following.start, "block map": self.main.follow_blocks,
        }  # fmt: skip
        for each in themes():
            self.register_theme(each)
        self.theme = wanted

    # --- life -------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        """Show the main screen, start the source and the clock."""
        self.push_screen(self.main)
        self._start_source()
        self._tick_in(TICK_S + EARLY_S)

    def _start_source(self) -> None:
        self.run_worker(self.source.start(self.on_update), name="link", exit_on_error=False)

    async def on_unmount(self) -> None:
        """Close the source; the engine is not touched."""
        await self.source.close()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show what failed in the banner, and start again what must not stop."""
        if event.state is WorkerState.ERROR:
            error = event.worker.error
            self._problem = clean(f"{event.worker.name} failed: {type(error).__name__}: {error}")
            self.set_timer(PROBLEM_SHOWN_S, self._forget_problem)
            restart = self._restarts.get(event.worker.name)
            if restart is not None:
                self.set_timer(RESTART_S, restart)
            self.paint()

    def _forget_problem(self) -> None:
        self._problem = ""
        self.paint()

    # --- updates and painting -----------------------------------------------------------------------------------

    def on_update(self, update: Update) -> None:
        """Take one update. It is painted with the next tick; a link or a verdict that has changed, at once."""
        old, self.state = self.state, reduce(self.state, update, self.clock())
        if isinstance(update, Event):
            return  # the log alone has changed
        if old.epoch is not None and self.state.epoch != old.epoch:
            self.main.requests.forget()
            self.following.request, self._frozen = None, None
        if old.link.state != self.state.link.state or _alarm(old) != _alarm(self.state):
            self.call_later(self.paint)
        if self.state.snapshot is not old.snapshot and not self._fresh:
            self._fresh = True
            early = TICK_S - EARLY_S - (self.clock() - self._ticked_at)
            if early <= 0 or old.snapshot is None:  # who attaches looks at an empty screen
                self.call_later(self.tick)
            else:
                self._tick_in(early)

    def tick(self) -> None:
        """Paint what is seen, once a second."""
        self._fresh, self._ticked_at = False, self.clock()
        self._tick_in(TICK_S + EARLY_S)
        snapshot = self.state.snapshot
        if snapshot is not None and not self.grey:
            self.history.append(snapshot.throughput.output_tok_s or 0.0)
        self.paint()
        self.main.refresh_blocks()

    def _tick_in(self, seconds: float) -> None:
        """Set the clock. There is none that runs on: between two pictures the console sleeps."""
        _stop(self._next)
        self._next = self.set_timer(seconds, self.tick)

    def paint_soon(self) -> None:
        """Paint in a moment what should not wait for the next tick, and comes piece by piece: streamed text."""
        if self._soon is None:
            self._soon = self.set_timer(SOON_S, self.paint)

    def paint(self) -> None:
        """Paint the screens that can be seen: the top one, and below it as long as dialogs are on top."""
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

    @property
    def shown(self) -> ConsoleState:
        """What is on the display: the present, or what it was when the display was frozen."""
        if self._frozen is None:
            return self.state
        present = self.state
        return replace(self._frozen, filter=present.filter, sort=present.sort, descending=present.descending)

    @property
    def grey(self) -> bool:
        """Whether what is shown is old, because the link is not live."""
        return freshness(self.state, self.clock()).grey

    def link(self) -> Link:
        """Return what the banner says about the link."""
        now = self.clock()
        fresh = freshness(self.state, now)
        return Link(
            state=fresh.state,
            age_s=fresh.age_s,
            retry_in_s=self.state.link.retry_in_s,
            text=self.state.link.text,
            read_only=self.state.read_only or not self.state.live_source,
            frozen_s=None if self._frozen is None else now - self._frozen_at,
            problem=self._problem,
        )

    def link_segs(self) -> list[Seg]:
        """Return link state and age for a title line."""
        return link_segs(self.link())

    def verbs_off(self) -> str:
        """Return why no verb is possible now; empty when they are."""
        return why_no_verbs(self.state, self.clock())

    def toggle_freeze(self) -> None:
        """Freeze the display while figures still arrive, or thaw it."""
        self._frozen = None if self._frozen is not None else self.state
        self._frozen_at = self.clock()
        self.paint()

    def next_sort(self) -> None:
        """Sort by the next key; figures begin with the largest."""
        key = SORT_KEYS[(SORT_KEYS.index(self.state.sort) + 1) % len(SORT_KEYS)]
        self.state = replace(self.state, sort=key, descending=key in ("age", "in", "out", "blocks", "swap"))
        self.paint()

    def reverse_sort(self) -> None:
        """Turn the order round."""
        self.state = replace(self.state, descending=not self.state.descending)
        self.paint()

    def use_theme(self, name: str) -> None:
        """Change colours."""
        self.theme = name
        for board in self.screen.query("Lines"):
            board.refresh()

    # --- verbs --------------------------------------------------------------------------------------------------

    def ask(self, verb: Verb) -> None:
        """Open the confirm dialog for `verb` on what is known now."""
        from ppconsole.screens.confirm import Confirm  # with its widgets it costs more than the rest of a start

        if self.state.snapshot is not None:
            self.push_screen(Confirm(verb, self.state.snapshot))

    def report_outcome(self, verb: Verb, outcome: Outcome) -> None:
        """Say how a verb ended."""
        step = "" if outcome.step is None else f" at step {outcome.step}"
        text = f"{name_of(verb)} {target_of(verb)}: {outcome.state}{step}. {outcome.text}"
        self.report(text, bad=outcome.state == "failed")

    def report(self, text: str, *, bad: bool) -> None:
        """Show a notification. Its text is never parsed as markup."""
        self.notify(clean(text), severity="error" if bad else "information", timeout=8 if bad else 4, markup=False)

    def export(self) -> None:
        """Write an export of what is shown into the current folder, and say where it is."""
        if self.state.snapshot is not None:
            self.report("exporting: this takes the stacks, too", bad=False)
            self.run_worker(self._export(self.state.snapshot), exit_on_error=False, name="export", exclusive=True)

    async def _export(self, snapshot: Snapshot) -> None:
        from ppconsole.link.export import ExportError, gather, write

        files = await gather(self.source, snapshot, self.state.events, program="ppconsole")
        name = "".join(letter if letter.isalnum() else "-" for letter in clean(snapshot.engine.name))[:40]
        path = Path(f"ppconsole-{name}-{time.strftime('%Y%m%d-%H%M%S')}.zip").absolute()
        try:
            size = write(path, files)
        except ExportError as error:
            self.report(f"no export: {error}", bad=True)
            return
        self.report(f"{size} bytes in {path}", bad=False)

    # --- copying ------------------------------------------------------------------------------------------------

    def copy_verb(self, verb: Verb) -> None:
        """Copy the shell line of a verb."""
        name = self.state.snapshot.engine.name if self.state.snapshot else ""
        self._copy(cli_line(verb, name))

    def copy_cli(self, words: str) -> None:
        """Copy the shell line that shows what is on the screen."""
        if words:
            name = self.state.snapshot.engine.name if self.state.snapshot else ""
            self._copy(shell_line(words.split(), name))

    def _copy(self, line: str) -> None:
        self.copy_to_clipboard(line)
        self.report(f"copied: {line}", bad=False)

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


def _alarm(state: ConsoleState) -> tuple[object, ...]:
    """Return what should be seen at once when it changes: the engine's state and the verdicts."""
    snapshot = state.snapshot
    if snapshot is None:
        return ()
    return (snapshot.engine.state, *((verdict.stage, verdict.cause) for verdict in snapshot.verdicts))


def run_console(source: Source, *, read_only: bool, title: str) -> int:
    """Run the console until it is left; return the exit code. `title`: a note such as `leaving stops the demo`.

    `PPCONSOLE_THEME` (dark, light, terminal) sets the colours; `PPCONSOLE_MOUSE=1` takes the mouse, which is left
    to the terminal otherwise so that text can be selected and copied.
    """
    app = ConsoleApp(source, read_only=read_only, title=title)
    if not (sys.__stderr__ and sys.__stderr__.isatty()):
        app.driver_class = StdoutDriver
    app.run(mouse=os.environ.get("PPCONSOLE_MOUSE") == "1")
    return app.return_code or 0
