"""The menu of the columns that sort: each with its letter and its meaning, in as many columns as fit."""

from __future__ import annotations

from collections.abc import Sequence

from ppconsole.model.request_fields import COLUMN_HELP, LETTERS
from ppconsole.model.sorting import Order
from ppconsole.view.cells import DOWN, UP, Row, Seg, fit, row

MENU_KEYS: tuple[tuple[str, str], ...] = (("↑↓ ⏎", "choose"), ("R", "reverse"), ("esc", "cancel"))
_CELL_LEAST = 27


def across(columns: Sequence[str], width: int, height: int) -> int:
    """Return the number of columns of the menu: the fewest with which it is not higher than `height`."""
    wanted = -(-len(columns) // max(1, height))
    return max(1, min(wanted, width // _CELL_LEAST))


def rows(columns: Sequence[str], order: Order, at: int, width: int, height: int) -> list[Row]:
    """Return the menu with column number `at` selected, between its title and its keys."""
    beside = across(columns, width, height - 2)
    cell = width // beside
    lines = -(-len(columns) // beside)
    found = [row((fit(" sort by: the letter sorts, once more reverses", width), ""), fill="head")]
    for line in range(lines):
        segs: list[Seg] = []
        for number in range(line, len(columns), lines):
            segs += _entry(columns[number], order, number == at, cell)
        found.append(Row(tuple(segs)))
    keys = [part for key, text in MENU_KEYS for part in ((key, "key"), (f" {text}  ", "dim"))]
    return [*found, row(*keys)]


def _entry(column: str, order: Order, selected: bool, cell: int) -> list[Seg]:
    """Return one column: letter, name, its arrow if the table is sorted by it, and its meaning."""
    mark = "" if column != order.column else DOWN if order.descending else UP
    style = "select" if selected else "strong"
    text = fit(COLUMN_HELP[column], max(0, cell - 15))
    return [(">" if selected else " ", "accent"), (LETTERS[column], "key"), (f" {column + mark:<9} ", style),
            (f"{text}  ", "dim")]  # fmt: skip
