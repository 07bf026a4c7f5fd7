"""A screen with the line at its bottom: commands everywhere, prompts, filters and searches on the screens with them."""

from __future__ import annotations

from functools import partial

from ppengine.protocol.verb_table import ROWS, Target
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip

from ppconsole.model.safe import clean
from ppconsole.model.sorting import BY_ARRIVAL, Order
from ppconsole.screens.console import Console, Selected
from ppconsole.screens.sort_picker import SortPicker
from ppconsole.view import completion
from ppconsole.view.cells import Row
from ppconsole.view.commands import names_for, sort_column
from ppconsole.view.keys import LINE_KEYS, footer
from ppconsole.widgets.note_strip import NoteStrip
from ppconsole.widgets.prompt import Mode, PromptLine


def line_key(key: str, mode: str) -> Binding:
    """Return the binding that opens the line at the bottom.

    With priority: it then has the focus before the next key is looked at. A slow link brings `i` and the first words
    in one packet, and those words must not be taken as verbs.
    """
    return Binding(key, f"line('{mode}')", mode, show=False, priority=True, id=f"line.{mode}")


def verb_keys(*targets: Target) -> list[BindingType]:
    """Return the bindings of the verbs on `targets`. Ids are stable, so that a keymap can change them."""
    rows = [row for row in ROWS.values() if row.target in targets]
    return [
        Binding(row.key.key, f"verb('{row.name}')", row.key.help, show=False, id=f"verb.{row.name}")
        for row in rows
        if row.key is not None
    ]


MODE_KEYS: dict[Mode, str] = {"prompt": "i", "filter": "/", "search": "/", "command": ":"}
"""Keys that open the line, by its mode."""
SCREEN_KEYS: list[BindingType] = [
    Binding(key, f"look('{name}')", name, show=False)
    for key, name in (
        ("d", "diagnosis"), ("v", "streams"), ("L", "topology"), ("K", "clients"), ("V", "tiers"), ("I", "incidents"),
        ("H", "finished"), ("e", "events"), ("T", "trends"), ("s", "stacks"), ("l", "logs"), ("w", "engines"),
        ("h", "history"),
    )
]  # fmt: skip
"""Keys that open a screen, from the main screen and from every reader."""
SCALE_KEYS: list[BindingType] = [
    Binding("z", "scale(-1)", "zoom the timeline in", show=False, id="timeline.in"),
    Binding("Z", "scale(1)", "zoom the timeline out", show=False, id="timeline.out"),
]
"""Keys of screens with a timeline."""
SORT_KEY = Binding("S", "sort", "sort by the letter of a column", show=False, priority=True, id="table.sort")
"""Key of screens with a table that sorts. With priority as the keys of the line: the next key is the letter."""


