"""The input line at the bottom: a prompt, a filter or a command, each with its label and history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input, Static

Mode = Literal["prompt", "filter", "command"]
LABELS: dict[Mode, str] = {"prompt": "PROMPT › ", "filter": "FILTER / ", "command": "COMMAND : "}
MAX_HISTORY = 200


class Completer(Suggester):
    """Suggests what a pure function finds for the line so far."""

    def __init__(self, find: Callable[[str], str | None]) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._find = find

    async def get_suggestion(self, value: str) -> str | None:
        """Return the completed line, or None."""
        return self._find(value)


class LineInput(Input):
    """One line of text. Pasting is for prompts alone: a filter or a command must be typed."""

    paste_allowed = True

    def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if self.paste_allowed and event.text:
            self.insert_text_at_cursor(" ".join(event.text.split("\n")).replace("\r", ""))


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

    def __init__(self, complete: Callable[[str], str | None], *, id: str) -> None:
        super().__init__(id=id)
        self.mode: Mode = "prompt"
        self._completer = Completer(complete)
        self._history: dict[Mode, list[str]] = {"prompt": [], "filter": [], "command": []}
        self._at = 0

    def compose(self) -> ComposeResult:
        """Label, then input."""
        yield Static(LABELS["prompt"], id="prompt-label", markup=False)
        yield LineInput(id="prompt-input", compact=True, placeholder="i writes a prompt", select_on_focus=False)

    @property
    def input(self) -> LineInput:
        """The input field."""
        return self.query_one(LineInput)

    def open(self, mode: Mode, text: str = "") -> None:
        """Take the focus for `mode`."""
        self.mode = mode
        self.query_one("#prompt-label", Static).update(LABELS[mode])
        field = self.input
        field.paste_allowed = mode == "prompt"
        field.suggester = self._completer if mode == "command" else None
        field.disabled = False
        field.value = text
        field.cursor_position = len(text)
        self._at = len(self._history[mode])
        self.screen.set_focus(field)  # at once; `focus()` would let the next key pass

    def close(self) -> None:
        """Give the focus back."""
        self.mode = "prompt"
        self.query_one("#prompt-label", Static).update(LABELS["prompt"])
        self.input.value = ""
        self.screen.set_focus(None)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Hand the line on and remember it."""
        event.stop()
        mode, text = self.mode, event.value
        history = self._history[mode]
        if text and (not history or history[-1] != text):
            history.append(text)
            del history[:-MAX_HISTORY]
        self._at = len(history)
        self.post_message(self.Given(mode, text))

    def on_input_changed(self, event: Input.Changed) -> None:
        """Report the text while it is typed."""
        event.stop()
        if self.input.has_focus:
            self.post_message(self.Typed(self.mode, event.value))

    def on_key(self, event: events.Key) -> None:
        """Esc leaves; up and down go through the history; Tab completes a command."""
        if event.key == "escape":
            self.post_message(self.Left(self.mode))
        elif event.key in ("up", "down"):
            self._recall(-1 if event.key == "up" else 1)
        elif event.key == "tab":
            self.input.action_end()
            self.input.action_cursor_right()
        else:
            return
        event.stop()
        event.prevent_default()

    def _recall(self, step: int) -> None:
        """Show an older or newer line."""
        history = self._history[self.mode]
        self._at = max(0, min(len(history), self._at + step))
        self.input.value = history[self._at] if self._at < len(history) else ""
        self.input.cursor_position = len(self.input.value)
