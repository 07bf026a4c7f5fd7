"""Searching rows of text: which rows match, and how the matches are marked."""

from __future__ import annotations

from collections.abc import Sequence

from ppconsole.view.cells import Row, Seg, text_of

_HERE, _OTHER = "chip.name", "chip.warn"


def found(rows: Sequence[Row], text: str) -> list[int]:
    """Return the positions of the rows that have `text` in them; case is all one."""
    wanted = text.casefold()
    return [at for at, row in enumerate(rows) if wanted in text_of(row).casefold()] if wanted else []


def next_after(places: Sequence[int], at: int, step: int) -> int | None:
    """Return the next place after `at` (`step` 1) or before it (-1), round the end; None if there is none."""
    if not places:
        return None
    if step > 0:
        return next((place for place in places if place > at), places[0])
    return next((place for place in reversed(places) if place < at), places[-1])


def marked(row: Row, text: str, here: bool) -> Row:
    """Return `row` with every match marked. `here`: it is the match that was gone to."""
    whole, wanted = text_of(row).casefold(), text.casefold()
    if len(whole) != len(text_of(row)):
        return row  # a letter that folds into two: the places would be wrong
    inside: set[int] = set()
    start = whole.find(wanted)
    while start >= 0:
        inside |= set(range(start, start + len(wanted)))
        start = whole.find(wanted, start + len(wanted))
    segs: list[Seg] = []
    at = 0
    for part, style in row.segs:
        for letter in part:
            name = (_HERE if here else _OTHER) if at in inside else style
            if segs and segs[-1][1] == name:
                segs[-1] = (segs[-1][0] + letter, name)
            else:
                segs.append((letter, name))
            at += 1
    return Row(tuple(segs), row.fill)
