"""Opening screens and beginning verbs: by key, by command line, from the palette, from another screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ppengine.protocol.discovery import EndedEngine, EngineRecord
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verb_table import ROWS
from ppengine.protocol.verbs import Submit, Verb, label_of, row_of
from textual.app import App
from textual.screen import Screen

from ppconsole.link.engine_link import EngineLink, far_link
from ppconsole.link.last_hour import LastHour, no_history
from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.model.choosing import MARKED, NAMED, Choice
from ppconsole.model.prompt_options import OptionError
from ppconsole.model.request_names import AmbiguousError, whole_in
from ppconsole.model.safe import clean
from ppconsole.screens.console import NOTHING_SELECTED, GiveBack, Selected
from ppconsole.screens.following import Following
from ppconsole.screens.line_screen import LineScreen
from ppconsole.screens.main_screen import MainScreen
from ppconsole.view import commands
from ppconsole.view.keys import Key

NOTHING_CHOSEN = 130
"""Return code of a console that was left before an engine was chosen."""

# Screens other than the main one are imported when they open: the first screen must be there at once.


class Navigator:
    """Knows all screens; every other part opens them through `Navigation`."""

    def __init__(self, app: App[int], main: MainScreen, following: Following) -> None:
        self._app, self._main, self._following = app, main, following
        self._console = main.console
        self._model = main.console.model

    def ask(
        self, verb: Verb, seen: Snapshot | None = None, choice: Choice = NAMED, give_back: GiveBack | None = None
    ) -> None:
        """Open the confirm dialog for `verb` on `seen`; None: on the present snapshot.

        `choice`: how its requests were chosen. `give_back`: takes the verb back if it is refused, to the line that it
        was typed on; None: it came by a key.
        """
        from ppconsole.screens.confirm import Confirm

        snapshot = seen or self._model.state.snapshot
        if snapshot is not None:
            self._app.push_screen(Confirm(self._console, verb, snapshot, choice, give_back))

    def open_reader(self, name: str, stage: int | None = None, request: str = "") -> None:
        """Open the reader called `name`."""
        from ppconsole.screens import detail_screens as details
        from ppconsole.screens.clients_screen import ClientsScreen
        from ppconsole.screens.diagnosis_screen import DiagnosisScreen
        from ppconsole.screens.finished_screen import FinishedScreen
        from ppconsole.screens.incidents_screen import IncidentsScreen
        from ppconsole.screens.request_screen import RequestScreen
        from ppconsole.screens.streams_screen import StreamsScreen
        from ppconsole.screens.tiers_screen import TiersScreen
        from ppconsole.screens.topology_screen import TopologyScreen

        console = self._console
        screens: dict[str, Callable[[], Screen[None]]] = {
            "stacks": lambda: details.StacksScreen(console, stage),
            "logs": lambda: details.LogsScreen(console, stage),
            "events": lambda: details.EventsScreen(console),
            "diagnosis": lambda: DiagnosisScreen(console),
            "trends": lambda: details.TrendsScreen(console, self._main.panels),
            "set": lambda: details.OptionsScreen(console),
            "streams": lambda: StreamsScreen(console),
            "help": lambda: details.HelpScreen(console, "main", (), self._main.selected()),
            "show": lambda: RequestScreen(console, request),
            "incidents": lambda: IncidentsScreen(console),
            "finished": lambda: FinishedScreen(console),
            "topology": lambda: TopologyScreen(console),
            "clients": lambda: ClientsScreen(console),
            "tiers": lambda: TiersScreen(console),
        }
        source = self._console.source
        if name == "incidents" and isinstance(source, LastHour) and source.copied:
            self._console.report("incidents: they come by the link; Esc goes back to the present, then I", bad=True)
        elif name == "engines":
            self.open_engines()
        elif name == "history":
            self._open_history()
        else:
            self._app.push_screen(screens[name]())

    def find_ended(self, word: str) -> None:
        """Open the ended request with `word` in its id, or the list of several."""
        self._console.run_worker(
            self._find_ended(word), name="search", exit_on_error=False, exclusive=True, group="search"
        )

    async def _find_ended(self, word: str) -> None:
        from ppconsole.link.finished_search import find_ended, having
        from ppconsole.screens.finished_screen import FinishedScreen
        from ppconsole.screens.request_screen import RequestScreen

        before = self._screen()
        try:
            found = await find_ended(self._console.source, self._model.state.snapshot, having(word))
        except (LinkLost, QueryFailed) as error:
            self._console.report(str(error), bad=True)
            return
        if self._screen() is not before:
            return  # The operator is elsewhere by now.
        if not found.ended:
            text = f"no request with {clean(word)} in its id is live or kept: {found.kept}"
            self._console.report(text, bad=True)
        elif len(found.ended) > 1 and found.listed and before is self._main:
            self._app.push_screen(FinishedScreen(self._console, f'"{word}"'))
        else:
            if len(found.ended) > 1:
                self._console.report(
                    f"{len(found.ended)} ended requests have {clean(word)}; this is the newest", bad=False
                )
            self._app.push_screen(RequestScreen(self._console, found.ended[0].id, found.ended[0]))

    def open_engines(self, *, must_choose: bool = False) -> None:
        """Open the list of engines, and attach to the one that is chosen. `must_choose`: without one, leave."""
        from ppconsole.link.ended import EndedSource
        from ppconsole.screens.engines_screen import EnginesScreen

        snapshot = self._model.state.snapshot

        def chosen(engine: EngineRecord | EndedEngine | None) -> None:
            if engine is not None:
                self._console.switch_to(engine)
            elif must_choose:
                self._app.exit(NOTHING_CHOSEN)

        source = self._console.source
        present = snapshot.engine.id if snapshot is not None and source.live else ""
        if isinstance(source, EndedSource):
            present = source.ended.record.id
        self._app.push_screen(EnginesScreen(present, self._console), chosen)

    def _open_history(self) -> None:
        """Open the last hour of the engine, at its end."""
        snapshot = self._model.state.snapshot
        if self._model.playback is not None:
            self._console.report("this is the past already: ← and → move in it", bad=False)
        elif snapshot is not None:
            link = far_link(self._console.source)
            engine_id = snapshot.engine.id
            work = self._read_history(engine_id) if link is None else self._fetch_history(engine_id, link)
            self._console.run_worker(work, name="history", exit_on_error=False, exclusive=True, group="history")

    async def _fetch_history(self, engine_id: str, link: EngineLink) -> None:
        """Copy the last hour of an engine on another host, then open it."""
        from ppconsole.screens.far_copies import copy_history

        copies = await copy_history(self._console, link)
        if copies is not None:
            await self._read_history(engine_id, copies)

    async def _read_history(self, engine_id: str, copies: Path | None = None) -> None:
        past = await asyncio.to_thread(LastHour, engine_id, copies)
        if past.history.first is not None:
            self._console.open_past(past, "the past")
        else:
            self._console.report(no_history("this engine", past), bad=True)

    def open_help(self, screen: str, keys: tuple[Key, ...], selected: Selected = NOTHING_SELECTED) -> None:
        """Open the help of `screen`: the `selected` row in words, the legend, its `keys`."""
        from ppconsole.screens.detail_screens import HelpScreen

        self._app.push_screen(HelpScreen(self._console, screen, keys, selected))

    def open_selected(self) -> None:
        """Open the detail of the selected request or stage."""
        from ppconsole.screens.detail_screens import StageScreen

        if not self._main.selection.on_stages:
            if request := self._main.wanted_request():
                self.open_reader("show", request=request)
        elif (row := self._main.selection.stage_row()) is not None:
            self._app.push_screen(StageScreen(self._console, row.stage, row.rank))

    # --- verbs --------------------------------------------------------------------------------------------------

    def begin_verb(self, name: str) -> None:
        """Begin the verb of a key on the marked requests, or on the selected request or stage."""
        snapshot = self._model.state.snapshot
        if why := self._model.refusal(name):
            self._console.report(why, bad=True)
        elif snapshot is None:
            return
        elif name == "set-memory":
            from ppconsole.screens.memory import MemoryDialog

            self._app.push_screen(MemoryDialog(self._console, snapshot))
        elif isinstance(verb := self._build(name, snapshot), str):
            self.begin_command(verb, needs_words=True)
        elif verb is not None:
            marked = self._screen().selected().marked
            self.ask(verb, choice=MARKED if marked and commands.requests_of(verb) else NAMED)

    def _build(self, name: str, snapshot: Snapshot) -> Verb | str | None:
        """Return the verb of a key, or the line that it begins; None, and a report, without a target."""
        screen = self._screen()
        if screen is self._main and ROWS[name].target == "request" and not self._main.has_target():
            return None
        selected = screen.selected()
        try:
            return commands.of_key(name, snapshot, selected.requests, selected.stage, selected.client, selected.backend)
        except commands.UsageError as error:
            self._console.report(str(error), bad=True)
            return None

    def _screen(self) -> LineScreen:
        """Return the present screen, below any dialog."""
        found = (screen for screen in reversed(self._app.screen_stack) if isinstance(screen, LineScreen))
        return next(found, self._main)

    def begin_command(self, text: str, needs_words: bool) -> None:
        """Run a command, or open the command line with it if it needs more words."""
        if needs_words:
            self._screen().open_line("command", f"{text} ")
            return
        try:
            self._run(text, None)
        except commands.UsageError as error:
            self._screen().give_back("command", text, str(error), opens=True)

    def run_line(self, text: str, give_back: GiveBack) -> None:
        """Run a command line: the name of a screen, or a verb. One that is refused is given back, now or later."""
        try:
            self._run(text, give_back)
        except commands.UsageError as error:
            give_back(str(error), opens=True)

    def _run(self, text: str, give_back: GiveBack | None) -> None:
        """Run a command line; `give_back` as in `ask`. Raises UsageError."""
        text = commands.LINES.get(" ".join(text.split()), text)
        word, _, rest = text.partition(" ")
        word = commands.ALIASES.get(word, word)
        if word == "quit":
            self._app.exit(0)
        elif word == "set":
            self._set(rest)
        elif word == "sort":
            self._screen().sort_by(rest.strip())
        elif word == "mark":
            self._mark(rest)
        elif word == "show":
            self._show(rest.strip())
        elif word == "help" and rest.strip():
            self._open_topic(rest.strip().strip("'\""))
        elif word in commands.SCREENS:
            self.open_reader(word)
        else:
            self._run_verb(text, give_back)

    def _show(self, text: str) -> None:
        """Open the request that a part of its id names. Raises UsageError."""
        snapshot = self._model.shown.snapshot
        if not text:
            raise commands.UsageError("show: it needs a request: show REQUEST")
        try:
            self.open_reader("show", request=text if snapshot is None else whole_in(text, snapshot))
        except AmbiguousError as error:
            raise commands.UsageError(f"show: {error}") from None

    def _open_topic(self, name: str) -> None:
        """Open the entries of the legend with this name, and the command of it. Raises UsageError."""
        from ppconsole.screens.detail_screens import HelpScreen
        from ppconsole.view import help_page
        from ppconsole.view.legend import Section

        found = help_page.find(name)
        if (usage := commands.VERBS.get(name)) is not None:
            found = (Section("COMMAND", {usage.form: usage.text}), *found)
        if not found:
            raise commands.UsageError(f"help: {name!r} is neither a command nor a name in the legend; ? lists them")
        self._app.push_screen(HelpScreen(self._console, name, topic=found))

    def _set(self, rest: str) -> None:
        """Set an option of prompts; without words show them all. Raises UsageError."""
        settings = self._console.settings
        try:
            words = commands.words_of_line(rest)
            if not words:
                self.open_reader("set")
                return
            settings.set_prompt(settings.prompt.changed(words))
        except (commands.UsageError, OptionError) as error:
            raise commands.UsageError(f"set: {error}") from None
        except OSError as error:
            self._console.report(f"set: in effect, but not kept for the next start: {error}", bad=True)
        else:
            self._console.report(f"prompts: {settings.prompt.summary()}", bad=False)

    def unmark(self, verb: Verb) -> None:
        """Unmark the requests of a verb that was confirmed: the next verb must not hit them unseen."""
        self._main.selection.marked.remove(commands.requests_of(verb))

    def _mark(self, text: str) -> None:
        """Mark the requests that a filter matches. Raises UsageError."""
        snapshot = self._model.state.snapshot
        if snapshot is not None:
            found = commands.matching(text, snapshot)
            self._main.marking.add(found)
            self._main.paint()
            self._console.report(f"marked {len(found)} of {snapshot.requests_total} requests", bad=False)

    def _run_verb(self, text: str, give_back: GiveBack | None) -> None:
        """Parse and begin a verb. Raises UsageError."""
        snapshot, options = self._model.state.snapshot, self._console.settings.prompt
        requests = self._screen().selected().requests
        verb, choice = commands.asked(text, requests, options, snapshot)
        if why := self._model.refusal(row_of(verb).name, label_of(verb)):
            raise commands.UsageError(why)
        if isinstance(verb, Submit):
            self._following.submit(verb, give_back or partial(self._screen().give_back, "command", text))
        else:
            self.ask(verb, choice=choice, give_back=give_back)
