"""The menu of the columns that sort: each with its letter and its meaning, in as many columns as fit.

If a meaning would be cut, all are shorter. If these would be cut, the title has that of the selected column alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppconsole.model.request_fields import COLUMN_HELP, LETTERS, SHORT_HELP
from ppconsole.model.sorting import Order
from ppconsole.view.cells import DOWN, UP, Row, Seg, fit, row

MENU_KEYS: tuple[tuple[str, str], ...] = (("↑↓ ⏎", "choose"), ("R", "reverse"), ("esc", "cancel"))
_CELL_LEAST, _BESIDE = 27, 15
"""Fewest cells of a column of the menu, and those of its mark, letter and name."""


def across(columns: Sequence[str], width: int, height: int) -> int:
    """Return the number of columns of the menu: the fewest with which it is not higher than `height`."""
    wanted = -(-len(columns) // max(1, height))
    return max(1, min(wanted, width // _CELL_LEAST))


def rows(columns: Sequence[str], order: Order, at: int, width: int, height: int) -> list[Row]:
    """Return the menu with column number `at` selected, between its title and its keys."""
    beside = across(columns, width, height - 2)
    cell = width // beside
    lines = -(-len(columns) // beside)
    texts = _meanings(columns, cell - _BESIDE)
    title = "the letter sorts, once more reverses" if texts else COLUMN_HELP[columns[at]]
    found = [row((fit(f" sort by: {title}", width), ""), fill="head")]
    for line in range(lines):
        segs: list[Seg] = []
        for number in range(line, len(columns), lines):
            text = fit(texts.get(columns[number], ""), max(0, cell - _BESIDE))
            segs += _entry(columns[number], order, number == at, text)
        found.append(Row(tuple(segs)))
    keys = [part for key, text in MENU_KEYS for part in ((key, "key"), (f" {text}  ", "dim"))]
    return [*found, row(*keys)]


def _meanings(columns: Sequence[str], room: int) -> Mapping[str, str]:
    """Return the meanings of columns: the longest of which none is cut; empty if all would be."""
    for texts in (COLUMN_HELP, SHORT_HELP):
        if all(len(texts[column]) <= room for column in columns):
            return texts
    return {}


def _entry(column: str, order: Order, selected: bool, text: str) -> list[Seg]:
    """Return one column: letter, name, its arrow if the table is sorted by it, and its meaning."""
    mark = "" if column != order.column else DOWN if order.descending else UP
    style = "select" if selected else "strong"
    return [(">" if selected else " ", "accent"), (LETTERS[column], "key"), (f" {column + mark:<9} ", style),
            (f"{text}  ", "dim")]  # fmt: skip