class LineScreen(Screen[None]):
    """Opens the line and begins verbs. Screens override `given`, `typed` and `left` for their modes."""

    AUTO_FOCUS = ""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self._composed = False

    def selected(self) -> Selected:
        """Return the request and the stage that a verb acts on."""
        return Selected()

    def paint(self) -> None:
        """Bring the screen up to date."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return blank lines, which boards cover: one strip for all, in place of one a line that Textual keeps."""
        if self.gutter.height:  # the tour's caption is a border
            return super().render_lines(crop)
        return [Strip.blank(crop.width, self.rich_style)] * crop.height

    def made_line(self, classes: str = "") -> PromptLine:
        """Return the line, for `compose`."""
        model = self.console.model
        return PromptLine(
            lambda text: completion.complete(
                text, model.state.snapshot, names_for(model.state.role), self.sort_columns()
            ),
            model.lines, id="prompt", classes=classes,
        )  # fmt: skip

    @property
    def line(self) -> PromptLine:
        """The line at the bottom."""
        return self.query_one(PromptLine)

    def show_notes(self) -> int:
        """Show the messages on rows of their own; return how many these are."""
        return self.query_one(NoteStrip).fit(self.console.notes, self.line.error)

    def line_foot(self, width: int) -> Row | None:
        """Return the key line while the line is open: candidates of a completion, or the keys of the mode."""
        line = self.line
        if not line.is_open:
            return None
        if line.completion.candidates:
            return completion.candidates_row(line.completion, width)
        note = completion.form_of(line.input.value) if line.mode == "command" else ""
        return footer(LINE_KEYS[line.mode], width, role=None, note=note if len(note) < width else "")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Refuse every key but those of the line while it is edited."""
        return not (self._composed and self.line.is_open)

    def action_verb(self, name: str) -> None:
        """Begin the verb on the selection."""
        self.console.navigation.begin_verb(name)

    def action_scale(self, by: int) -> None:
        """Cover more time with the timeline, or less."""
        self.console.model.scale_timeline(by)
        self.paint()

    def action_line(self, mode: Mode) -> None:
        """Open the line."""
        self.open_line(mode, "")

    def sort_columns(self) -> tuple[str, ...]:
        """Return the columns that sort the screen's table, by the names that filters have for them."""
        return ()

    @property
    def order(self) -> Order:
        """The order of the screen's table."""
        return BY_ARRIVAL

    def sort(self, column: str) -> None:
        """Sort the screen's table by one of `sort_columns`."""

    def action_sort(self) -> None:
        """Open the menu of columns."""
        self.app.push_screen(SortPicker(self.sort_columns(), self.order), self._sort_by_choice)

    def _sort_by_choice(self, column: str | None) -> None:
        """Sort by the column that was chosen."""
        if column is not None:
            self.sort(column)
            self.paint()

    def sort_by(self, column: str) -> None:
        """Sort by the column that was typed. Raises UsageError."""
        self.sort(sort_column(column, self.sort_columns()))
        self.paint()

    def open_line(self, mode: Mode, text: str, error: str = "") -> None:
        """Open the line for `mode` with `text` in it, and show so at once. `error`: why `text` was refused."""
        self.line.open(mode, text, error)
        self.paint()

    def given(self, mode: Mode, text: str) -> None:
        """Take the line after Enter: run the command. The error of one before it, in the same packet, is a message."""
        if self.line.error:
            self.console.report(self.line.error, bad=True)
        self.line.close()
        if mode == "command":
            self.run_line(mode, text)

    def run_line(self, mode: Mode, text: str) -> None:
        """Run the command that was entered, without the colons before it: one may have come with the line before."""
        if line := text.strip().lstrip(": "):
            self.console.navigation.run_line(line, partial(self.give_back, mode, text))

    def give_back(self, mode: Mode, text: str, why: str, *, opens: bool = False) -> None:
        """Show a text that was refused in the line again, with the reason.

        A line that is closed opens for a key alone (`opens`): the engine may answer while keys of the screen are
        pressed, or after it was left. Nor does the text take the place of another one. The message then has the keys
        that bring it back.
        """
        is_open = self in self.app.screen_stack and self.line.is_open
        is_there = is_open and self.line.mode == mode
        is_free = is_there and not self.line.input.value if is_open else opens
        if is_free and self.is_current:
            self.open_line(mode, text, clean(why))
        else:
            key = "↑" if is_there else f"↑ after {MODE_KEYS[mode]}"
            self.console.report(f"{why} ({key} brings it back)", bad=True)

    def typed(self, mode: Mode, text: str) -> None:
        """Take the line while it is typed."""

    def left(self, mode: Mode) -> None:
        """Leave the line after Esc."""
        self.line.close()

    # Textual calls a handler in every class that has it, so screens override the methods above instead.

    def on_prompt_line_given(self, event: PromptLine.Given) -> None:
        """Take the line."""
        self.given(event.mode, event.text)
        self.paint()

    def on_prompt_line_typed(self, event: PromptLine.Typed) -> None:
        """Take the line so far."""
        self.typed(event.mode, event.text)
        if event.mode == "command":
            self.paint()  # the form of the verb, in the key line

    def on_prompt_line_left(self, event: PromptLine.Left) -> None:
        """Leave the line."""
        self.left(event.mode)
        self.paint()

    def on_prompt_line_completed(self) -> None:
        """Show the candidates."""
        self.paint()
