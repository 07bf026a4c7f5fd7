"""The input line at the bottom: a prompt, a filter, a search or a command, each with label, placeholder and history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ppengine.protocol.backend_fields import without_secrets
from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input, Static

from ppconsole.model.safe import clean
from ppconsole.view.completion import Completion, advance

Mode = Literal["prompt", "filter", "search", "command"]
MAX_HISTORY = 200
OPTIONS_WIDTH = 72
"""From this width on the prompt's options are beside its label."""


class Face(NamedTuple):
    """The look of the line in one mode."""

    label: str
    mark: str
    placeholder: str


FACES: dict[Mode, Face] = {
    "prompt": Face("PROMPT", "›", "write a prompt; Enter sends it"),
    "filter": Face("FILTER", "/", "words of an id, owner, state or reason; !word excludes"),
    "search": Face("SEARCH", "/", "a text to find; empty: the next match"),
    "command": Face("COMMAND", ":", "a verb or a screen; Tab completes"),
}
CLOSED = "i writes a prompt"


class Completer(Suggester):
    """Suggests the first of the lines that a pure function finds for the line so far."""

    def __init__(self, find: Callable[[str], Sequence[str]]) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._find = find

    async def get_suggestion(self, value: str) -> str | None:
        """Return the completed line, or None; no word that has not begun, which would read as if it were typed."""
        if not value or value.endswith(" "):
            return None
        return next((line for line in self._find(value) if line != value), None)


class LineInput(Input):
    """One line of text. Pasting is for prompts alone: a filter or a command must be typed.

    `take` gets every key before it is typed and returns whether it was meant for the line. Textual's own way, bindings,
    would run Enter after the characters that came behind it in the same packet.
    """

    paste_allowed = True

    def __init__(self, take: Callable[[str], bool], *, id: str) -> None:
        super().__init__(id=id, compact=True, select_on_focus=False)
        self._take = take

    def on_key(self, event: events.Key) -> None:
        """Hand on the keys of the line."""
        if self._take(event.key):
            event.stop()
            event.prevent_default()

    def show(self, text: str) -> None:
        """Show `text`, with the cursor at its end, as if nothing had been typed."""
        with self.prevent(Input.Changed):
            self.value = text
        self.cursor_position = len(text)

    def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if self.paste_allowed and event.text:
            self.insert_text_at_cursor(clean(event.text))


