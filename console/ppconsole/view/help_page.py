"""The help of a screen as rows, and the legend of all screens as text; both come from `view.legend`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ppengine.protocol.verb_table import Role

from ppconsole.view import colours
from ppconsole.view.cells import EMPTY, Row, Seg, fit, row, text_of, width_of, wrap
from ppconsole.view.keys import Key, help_rows, offered
from ppconsole.view.legend import COMMANDS, SCREENS, Section

TEXT_WIDTH = 100
_KEY_CELL = 20
_NUMBER = re.compile(r"\d+")


class Page(NamedTuple):
    """All rows, and the positions of the headings."""

    rows: list[Row]
    headings: tuple[int, ...]


def page(
    screen: str, keys: Sequence[Key], width: int, selected: Sequence[Section] = (), theme: str = "pp-dark",
    role: Role = "admin", *, past: bool = False,
) -> Page:  # fmt: skip
    """Return the help of `screen`: the `selected` row in words, then legend and keys.

    On the main screen the keys come before the legend. Colours have the names of `theme`. Verbs that `role` does not
    cover have no key; in a `past` no verb has one, and the keys that move in it come first.
    """
    sections = [_section(section, width) for section in (*SCREENS[screen], colours.section(theme))]
    own = _key_rows(offered(keys, role), width)
    parts = [help_rows(width, role, past=past), *sections] if screen == "main" else [*sections, own]
    parts = [*(_section(section, width, most=1) for section in selected), *parts]
    rows: list[Row] = []
    headings = []
    for part in parts:
        headings.append(len(rows))
        rows += [*part, EMPTY]
    return Page(rows[:-1], tuple(headings))


def of_sections(sections: Sequence[Section], width: int) -> Page:
    """Return `sections` alone, each in one column."""
    rows: list[Row] = []
    headings = []
    for section in sections:
        headings.append(len(rows))
        rows += [*_section(section, width, most=1), EMPTY]
    return Page(rows[:-1], tuple(headings))


def find(name: str) -> tuple[Section, ...]:
    """Return the entries of the legend with this name, a column, letter or abbreviation, each with its screens.

    A name in capitals is found in small letters, too, if nothing else has that name, and then with any number: `r0`
    has the entry of `r7`.
    """
    return _entries(name, str) or _entries(name, str.casefold) or _entries(name, _with_any_number)


def _with_any_number(text: str) -> str:
    return _NUMBER.sub("0", text)


def _entries(name: str, form: Callable[[str], str]) -> tuple[Section, ...]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    styles: dict[str, str] = {}
    for screen, sections in SCREENS.items():
        for section in sections:
            terms = tuple((term, text) for term, text in section.rows.items() if _names(form(term), form(name)))
            if terms:
                place = f"ppconsole {COMMANDS[screen]}" if screen in COMMANDS else f"{screen} screen"
                found.setdefault((section.title, terms), []).append(place)
                styles.update(section.styles)
    return tuple(Section(f"{title}  {', '.join(on)}", dict(terms), styles) for (title, terms), on in found.items())


def _names(term: str, name: str) -> bool:
    """Return whether a term of the legend has this name: the whole, or one of the names that share a row."""
    return name in (term, *term.split(), *(part.rstrip(":") for part in term.split()))


def topic_text(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the lines of `sections`, for the command."""
    for section in sections:
        yield from _printed(section)


def text() -> Iterator[str]:
    """Yield the lines of the legend of all screens; a section that several screens share is printed once."""
    printed: dict[int, str] = {}
    for screen, sections in SCREENS.items():
        yield f"ppconsole {COMMANDS[screen]}" if screen in COMMANDS else f"{screen} screen"
        for section in sections:
            known = printed.setdefault(id(section), screen)
            if known != screen:
                yield f"  {section.title}: as on the {known} screen"
                continue
            yield from _printed(section)
        yield ""
    yield "all screens"
    for theme in ("pp-dark", "pp-light", "ansi-dark", "mono"):
        yield from _printed(colours.section(theme))


def _printed(section: Section) -> Iterator[str]:
    """Yield the lines of one section."""
    yield f"  {section.title}"
    yield from (f"  {text_of(line)}".rstrip() for line in _terms(section, TEXT_WIDTH - 2, 1))


def _section(section: Section, width: int, most: int = 3) -> list[Row]:
    """Return a heading and the terms, in as many columns as fit, at most `most`."""
    longest = max(map(width_of, section.rows.values()))
    across = max(1, min(most, (width - 1) // (_label(section) + longest + 1)))
    return [row((fit(f" {section.title}", width), ""), fill="head"), *_terms(section, width, across)]


def _label(section: Section) -> int:
    """Return the width of the column of abbreviations."""
    return 4 + max(map(width_of, section.rows))


def _terms(section: Section, width: int, across: int) -> list[Row]:
    """Return the terms in `across` columns; in a single one long meanings are wrapped."""
    label, cell = _label(section), (width - 1) // across
    found: list[list[Seg]] = []
    for name, meaning in section.rows.items():
        first, *more = wrap(meaning, max(10, cell - label))
        found.append([(fit(f"  {name}", label), section.styles.get(name, "strong")), (first, "")])
        found += [[(" " * label, ""), (part, "")] for part in more]
    height = -(-len(found) // across)
    rows = []
    for index in range(height):
        segs: list[Seg] = []
        for column, line in enumerate(found[index::height]):
            segs += [(" " * (column * cell - sum(width_of(text) for text, _ in segs)), ""), *line]
        rows.append(Row(tuple(segs)))
    return rows


def _key_rows(keys: Sequence[Key], width: int) -> list[Row]:
    """Return the keys of a screen in columns, as wide as the longest of them."""
    cell = max(_KEY_CELL, *(4 + width_of(key) + width_of(meaning) for key, meaning, _ in keys), 0)
    across = max(1, width // cell)
    cell = min(cell, width)
    rows = [row((fit(" KEYS", width), ""), fill="head")]
    for start in range(0, len(keys), across):
        segs: list[Seg] = []
        for key, meaning, _ in keys[start : start + across]:
            segs += [(f"  {key} ", "key"), (fit(meaning, cell - 3 - width_of(key)), "")]
        rows.append(Row(tuple(segs)))
    return rows
