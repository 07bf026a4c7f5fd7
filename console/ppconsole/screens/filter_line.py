"""The line that filters the table of a screen while it is typed."""

from __future__ import annotations

from abc import abstractmethod

from ppconsole.model.request_names import may_be_id
from ppconsole.screens.line_screen import LineScreen
from ppconsole.widgets.prompt import Mode


class FilterLine(LineScreen):
    """A screen with a filter. One that cannot be understood leaves the last one that could in effect."""

    @property
    @abstractmethod
    def filter_text(self) -> str:
        """The newest filter as it is written."""

    @property
    @abstractmethod
    def filter_error(self) -> str:
        """Why it cannot be understood; empty: it can."""

    @abstractmethod
    def filter_by(self, text: str) -> None:
        """Show the requests that match `text`."""

    @abstractmethod
    def shows_none(self) -> bool:
        """Return whether no request is in the table."""

    @property
    def line_error(self) -> str:
        """The error of the filter that is being typed, until Enter shows it above the line."""
        filters = self.line.is_open and self.line.mode == "filter" and not self.line.error
        return self.filter_error if filters else ""

    def action_line(self, mode: Mode) -> None:
        """Open the line; that of the filter has the present one."""
        self.open_line(mode, self.filter_text if mode == "filter" else "")

    def typed(self, mode: Mode, text: str) -> None:
        """Filter while typing. The error of a filter goes once it is right."""
        if mode == "filter":
            self.filter_by(text)
            self.line.error = self.line.error if self.filter_error else ""
            self.paint()

    def given(self, mode: Mode, text: str) -> None:
        """Keep the filter, which may find a request that has ended. One that is wrong stays in the line."""
        if mode == "filter" and self.filter_error:
            self.open_line(mode, text, self.filter_error)
            return
        super().given(mode, text)
        if mode == "filter" and may_be_id(text) and self.shows_none():
            self.console.navigation.find_ended(text.strip())

    def left(self, mode: Mode) -> None:
        """Leave the line; clear the filter."""
        super().left(mode)
        if mode == "filter":
            self.filter_by("")