class PromptLine(Horizontal):
    """Label and input. It has the focus only between `open` and Enter or Esc."""

    class Given(Message):
        """Enter was pressed."""

        def __init__(self, mode: Mode, text: str) -> None:
            super().__init__()
            self.mode = mode
            self.text = text

    class Typed(Message):
        """The text changed."""

        def __init__(self, mode: Mode, text: str) -> None:
            super().__init__()
            self.mode = mode
            self.text = text

    class Left(Message):
        """Esc was pressed."""

        def __init__(self, mode: Mode) -> None:
            super().__init__()
            self.mode = mode

    class Completed(Message):
        """Candidates of a completion came or went."""

    def __init__(
        self, complete: Callable[[str], Sequence[str]], history: dict[str, list[str]], *, id: str, classes: str = ""
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.mode: Mode = "prompt"
        self.takes_prompts = True
        """Whether the console may send prompts; otherwise the closed line offers none."""
        self.options = ""
        """The prompt's options in short, for the label."""
        self.error = ""
        """Why the text in the line was refused; empty: it was not, or another text is there."""
        self.completion = Completion()
        self._complete = complete
        self._history = history
        self._lines = [""]
        """Older lines, each as it was left, and the present one: Up and Down lose nothing."""
        self._at = 0
        self._label = Static(id="prompt-label", markup=False)
        self.input = LineInput(self._take, id="prompt-input")
        """The input field."""

    def compose(self) -> ComposeResult:
        """Label, then input."""
        yield self._label
        yield self.input

    def on_mount(self) -> None:
        """Begin closed."""
        self.input.suggester = None
        self.show_options(self.options)

    @property
    def is_open(self) -> bool:
        """Whether keys go to the line. Unlike `has_focus` of the field, this is true at the very key that opens it."""
        return self.is_mounted and self.screen.focused is self.input

    def open(self, mode: Mode, text: str = "", error: str = "") -> None:
        """Take the focus for `mode`. `error`: why `text` was refused."""
        self.mode, self.error = mode, error
        field = self.input
        field.paste_allowed = mode == "prompt"
        field.suggester = Completer(self._complete) if mode == "command" else None
        field.disabled = False
        field.show(text)
        self._begin_lines(text)
        self.completion = Completion()
        self.screen.set_focus(field)  # at once; `focus()` would let the next key pass
        self.show_options(self.options)

    def close(self) -> None:
        """Give the focus back."""
        self.mode, self.error = "prompt", ""
        self.input.show("")
        self.completion = Completion()
        self.screen.set_focus(None)
        self.show_options(self.options)

    def show_options(self, options: str) -> None:
        """Show label and placeholder of the mode, and beside the label of a prompt its options."""
        self.options = options
        face = FACES[self.mode]
        beside = f" {options}" if self.mode == "prompt" and self.screen.size.width >= OPTIONS_WIDTH else ""
        label = f"{face.label}{beside} {face.mark} "
        if self._label.content != label:
            self._label.update(label)
        placeholder = face.placeholder if self.is_open else CLOSED if self.takes_prompts else ""
        if self.input.placeholder != placeholder:
            self.input.placeholder = placeholder

    def on_input_changed(self, event: Input.Changed) -> None:
        """Report the text while it is typed."""
        event.stop()
        if event.value != self.completion.line:  # else it is a change from before Tab
            if self.completion.candidates:
                self.post_message(self.Completed())
            self.completion = Completion()
        if not event.value:
            self.error = ""
        if self.is_open:
            self.post_message(self.Typed(self.mode, event.value))

    def _take(self, key: str) -> bool:
        """Take Enter and Esc, up and down for the history, Tab for a completion; return whether it was one of them."""
        if key == "enter":
            self._enter()
        elif key == "escape":
            self.post_message(self.Left(self.mode))
        elif key in ("up", "down"):
            self._recall(-1 if key == "up" else 1)
        elif key in ("tab", "shift+tab"):
            self._tab(-1 if key == "shift+tab" else 1)
        else:
            return False
        return True

    def _enter(self) -> None:
        """Hand the line on and remember it. The field is empty at once: the next line may have come with this one."""
        mode, text = self.mode, self.input.value
        self.input.show("")
        self.error = ""
        history = self._history.setdefault(mode, [])
        kept = " ".join(map(without_secrets, text.split(" "))) if mode == "command" else text
        if kept and (not history or history[-1] != kept):
            history.append(kept)
            del history[:-MAX_HISTORY]
        self._begin_lines("")
        self.post_message(self.Given(mode, text))

    def _tab(self, step: int) -> None:
        """Complete the command as a shell does: what all candidates share, then one candidate after the other."""
        if self.mode == "command":
            self.completion = advance(self.completion, self.input.value, self._complete, step)
            self.input.show(self.completion.line)
            self.post_message(self.Completed())

    def _begin_lines(self, text: str) -> None:
        """Let Up and Down begin at `text`, which is the newest line."""
        self._lines = [*self._history.setdefault(self.mode, []), text]
        self._at = len(self._lines) - 1

    def _recall(self, step: int) -> None:
        """Show an older or newer line, the first that differs."""
        text, at = self.input.value, self._at
        self._lines[at] = text
        while 0 <= at + step < len(self._lines) and self._lines[at] == text:
            at += step
        if self._lines[at] != text:
            self._at, self.error, self.input.value = at, "", self._lines[at]
            self.input.cursor_position = len(self.input.value)
