"""The layout of the main screen: panels that the operator shows and hides, and a right column that yields by need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ppengine.protocol.snapshot import RequestInfo

from ppconsole.model.state import ConsoleState
from ppconsole.model.trends import SPANS_S
from ppconsole.screens.console import Console
from ppconsole.view import request_table, stage_rows
from ppconsole.view.frame import WIDE, Frame, frame
from ppconsole.view.panels import PANELS, Choices, RightColumn, key_of, known
from ppconsole.view.trend_rows import next_span

SPAN_S = 300
"""Time span of the trends before one was chosen."""


class Layout:
    """Shares out the screen. Choices are kept for the next start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._right = RightColumn(console.model.now)
        self._frame: Frame | None = None
        self._width = 0

    @property
    def choices(self) -> Choices:
        """Panels that were shown or hidden by a key."""
        return known(self._console.settings.panels)

    def fit(
        self, size: tuple[int, int], state: ConsoleState, arranged: Sequence[RequestInfo], follows: bool, top: int,
        opened: Set[int],
    ) -> Frame:  # fmt: skip
        """Return the sizes for a terminal.

        `top`: first visible position of the request table; `opened`: stages with a row a rank.
        """
        self._width = size[0]
        snapshot, choices, wanted = state.snapshot, self.choices, len(arranged)
        count = stage_rows.count(snapshot, opened) if snapshot else 0
        beside = frame(*size, count, follows, wanted, choices)
        shown = arranged[top : top + beside.requests]
        cut = snapshot is not None and request_table.is_cut(snapshot, shown, beside.left)
        self._frame = frame(*size, count, follows, wanted, choices, self._right.look(cut, size[0]))
        return self._frame

    def note(self) -> str:
        """Return how a right column comes back that has yielded; empty: it has not."""
        made = self._frame
        if made is None or made.side or self._width < WIDE or not self._right.yields or not (made.kv_map or made.lanes):
            return ""
        return f"{key_of('kv-map')} brings back the KV map, hidden for WHY"

    def toggle(self, number: int) -> None:
        """Show or hide the panel of a key; 0: all by need again."""
        made = self._frame
        if number == 0:
            self._keep({})
            self._console.report("panels: each is shown by need again", bad=False)
        elif made is not None:
            panel = PANELS[number - 1]
            if panel in ("timeline", "kv-map") and self._width < WIDE:
                text = f"{panel}: it needs {WIDE} columns, and this terminal has {self._width}"
                self._console.report(text, bad=True)
                return
            shown = not made.shows(panel)
            self._keep({**self.choices, panel: shown})
            if not shown:
                self._console.report(f"{panel}: hidden; {key_of(panel)} shows it, 0 shows all by need", bad=False)

    @property
    def span_s(self) -> int:
        """Time span of the trends in seconds."""
        kept = self._console.settings.trends_s
        return kept if kept in SPANS_S else SPAN_S

    def change_span(self) -> None:
        """Show the trends of the next time span."""
        self._keep(self.choices, next_span(self.span_s))

    def _keep(self, choices: Mapping[str, bool], span_s: int | None = None) -> None:
        settings = self._console.settings
        try:
            settings.set_view(choices, settings.trends_s if span_s is None else span_s)
        except OSError as error:
            self._console.report(f"panels: in effect, but not kept for the next start: {error}", bad=True)
