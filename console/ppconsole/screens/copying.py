"""Copying: shell lines and answers go to the terminal's clipboard, and into a file: no terminal reports a refusal."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import App

from ppconsole.model.safe import clean
from ppconsole.screens.console import Console
from ppconsole.view.commands import shell_line

_SENT = "sent to the terminal's clipboard (OSC 52)"


class Copying:
    """Copies for all screens of a console."""

    def __init__(self, app: App[int], console: Console) -> None:
        self._app, self._console = app, console

    def command(self, words: Sequence[str]) -> None:
        """Copy the shell line of a command of the CLI; without words nothing."""
        snapshot = self._console.model.state.snapshot
        if words:
            line = shell_line(words, snapshot.engine.name if snapshot else "")
            self._console.report(f"{self._send(line)}: {line}", bad=False)

    def answer(self, request: str, text: str, left_out: int = 0) -> None:
        """Copy the answer of a request. `left_out`: characters before `text` that are not kept here."""
        safe = clean(text, newlines=True)
        more = f"; {left_out} before them are not kept here" if left_out else ""
        what = f"{len(safe)} characters of the answer of {request}"
        self._console.report(f"{what} {self._send(safe)}{more}", bad=False)

    def _send(self, text: str) -> str:
        """Send `text` to the terminal and keep it; return what became of it."""
        self._app.copy_to_clipboard(text)
        try:
            kept = self._console.settings.keep_copy(text)
        except OSError as error:
            return f"{_SENT} alone ({clean(str(error.strerror or error))})"
        return _SENT if kept is None else f"{_SENT}, kept in {kept}"
