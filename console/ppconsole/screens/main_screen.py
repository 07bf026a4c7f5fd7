"""The main screen: banner, stages, pool, requests, events, output, prompt, keys; a right column if it is wide."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.geometry import Size

from ppconsole.model.facts import may_submit
from ppconsole.model.request_fields import FIELDS
from ppconsole.model.sorting import ARRIVAL, Order
from ppconsole.screens.bindings import MAIN
from ppconsole.screens.block_map import BlockMapFeed
from ppconsole.screens.console import Console, Selected
from ppconsole.screens.filter_line import FilterLine
from ppconsole.screens.following import Following
from ppconsole.screens.layout import Layout
from ppconsole.screens.marking import Marking
from ppconsole.view import board, commands, keys, trend_rows
from ppconsole.view.banner import banner, verdict_line
from ppconsole.view.cells import fit, row
from ppconsole.view.events import LEVEL_NOTES
from ppconsole.view.frame import MIN_HEIGHT, MIN_WIDTH
from ppconsole.view.selection import Selection
from ppconsole.widgets.lines import Lines
from ppconsole.widgets.note_strip import NoteStrip
from ppconsole.widgets.prompt import Mode


class MainScreen(FilterLine):
    """Paints on the app's tick and at once on a key. The selection belongs to ids."""

    BINDINGS: ClassVar[list[BindingType]] = MAIN

    def __init__(self, console: Console, following: Following) -> None:
        super().__init__(console)
        self.selection = Selection(console.model)
        self.marking = Marking(console, self.selection)
        self.block_map = BlockMapFeed(console, on_new_request=self.paint)
        self.panels = Layout(console)
        self._following = following
        self._model = console.model
        self._painted: Size | None = None
        """Size at the newest paint."""

    def compose(self) -> ComposeResult:
        """Banner and verdict; left and right; prompt; keys."""
        yield Lines(id="top")
        with Horizontal(id="middle"):
            yield Lines(id="left")
            yield Lines(id="right")
        yield NoteStrip()
        yield self.made_line()
        yield Lines(id="foot", classes="one")

    def on_mount(self) -> None:
        """Paint from now on: the screen is seen next."""
        self._composed = True
        self.block_map.start()

    def on_resize(self) -> None:
        """Fit the new size."""
        if self.size != self._painted:
            self.paint()

    def on_screen_resume(self) -> None:
        """Paint the present state."""
        self.paint()

    # --- painting ---------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """Bring every part up to date; only rows that changed are painted."""
        if not self._composed or not self.is_attached:
            return
        model, (width, height) = self._model, self.size
        self._painted = self.size
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            self.add_class("tiny")
            self.query_one("#left", Lines).show(keys.too_small(width, height, MIN_WIDTH, MIN_HEIGHT))
            return
        self.remove_class("tiny")
        state = model.shown
        arranged = model.arranged()
        followed = self._following.request
        top_row = self.selection.requests.top
        notes = self.show_notes()
        wanted = self.panels.fit((width, height), state, arranged, followed is not None, top_row, self.selection.opened)
        size = wanted.lowered(notes)
        self.selection.frame = size
        right = self.query_one("#right", Lines)
        right.display = size.side > 0
        right.styles.width = size.side
        picked = self.selection.picked(arranged, followed)
        link = model.link()
        top = [banner(state.snapshot, link, width, model.title)]
        top.append(verdict_line(state.snapshot, link, width, model.history))
        self.query_one("#top", Lines).show(top)
        grey = model.grey
        trends = trend_rows.rows(model.shown_trends, self.panels.span_s, size.left, size.trends, model.marks)
        self.query_one("#left", Lines).show(board.left(state, size, arranged, picked, trends), faded=grey)
        beside = board.right(state, size, height - 4 - notes, self.block_map.blocks, picked)
        right.show(beside.rows, faded=grey)
        if self.block_map.fit(beside.cells, picked.request):
            self.refresh_blocks()
        self._paint_foot(width)

    def _paint_foot(self, width: int) -> None:
        """Show the prompt's options, and the keys of the present context."""
        self.line.takes_prompts = may_submit(self._model.state)
        self.line.show_options(self.console.settings.prompt.summary())
        selection = self.selection
        shown = keys.MARKED_KEYS if selection.marked_ids() else keys.REQUEST_KEYS
        if selection.on_stages:
            shown = keys.stage_keys(selection.stage(), ranked=selection.has_ranks())
        if self._model.playback is not None:
            shown = keys.PAST_KEYS
        title = self._model.title if len(self._model.title) <= width // 2 else ""
        note = self.panels.note() or LEVEL_NOTES[self._model.state.level] or title
        foot = keys.footer(shown, width, role=self._model.role(), note=note)
        wrong = row((fit(error, width), "warn")) if (error := self.line_error) else None
        self.query_one("#foot", Lines).show([wrong or self.line_foot(width) or foot])

    def refresh_blocks(self) -> None:
        """Fetch the block map, while the right column is there and no other screen covers it."""
        if (
            self.selection.frame.shows("kv-map")
            and self.is_current
            and not self._model.grey
            and self.console.source.live
        ):
            self.block_map.fetch()

    def forget(self) -> None:
        """Forget the selection and the block map: they are of another engine or epoch."""
        self.selection.forget()
        self.block_map.blocks = None

    # --- selection --------------------------------------------------------------------------------------------

    def selected(self) -> Selected:
        """Return the request, or the stage, that has the focus, and the marked requests."""
        selection, marked = self.selection, self.selection.marked_ids()
        request = None if selection.on_stages or selection.marked.lost else selection.request()
        row = selection.focused_row()
        return Selected(request, None if row is None else row.stage, marked, None if row is None else row.rank)

    def has_target(self) -> bool:
        """Return whether requests are marked, or one is selected that has not ended; report if there is none."""
        if not self.marking.usable() or self.selection.marked_ids():
            return self.marking.usable()
        found = self.wanted_request()
        row = next((each for each in self._model.arranged() if each.id == found), None)
        if row is not None and row.state == "finished":
            self.console.report(f"{found} has ended: {row.finish_reason}", bad=True)
            return False
        if found is not None and (lost := self.selection.surprise()):
            self.console.report(f"{lost} has ended; {found} took its place: press the key again for it", bad=True)
            return False
        return found is not None

    def wanted_request(self) -> str | None:
        """Return the selected request; report if there is none."""
        found, lost = self.selection.request(), self.selection.requests.id
        if found is None:
            gone = f"{lost} is not in the table any more; " if lost else ""
            self.console.report(f"{gone}choose a request first", bad=True)
        return found

    def action_move(self, by: int) -> None:
        """Move the selection."""
        self.selection.move(by)
        self.paint()

    def action_page(self, by: int) -> None:
        """Move by a page."""
        self.action_move(by * max(1, self.selection.frame.requests - 1))

    def action_swap_focus(self) -> None:
        """Move between stages and requests."""
        self.selection.on_stages = not self.selection.on_stages
        self.paint()

    def action_ranks(self) -> None:
        """Open the selected stage into its ranks, or fold them."""
        if self.selection.has_ranks():
            self.selection.toggle_ranks()
        else:
            self.console.report("ranks: each stage of this engine has one", bad=False)
        self.paint()

    def action_panel(self, number: int) -> None:
        """Show or hide a panel; 0: all by need."""
        self.panels.toggle(number)
        self.paint()
        self.refresh_blocks()

    def action_span(self) -> None:
        """Change the time span of the trends."""
        self.panels.change_span()
        self.paint()

    def action_level(self) -> None:
        """Show warnings and errors alone in the log, then errors alone, then all events again."""
        self._model.raise_level()
        self.paint()

    # --- mouse ------------------------------------------------------------------------------------------------

    def _spot(self, event: events.MouseEvent) -> board.Spot:
        """Return the thing under the mouse; a line that is open is left, as the keys go elsewhere now."""
        if self.line.is_open and event.widget is not self.line.input:
            self.left(self.line.mode)
        if event.widget is not self.query_one("#left"):
            return board.Spot()
        selection, model = self.selection, self._model
        at = event.get_content_offset_capture(self.query_one("#left"))
        arranged, top = model.arranged(), selection.requests.top
        return board.spot(model.shown, selection.frame, arranged, top, at.x, at.y, selection.opened)

    def on_click(self, event: events.Click) -> None:
        """Select a row; sort by a column title, and reverse the order at the next click."""
        found = self._spot(event)
        if found.sort is not None:
            self.sort(found.sort)
        elif found.stage is not None:
            self.selection.stages.choose(found.stage)
            self.selection.on_stages = True
        elif found.request is not None:
            self.selection.requests.choose(found.request)
            self.selection.on_stages = False
        self.paint()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Move on in the table."""
        self.action_move(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Move back in the table."""
        self.action_move(-1)

    # --- keys -------------------------------------------------------------------------------------------------

    def action_drill(self) -> None:
        """Open the detail of the selection."""
        self.console.navigation.open_selected()

    def action_look(self, name: str) -> None:
        """Open a reader; with the focus on stages, the one of the selected stage."""
        self.console.navigation.open_reader(name, self.selection.focused_stage())

    def sort_columns(self) -> tuple[str, ...]:
        """Return the columns of requests."""
        return (ARRIVAL, *dict.fromkeys(field.name for field in FIELDS.values()))

    @property
    def order(self) -> Order:
        """The order of the requests."""
        return self._model.state.order

    def sort(self, column: str) -> None:
        """Sort the requests, and show the first ones."""
        self._model.sort_by(column)
        self.selection.begin_order()

    def action_reverse(self) -> None:
        """Reverse the order, and show the first requests."""
        self._model.reverse_sort()
        self.selection.begin_order()
        self.paint()

    def action_freeze(self) -> None:
        """Freeze or thaw the display."""
        if self._model.playback is not None:
            self.console.report("this is the past: Space pauses it", bad=True)
        else:
            self._model.toggle_freeze()
        self.paint()

    def action_mark(self) -> None:
        """Mark or unmark the selected request, and move on; in a past, pause or go on."""
        if self._model.playback is not None:
            self._model.playback.toggle_pause()
        else:
            self.marking.toggle(None if self.selection.on_stages else self.wanted_request())
        self.paint()

    def action_mark_all(self) -> None:
        """Mark all requests that the filter shows; where all are marked, unmark them."""
        self.marking.toggle_shown()
        self.paint()

    def action_follow(self) -> None:
        """Follow the output of the selected request."""
        request = self.wanted_request()
        if request is not None:
            self._following.follow(request)

    def action_copy_answer(self) -> None:
        """Copy the text of the followed request."""
        self._following.copy_answer()

    def action_copy_cli(self) -> None:
        """Copy the shell line that shows the selection."""
        request = None if self.selection.on_stages else self.selection.request()
        self.console.copying.command(("show", request) if request else ("status",))

    # --- the line at the bottom -------------------------------------------------------------------------------

    def action_line(self, mode: Mode) -> None:
        """Open the line for a prompt, a filter or a command.

        Also while the link is lost, which is soon over: what the operator types must not be taken as keys.
        """
        why = self._model.refusal("submit", "prompt") if mode == "prompt" else ""
        if why:
            self.console.report(why, bad=True)
        if not why or self._model.link().state in ("stale", "lost"):
            super().action_line(mode)

    def given(self, mode: Mode, text: str) -> None:
        """Send the prompt, keep the filter, or run the command, which `:` begins on the prompt line, too."""
        if mode != "prompt":
            super().given(mode, text)
        elif text.startswith(":"):  # the line stays open, as after a prompt
            self.run_line(mode, text)
        elif text.strip():
            prompt = text.removeprefix("\\") if text.startswith("\\:") else text
            submission = commands.prompt(prompt, self.console.settings.prompt)
            self._following.submit(submission, partial(self.give_back, mode, text))

    @property
    def filter_text(self) -> str:
        """The newest filter as it is written."""
        return self._model.state.filter

    @property
    def filter_error(self) -> str:
        """Why it cannot be understood."""
        return self._model.state.filter_error

    def shows_none(self) -> bool:
        """Return whether no request is in the table."""
        return not self._model.arranged()

    def action_clear(self) -> None:
        """Clear the filter or the marks, the newer first; without both, leave the past."""
        marks_first = self.marking.newest or not self._model.state.filter
        if marks_first and self.marking.clear():
            self.paint()
        elif self._model.state.filter:
            self.filter_by("")
        else:
            self.console.leave()

    def filter_by(self, text: str) -> None:
        """Show the requests that match `text`."""
        self._model.set_filter(text)
        self.marking.newest = False
        self.selection.requests.forget()
        self.paint()
