"""The rows of messages: as high as they need, and gone without any."""

from __future__ import annotations

from ppconsole.view.notes import Notes
from ppconsole.widgets.lines import Lines


class NoteStrip(Lines):
    """Shows messages on rows of their own, so that they cover nothing."""

    def __init__(self) -> None:
        super().__init__(id="note")
        self.display = False

    def fit(self, notes: Notes, error: str = "") -> int:
        """Show the messages, and the `error` of the line below; return how many rows they take."""
        rows = notes.rows(*self.screen.size, error)
        self.display = bool(rows)
        self.styles.height = len(rows)
        self.show(rows)
        return len(rows)
