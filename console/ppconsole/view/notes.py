"""Messages to the operator: the newest of them have rows of their own above the lowest lines, for some seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ppconsole.view.cells import Row, row, wrap

GOOD_S, BAD_S = 4.0, 8.0
"""Seconds for which a message is shown: one of success, one of a failure."""
LOW = 20
"""Screens below this height have two rows for messages, others three: a longer text is cut, older ones yield."""


class Note(NamedTuple):
    """One message. `number` differs from that of another one with the same text."""

    number: int
    text: str
    bad: bool


class Notes:
    """The messages that are shown, the oldest first."""

    def __init__(self) -> None:
        self._kept: list[Note] = []
        self._count = 0

    def __iter__(self) -> Iterator[Note]:
        return iter(self._kept)

    def add(self, text: str, *, bad: bool) -> Note:
        """Show a message; an older one with the same text yields to it."""
        self._count += 1
        note = Note(self._count, text, bad)
        self._kept = [*(each for each in self._kept if each.text != text), note]
        return note

    def remove(self, note: Note) -> None:
        """Show a message no longer."""
        self._kept = [each for each in self._kept if each.number != note.number]

    def rows(self, width: int, height: int, error: str = "") -> list[Row]:
        """Return the rows of the newest messages, on a screen of `width` x `height`.

        `error`: that of the line below, which comes last and before all others.
        """
        found, most = list[Row](), 2 if height < LOW else 3
        kept = [*self._kept, Note(0, error, bad=True)] if error else self._kept
        for note in reversed(kept):
            lines = wrap(note.text, max(10, width - 2))
            if len(lines) > most:
                lines = [*lines[: most - 1], f"{lines[most - 1][: width - 3]}…"]
            if len(found) + len(lines) > most:
                break
            style = "bad" if note.bad else "info"
            mark = "! " if note.bad else "● "
            found[:0] = [row((mark if not at else "  ", style), (line, style)) for at, line in enumerate(lines)]
        return found
