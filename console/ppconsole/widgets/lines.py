"""A board of rows: repaints the rows that changed and no others."""

from __future__ import annotations

from collections.abc import Sequence

from textual.color import Color
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ppconsole.view.cells import EMPTY, Row
from ppconsole.widgets.strips import Brush
from ppconsole.widgets.theme import PALETTES, Palette


class Lines(Widget):
    """Shows rows, the first at the top; rows below the last one are blank."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._rows: list[Row] = []
        self._faded = False
        self._strips: dict[int, Strip] = {}
        """Strips of the rows that were painted and have not changed."""
        self._look: object = None
        self._brush = Brush(PALETTES["mono"], (), Color(0, 0, 0), False)

    def on_unmount(self) -> None:
        """Drop the strips: a screen that was left stays in memory until its last timer is over."""
        self._strips.clear()

    @property
    def rows(self) -> list[Row]:
        """The rows on the screen."""
        return self._rows

    def show(self, rows: Sequence[Row], faded: bool = False) -> None:
        """Show `rows`; only lines that changed are painted again."""
        old, self._rows = self._rows, list(rows)
        if faded != self._faded:
            self._faded = faded
            self._strips.clear()
            self.refresh()
            return
        width = self.size.width
        changed = [
            y
            for y in range(max(len(old), len(self._rows)))
            if (old[y] if y < len(old) else EMPTY) != (self._rows[y] if y < len(self._rows) else EMPTY)
        ]
        for y in changed:
            self._strips.pop(y, None)
        start = 0
        while start < len(changed):
            end = start
            while end + 1 < len(changed) and changed[end + 1] == changed[end] + 1:
                end += 1
            self.refresh(Region(0, changed[start], width, end - start + 1))
            start = end + 1

    def render_line(self, y: int) -> Strip:
        """Return line `y` as a strip."""
        if y not in self._strips:
            line = self._rows[y] if y < len(self._rows) else EMPTY
            self._strips[y] = self._brush.strip(line, self.size.width)
        return self._strips[y]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the lines of `crop`. A board has neither border nor padding to add."""
        look = self.palette, tuple(self.get_line_filters()), self.background_colors[1], self._faded
        if (look, self.size.width) != self._look:
            self._look, self._brush = (look, self.size.width), Brush(*look)
            self._strips.clear()
        strips = [self.render_line(y) for y in crop.line_range]
        if crop.column_span != (0, self.size.width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    @property
    def palette(self) -> Palette:
        """The palette of the current theme; without colour the one that needs none."""
        return PALETTES["mono" if self.app.no_color else self.app.theme]
