"""From rows of `view` to strips of terminal cells; text from outside is cleaned here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.strip import Strip

from ppconsole.model.safe import clean
from ppconsole.view.cells import Row, width_of
from ppconsole.widgets.theme import Palette


class Ink(NamedTuple):
    """A style as it comes on a row, and whether a gap of plain cells looks the same in it."""

    style: Style
    plain_gap: bool


class RowStrip(Strip):
    """A strip that goes away with its last user. Textual's keeps itself in its cache: 1,900 objects a paint, which only
    a search for garbage finds.
    """

    __slots__ = ()

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """Return the parts between `cuts`."""
        wanted = list(cuts)
        return [self] if wanted == [self.cell_length] else super().divide(wanted)


class Brush:
    """Turns rows into strips. Styles are mixed and filtered once for each name and fill: that costs most of a row.

    `filters` are those of the app, for `background`. `faded`: the figures are stale, so all rows are dimmed.
    """

    def __init__(self, palette: Palette, filters: Sequence[LineFilter], background: Color, faded: bool) -> None:
        self._palette, self._filters, self._background, self._faded = palette, filters, background, faded
        self._inks: dict[str, dict[str, Ink]] = {}
        """By the fill of a row, then by name."""

    def strip(self, line: Row, width: int) -> Strip:
        """Return `line` in exactly `width` cells."""
        inks = self._inks.setdefault(line.fill, {})
        segments: list[Segment] = []
        base = inks.get("") or self._mix(line.fill, "")
        pending, ink = "", base
        for text, name in line.segs:
            wanted = inks.get(name) or self._mix(line.fill, name)
            # A plain gap looks the same in its neighbour's colour: one style switch less to write over SSH.
            if wanted.style is ink.style or (not name and ink.plain_gap and text.isspace()):
                pending += text
                continue
            if pending:
                segments.append(Segment(clean(pending), ink.style))
            pending, ink = text, wanted
        if pending:
            segments.append(Segment(clean(pending), ink.style))
        # One cell a character, nearly always: then there is nothing to look up.
        used = sum(width_of(text) for text, _, _ in segments)
        if used < width:
            segments.append(Segment(" " * (width - used), base.style))
        strip = RowStrip(segments, max(used, width))
        return strip if used <= width else strip.crop(0, width)

    def _mix(self, fill: str, name: str) -> Ink:
        """Note and return the style called `name` on a row filled with `fill`; equal ones are one object."""
        palette = self._palette
        base = palette.base + palette.style(fill)
        style = palette.style(name)
        if base.reverse:  # only its weight, as its colours would make patches
            style = Style(bold=style.bold)
        wanted = base + style if name else base
        if self._faded:
            wanted = wanted + palette.style("stale")
        plain_gap = wanted.bgcolor == base.bgcolor and not wanted.reverse and not wanted.underline
        for each in self._filters:
            wanted = each.apply([Segment("x", wanted)], self._background)[0].style or wanted
        inks = self._inks[fill]
        same = next((ink for ink in inks.values() if ink.style == wanted), None)
        inks[name] = same or Ink(wanted, plain_gap)
        return inks[name]
