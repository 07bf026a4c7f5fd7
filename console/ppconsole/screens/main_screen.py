"""The main screen: banner, stages, pool, requests, events, output, prompt, keys; wide terminals have a right column."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from ppengine.protocol.control import Verb
from ppengine.protocol.inspection import BlocksDetail
from ppengine.protocol.snapshot import RequestInfo
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen

from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.model.reduce import set_filter
from ppconsole.model.rows import visible_requests
from ppconsole.screens.bindings import MAIN
from ppconsole.view import board, commands, keys
from ppconsole.view.banner import banner, verdict_line
from ppconsole.view.cursor import Cursor
from ppconsole.view.frame import MIN_HEIGHT, MIN_WIDTH, Frame, frame
from ppconsole.widgets.lines import Lines
from ppconsole.widgets.prompt import Mode, PromptLine

if TYPE_CHECKING:
    from ppconsole.app import ConsoleApp
    from ppconsole.screens.reader import Reader


_BELOW = 2
"""Prompt and key line: below output and events."""


class MainScreen(Screen[None]):
    """Paints on the app's tick and at once on a key. The selection belongs to ids."""

    AUTO_FOCUS = ""

    BINDINGS: ClassVar[list[BindingType]] = MAIN

    def __init__(self) -> None:
        super().__init__()
        self.requests: Cursor[str] = Cursor()
        self.stages: Cursor[int] = Cursor()
        self.stages_focused = False
        self.blocks: BlocksDetail | None = None
        self._map_of: tuple[int, str | None] = (0, None)
        """How many cells the block map has here, and the request that it lights."""
        self._frame: Frame = frame(80, 24, 1, False)
        self._blocks_wanted = asyncio.Event()
        self._composed = False

    @property
    def console(self) -> ConsoleApp:
        """The app."""
        app: ConsoleApp = self.app  # type: ignore[assignment]
        return app

    def compose(self) -> ComposeResult:
        """Banner and verdict; left and right; prompt; keys."""
        yield Lines(id="top")
        with Horizontal(id="middle"):
            yield Lines(id="left")
            yield Lines(id="right")
        yield PromptLine(lambda text: commands.complete(text, self.console.state.snapshot), id="prompt")
        yield Lines(id="foot", classes="one")

    def on_mount(self) -> None:
        """Paint from now on."""
        self._composed = True
        self.follow_blocks()
        self.paint()

    def on_resize(self) -> None:
        """Fit the new size."""
        self.paint()

    def on_screen_resume(self) -> None:
        """Show what is new."""
        self.paint()

    # --- painting ---------------------------------------------------------------------------------------------

    def arranged(self) -> list[RequestInfo]:
        """Return the requests as the table shows them."""
        return visible_requests(self.console.shown)

    def paint(self) -> None:
        """Bring every part up to date; only rows that changed are painted."""
        if not self._composed or not self.is_attached:
            return
        console, (width, height) = self.console, self.size
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            self.add_class("tiny")
            self.query_one("#left", Lines).show(keys.too_small(width, height, MIN_WIDTH, MIN_HEIGHT))
            return
        self.remove_class("tiny")
        state = console.shown
        count = len({stage.index for stage in state.snapshot.stages}) if state.snapshot else 0
        arranged = self.arranged()
        self._frame = size = frame(width, height, count, console.following.request is not None, len(arranged))
        right = self.query_one("#right", Lines)
        right.display = size.side > 0
        right.styles.width = size.side
        picked = self._picked(arranged)
        link = console.link()
        top = [banner(state.snapshot, link, width, console.title_text)]
        top.append(verdict_line(state.snapshot, link, width, console.history))
        self.query_one("#top", Lines).show(top)
        grey = console.grey
        self.query_one("#left", Lines).show(board.left(state, size, arranged, picked), faded=grey)
        beside = board.right(state, size, height - 4, self.blocks, picked)
        right.show(beside.rows, faded=grey)
        self._want_blocks(beside.cells, picked.request)
        self._paint_foot(width)
        for rack in self.query("ToastRack"):  # notes lie over requests, not over what is typed or comes in below them
            rack.styles.margin = (0, 0, _BELOW + size.output + size.events, 0)

    def _picked(self, arranged: list[RequestInfo]) -> board.Picked:
        """Anchor the selection again and return it."""
        ids = [request.id for request in arranged]
        request = self.requests.sync(ids)
        stage = self.stages.sync(self._stage_ids())
        top = self.requests.window(len(ids), self._frame.requests)
        return board.Picked(request, stage, self.stages_focused, self.console.following.request, top)

    def _stage_ids(self) -> list[int]:
        return [stage.index for stage in board.shown_stages(self.console.shown, self._frame)]

    def _paint_foot(self, width: int) -> None:
        """Show the keys of the present context."""
        line = self.query_one(PromptLine)
        shown = keys.STAGE_KEYS if self.stages_focused else keys.REQUEST_KEYS
        if line.input.has_focus:
            by_mode = {"prompt": keys.PROMPT_KEYS, "filter": keys.FILTER_KEYS, "command": keys.COMMAND_KEYS}
            shown = by_mode[line.mode]
        note = self.console.title_text if len(self.console.title_text) <= width // 2 else ""
        foot = keys.footer(shown, width, verbs=not self.console.verbs_off(), note=note)
        self.query_one("#foot", Lines).show([foot])

    def refresh_blocks(self) -> None:
        """Fetch the block map, while the right column is there and nothing else covers it."""
        if self._frame.side and self.is_current and not self.console.grey and self.console.source.live:
            self._blocks_wanted.set()

    def _want_blocks(self, cells: int, request: str | None) -> None:
        """Note what the map is to show; another request is fetched at once, and not with the next second."""
        changed, self._map_of = self._map_of[1] != request, (cells, request)
        if changed and self.blocks is not None:
            self.refresh_blocks()

    def follow_blocks(self) -> None:
        """Fetch the block map whenever it is wanted. One worker for good: one a fetch costs more than the fetch."""
        self.run_worker(self._follow_blocks(), exit_on_error=False, name="block map")

    async def _follow_blocks(self) -> None:
        while await self._blocks_wanted.wait():
            self._blocks_wanted.clear()
            before, (cells, request) = self.blocks, self._map_of
            try:
                answer = await self.console.source.inspect("blocks", cells=max(1, cells), request=request)
            except (LinkLost, QueryFailed):
                self.blocks = None  # the map says that there is none; the link's own state says why
            else:
                self.blocks = answer if isinstance(answer, BlocksDetail) else None
            if before is not None and before.request != request:
                self.paint()

    # --- moving -----------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Move the selection."""
        if self.stages_focused:
            self.stages.move(self._stage_ids(), by)
        else:
            self.requests.move([request.id for request in self.arranged()], by)
        self.paint()

    def action_page(self, by: int) -> None:
        """Move by what is visible."""
        self.action_move(by * max(1, self._frame.requests - 1))

    def action_swap_focus(self) -> None:
        """Move between stages and requests."""
        self.stages_focused = not self.stages_focused
        self.paint()

    def action_drill(self) -> None:
        """Open the detail of what is selected."""
        from ppconsole.screens import detail_screens  # not needed for the first screen, which should be there at once

        if self.stages_focused:
            stage = self.stages.sync(self._stage_ids())
            if stage is not None:
                self.app.push_screen(detail_screens.StageScreen(stage))
            return
        request = self.selected_request()
        if request is not None:
            self.app.push_screen(detail_screens.RequestScreen(request))

    def action_look(self, name: str) -> None:
        """Open a reader; with the focus on stages those of the selected one."""
        self.open_reader(name, self.stages.sync(self._stage_ids()) if self.stages_focused else None)

    def open_reader(self, name: str, stage: int | None = None, request: str = "") -> None:
        """Open the reader called `name`."""
        from ppconsole.screens import detail_screens
        from ppconsole.screens.diagnosis_screen import DiagnosisScreen
        from ppconsole.screens.streams_screen import StreamsScreen

        screens: dict[str, Callable[[], Reader]] = {
            "stacks": lambda: detail_screens.StacksScreen(stage), "logs": lambda: detail_screens.LogsScreen(stage),
            "events": detail_screens.EventsScreen, "diagnosis": DiagnosisScreen, "explain": DiagnosisScreen,
            "streams": StreamsScreen, "help": detail_screens.HelpScreen,
            "show": lambda: detail_screens.RequestScreen(request),
        }  # fmt: skip
        self.app.push_screen(screens[name]())

    def action_sort(self) -> None:
        """Sort by the next key."""
        self.console.next_sort()

    def action_reverse(self) -> None:
        """Turn the order round."""
        self.console.reverse_sort()

    def action_freeze(self) -> None:
        """Freeze or thaw the display."""
        self.console.toggle_freeze()

    def action_follow(self) -> None:
        """Follow the output of the selected request."""
        request = self.selected_request()
        if request is not None:
            self.console.following.follow(request)

    def action_copy_cli(self) -> None:
        """Copy the CLI line that shows what is selected."""
        request = None if self.stages_focused else self.requests.sync([each.id for each in self.arranged()])
        self.console.copy_cli(f"show {request}" if request else "status")

    def selected_request(self) -> str | None:
        """Return the selected request; says so when there is none."""
        found = self.requests.sync([request.id for request in self.arranged()])
        if found is None:
            gone = f"{self.requests.id} is not in the table any more; " if self.requests.id else ""
            self.console.report(f"{gone}choose a request first", bad=True)
        return found

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While a line is written no key means anything else."""
        return not (self._composed and self.query_one(PromptLine).input.has_focus)

    # --- verbs ------------------------------------------------------------------------------------------------

    def action_verb(self, name: str) -> None:
        """Begin the verb on what is selected."""
        from ppconsole.screens.memory import MemoryDialog

        why = self.console.verbs_off()
        if why:
            self.console.report(f"{name}: {why}", bad=True)
        elif name == "memory":
            snapshot = self.console.state.snapshot
            if snapshot is not None:
                self.app.push_screen(MemoryDialog(snapshot))
        else:
            verb = self._build(name)
            if verb is not None:
                self.console.ask(verb)

    def _build(self, name: str) -> Verb | None:
        """Return the verb for a key; None (and a report) when what it needs is not selected."""
        snapshot = self.console.state.snapshot
        if snapshot is None:
            return None
        if name in commands.ON_REQUEST:
            request = self.selected_request()
            return None if request is None else commands.on_request(name, request)
        stage = self.stages.sync(self._stage_ids()) if self.stages_focused else None
        verb = commands.on_engine(name, snapshot, stage)
        if verb is None:
            lacking = {
                "restart-stage": "is dead; choose one (Tab)", "cordon": "is chosen (Tab)",
                "continue": "is stopped by a signal",
            }  # fmt: skip
            self.console.report(f"no stage {lacking[name]}", bad=True)
        return verb

    # --- the line at the bottom -------------------------------------------------------------------------------

    def action_line(self, mode: Mode) -> None:
        """Open the line for a prompt, a filter or a command."""
        why = self.console.verbs_off() if mode == "prompt" else ""
        if why:
            self.console.report(f"prompt: {why}", bad=True)
            return
        text = self.console.state.filter if mode == "filter" else ""
        self.query_one(PromptLine).open(mode, text)
        self.paint()

    def begin_command(self, name: str, needs_words: bool) -> None:
        """Run a command, or open the line with its name where it needs more words."""
        if needs_words:
            self.query_one(PromptLine).open("command", f"{name} ")
            self.paint()
        else:
            self.run_line(name)

    def on_prompt_line_given(self, event: PromptLine.Given) -> None:
        """Send the prompt, keep the filter, or run the command."""
        line = self.query_one(PromptLine)
        if event.mode == "prompt":
            line.input.value = ""
            if event.text.strip():
                self.console.following.submit(event.text)
        else:
            line.close()
            if event.mode == "command" and event.text.strip():
                self.run_line(event.text.strip())
        self.paint()

    def on_prompt_line_typed(self, event: PromptLine.Typed) -> None:
        """Filter while typing."""
        if event.mode == "filter":
            self.console.state = set_filter(self.console.state, event.text)
            self.requests.forget()
            self.paint()

    def on_prompt_line_left(self, event: PromptLine.Left) -> None:
        """Leave the line; a filter is cleared."""
        self.query_one(PromptLine).close()
        if event.mode == "filter":
            self.console.state = set_filter(self.console.state, "")
        self.paint()

    def run_line(self, text: str) -> None:
        """Run a command line: a screen's name or a verb."""
        word, _, rest = text.partition(" ")
        if word == "quit":
            self.app.exit(0)
        elif word == "show" and rest.strip():
            self.open_reader("show", request=rest.strip())
        elif word in commands.SCREENS and word != "show":
            self.open_reader(word)
        else:
            self._run_verb(text)

    def _run_verb(self, text: str) -> None:
        """Parse and begin a verb; says what is wrong with the line."""
        why = self.console.verbs_off()
        selected = self.requests.sync([request.id for request in self.arranged()])
        try:
            verb = commands.parse(text, selected)
        except commands.UsageError as error:
            self.console.report(str(error), bad=True)
            return
        if why:
            self.console.report(f"{commands.name_of(verb)}: {why}", bad=True)
        elif commands.name_of(verb) == "submit":
            self.console.following.submit(text.partition(" ")[2])
        else:
            self.console.ask(verb)
