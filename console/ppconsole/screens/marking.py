"""Marking requests on the main screen: the selected one, all that the filter shows, those that match a filter."""

from __future__ import annotations

from collections.abc import Sequence

from ppconsole.screens.console import Console
from ppconsole.view.selection import Selection


class Marking:
    """Changes the marks of a selection, and reports why it cannot."""

    def __init__(self, console: Console, selection: Selection) -> None:
        self._console, self._selection = console, selection
        self.newest = False
        """Whether the marks changed after the filter: Esc then clears them first."""

    def toggle(self, request: str | None) -> None:
        """Mark or unmark the selected request, and select the next live one."""
        if self._selection.on_stages:
            self._console.report("Space marks a request; Tab goes to the requests", bad=True)
        elif request is not None and not self._selection.toggle_marks([request]):
            self._console.report(f"{request} has ended", bad=True)
        elif request is not None:
            self.newest = True
            self._selection.move_to_next_live()

    def toggle_shown(self) -> None:
        """Mark all requests that the filter shows; where all are marked, unmark them."""
        model = self._console.model
        if model.playback is not None:
            self._console.report(f"marks: {model.verbs_off()}", bad=True)
        elif not self._selection.toggle_marks([request.id for request in model.arranged()]):
            self._console.report("there is no request to mark", bad=True)
        self.newest = True

    def add(self, requests: Sequence[str]) -> None:
        """Mark requests beside those that are marked."""
        self._selection.marked.add(requests)
        self.newest = True

    def clear(self) -> bool:
        """Unmark all; return whether there were marks."""
        found = bool(self._selection.marked_ids())
        self._selection.marked.clear()
        return found

    def usable(self) -> bool:
        """Whether verbs have marks to act on, or none went with their requests; report if they did."""
        if not self._selection.marked_ids() and self._selection.marked.lost:
            self._console.report("the marked requests have ended; choose a request first", bad=True)
            return False
        return True
