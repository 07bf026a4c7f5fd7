"""Rows of a dialog in a terminal that is too low for all of them: those of least weight go first, and are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ppconsole.view.cells import EMPTY, Row, row

VITAL, TARGET, ASIDE, DETAIL, SPARE = range(5)
"""Weights: vital rows stay longest, such as the ones that say whether requests lose something."""


class Weighed(NamedTuple):
    """A row with its weight, of a part of the dialog."""

    row: Row
    weight: int
    part: int = 0


BLANK = Weighed(EMPTY, SPARE)


def weighed(rows: Sequence[Row], weight: int) -> list[Weighed]:
    """Return `rows` with one weight."""
    return [Weighed(each, weight) for each in rows]


def lowered(rows: Sequence[Weighed], room: int) -> list[Weighed]:
    """Return the rows that fit `room`: first the blank ones go, then those of least weight, the last ones first.

    A row says how many were left out.
    """
    blank = [at for at, each in enumerate(rows) if each.row == EMPTY]
    dropped = set(blank[-(len(rows) - room) :]) if len(rows) > room else set()
    found = [each for at, each in enumerate(rows) if at not in dropped]
    if len(found) <= room:
        return found
    order = sorted(range(len(found)), key=lambda at: (found[at].weight, at))
    stay, first = set(order[: max(0, room - 1)]), min(order[max(0, room - 1) :])
    text = f"… {len(found) - len(stay)} more lines: the terminal is too low"
    notice = Weighed(row((text, "warn")), VITAL, found[first].part)
    return [notice if at == first else each for at, each in enumerate(found) if at in stay or at == first]
