"""Rows of styled text measured in terminal cells, and columns that drop out by priority when it gets narrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from ppengine.protocol.clients import ROUTES
from rich.cells import cell_len, set_cell_size

from ppconsole.model.safe import clean

Seg = tuple[str, str]
"""Text and the name of its style (see `widgets.theme`)."""
Cell = Seg | tuple[Seg, ...]


class Row(NamedTuple):
    """One line of the screen. `fill` is the style behind all of it (a header bar, the selection)."""

    segs: tuple[Seg, ...]
    fill: str = ""


EMPTY = Row(())
_JOINER = "\u200d"
"""At the end of a text it would join what follows to it, and so take a cell away."""


def row(*segs: Seg, fill: str = "") -> Row:
    """Return a row of `segs`."""
    return Row(segs, fill)


def runs(cells: Iterable[Seg]) -> Iterator[Seg]:
    """Yield `cells` with neighbours of one style as one."""
    for style, same in groupby(cells, itemgetter(1)):
        yield "".join([text for text, _ in same]), style


def text_of(line: Row) -> str:
    """Return the text of a row without its styles."""
    return "".join(text for text, _ in line.segs)


def width_of(text: str) -> int:
    """Return the width of `text` in cells, by the rule that Rich and Textual draw with."""
    # An ellipsis takes one cell. Rich keeps 4,096 texts, which endless numbers behind one would fill.
    return len(text) if text.isascii() or text.replace("…", ".").isascii() else cell_len(text)


def cut(text: str, width: int) -> str:
    """Return the longest start of `text` that fits `width` cells; an ellipsis marks the cut."""
    if width_of(text) <= width:
        return text
    return _start(text, width - 1) + "…" if width > 0 else ""


def _start(text: str, width: int) -> str:
    """Return the longest start of `text` that fits `width` cells."""
    short = set_cell_size(text, width)
    # Half of a double-width character does not fit: Rich fills its cell with a space, which is not part of the text.
    return (short if text.startswith(short) else short[:-1]).rstrip(_JOINER)


def fit(text: str, width: int, align: str = "<") -> str:
    """Return `text` cleaned of control characters, in exactly `width` cells, aligned `<` or `>`."""
    if len(text) <= width and text.isascii() and text.isprintable():  # nearly always, and then it is short work
        return text.rjust(width) if align == ">" else text.ljust(width)
    short = cut(clean(text), width).rstrip(_JOINER)
    pad = " " * (width - width_of(short))
    return pad + short if align == ">" else short + pad


def id_text(name: str, width: int) -> str:
    """Return the id of a request for a column of `width`: of a long one over HTTP the end, as all begin alike."""
    if len(name) <= width or not name.startswith(tuple(ROUTES)):
        return name
    return f"…{name[len(name) - width + 1 :]}"


def wrap(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width` cells, broken at spaces where there are any."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in clean(paragraph).split(" "):
            candidate = f"{line} {word}" if line else word
            while width_of(candidate) > width:
                if line and width_of(word) <= width:
                    lines.append(line)
                    candidate = word
                else:
                    head = _start(candidate, width) or candidate[:1]
                    lines.append(head)
                    candidate = candidate[len(head) :]
                line = ""
            line = candidate
        lines.append(line)
    return lines


def clip(line: Row, width: int) -> Row:
    """Return `line` cut to `width` cells, an ellipsis where something is missing."""
    if sum(width_of(text) for text, _ in line.segs) <= width:
        return line
    segs, room = [], width
    for text, style in line.segs:
        size = width_of(text)
        if size >= room:
            segs.append((cut(text + " ", room), style))
            break
        segs.append((text, style))
        room -= size
    return Row(tuple(segs), line.fill)


def spread(left: Sequence[Seg], right: Sequence[Seg], width: int, fill: str = "") -> Row:
    """Return one row with `left` at the left edge and `right` at the right one; `right` yields when it is narrow."""
    used = sum(width_of(text) for text, _ in left)
    tail = sum(width_of(text) for text, _ in right)
    if used + tail + 1 > width:
        return clip(Row(tuple(left), fill), width)
    return Row((*left, (" " * (width - used - tail), ""), *right), fill)


class Column(NamedTuple):
    """A column. A low `priority` number stays longest; `grow` is how many cells more it takes when there is room."""

    key: str
    title: str
    width: int
    priority: int
    align: str = "<"
    grow: int = 0


FLEX = 10_000
"""`grow` of the column that takes the rest."""


class Placed(NamedTuple):
    """A column that is shown, with the width that it got."""

    column: Column
    width: int


def place(columns: Sequence[Column], width: int) -> list[Placed]:
    """Return the columns that fit `width` cells (one cell between them) in display order."""
    room = width
    chosen: set[str] = set()
    for column in sorted(columns, key=lambda column: column.priority):
        need = column.width + (1 if chosen else 0)
        if need > room:
            break
        room -= need
        chosen.add(column.key)
    shown = [column for column in columns if column.key in chosen]
    extra = dict.fromkeys(chosen, 0)
    for column in sorted(shown, key=lambda column: (column.grow, column.priority)):
        extra[column.key] = min(room, column.grow)
        room -= extra[column.key]
    return [Placed(column, column.width + extra[column.key]) for column in shown]


def fitted(columns: Sequence[Column], texts: Mapping[str, Sequence[str]], most: int = 24) -> list[Column]:
    """Return the columns; those in `texts` are as wide as title and longest text, up to `most`, and do not grow."""
    return [
        column._replace(width=min(most, max(map(width_of, (column.title, *texts[column.key])))), grow=0)
        if column.key in texts
        else column
        for column in columns
    ]


def column_at(placed: Sequence[Placed], x: int) -> str:
    """Return the key of the column at cell `x`; the gap behind a column belongs to it, and nothing is past the last."""
    end = 0
    for each in placed:
        end += each.width + 1
        if x < end:
            return each.column.key
    return ""


def header(placed: Sequence[Placed], fill: str = "head") -> Row:
    """Return the row of column titles."""
    titles = (fit(each.column.title, each.width, each.column.align) for each in placed)
    return Row(((" ".join(titles), ""),), fill)


UP, DOWN = "▲", "▼"
"""Marks of the sorted column: the smallest first, the largest first."""


def sorted_header(placed: Sequence[Placed], column: str, descending: bool, titles: Mapping[str, str]) -> Row:
    """Return the row of column titles with the sorted `column` marked. `titles`: those that differ from the column's.

    The mark is always visible: a title without room for it loses its last letter.
    """
    segs: list[Seg] = []
    for each in placed:
        key, mine = each.column.key, each.column.key == column
        name = titles.get(key, each.column.title)
        if mine:
            name = cut(name, each.width)[: each.width - 1] + (DOWN if descending else UP)
        segs += [(fit(name, each.width, each.column.align), "head.on" if mine else ""), (" ", "")]
    return Row(tuple(segs[:-1]), "head")


def table_row(placed: Sequence[Placed], cells: Mapping[str, Cell], fill: str = "") -> Row:
    """Return one row of a table. A cell of several segments must have its exact width; it is padded at the right."""
    segs: list[Seg] = []
    for each in placed:
        cell = cells[each.column.key]
        gap = " " if segs else ""
        if isinstance(cell[0], str):
            text, style = fit(str(cell[0]), each.width, each.column.align), str(cell[1])
            segs += [(gap, ""), (text, style)] if style and gap else [(gap + text, style)]
        else:
            segs.append((gap, ""))
            segs.extend(cell)
            used = sum(width_of(text) for text, _ in cell)
            segs.append((" " * max(0, each.width - used), ""))
    return Row(tuple(segs), fill)
