"""The filter language: `state:wait owner:alice blk>40 !r-19`. All words must hold, and `!` before a word negates it.

A plain word is looked for in the id and the owner. `field:value` is the beginning of a text, `field=value` all of it;
figures take `: = != > >= < <=` and units (`age>5m`, `in>=2k`). Case is all one, and quotes keep spaces and signs.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["text", "phrase", "count", "seconds", "milliseconds", "percent"]
"""`phrase`: a text in which `:` looks for the value anywhere, not at the beginning alone."""

_UNITS: dict[Kind, dict[str, float]] = {
    "count": {"": 1, "k": 1e3, "m": 1e6, "g": 1e9},
    "seconds": {"": 1, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400},
    "milliseconds": {"": 1, "ms": 1, "s": 1e3, "m": 6e4},
    "percent": {"": 1, "%": 1},
}
"""Units of a figure, and the factor to the field's own unit."""
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ":": operator.eq, "=": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge, "<": operator.lt,
    "<=": operator.le,
}  # fmt: skip
_SIGN = re.compile(r"[^:=<>!]*?(>=|<=|!=|[:=<>])")
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))([a-zA-Z%]*)")


class FilterError(ValueError):
    """A filter that cannot be understood; one line that says what would be right."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a row by its name in filters. `read` returns its value; None: unknown, so no comparison holds."""

    name: str
    kind: Kind
    read: Callable[[Any], Any]
    help: str
    sorts: Callable[[Any], Any] | None = None
    """The value that sorts, if it is another one."""
    smallest_first: bool = False
    """Sorting begins with the smallest value, as that of texts always does."""

    @property
    def rank(self) -> Callable[[Any], Any]:
        """The value that sorts; None or an empty text: unknown."""
        return self.sorts or self.read

    @property
    def largest_first(self) -> bool:
        """Whether sorting begins with the largest value."""
        return self.kind not in ("text", "phrase") and not self.smallest_first


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter that was understood. `text` is as it was written."""

    text: str = ""
    tests: tuple[Callable[[Any], bool], ...] = ()

    def matches(self, row: Any) -> bool:
        """Return whether all words of the filter hold for a row."""
        return all(test(row) for test in self.tests)


def parse(text: str, fields: Mapping[str, Field]) -> Filter:
    """Return the filter that `text` writes. Plain words look into the fields `id` and `owner`. Raises FilterError."""
    return Filter(text.strip(), tuple(_test(word, fields) for word in _words(text)))


def quoted(value: str) -> str:
    """Return a value as a filter writes it, with all its characters."""
    return '"' + value.replace('"', '""') + '"'


class _Word(NamedTuple):
    """One word without its quotes. `mask` is as long as `plain`, with quoted characters blanked."""

    plain: str
    mask: str
    written: str

    def after(self, start: int) -> _Word:
        """Return the rest of the word."""
        return _Word(self.plain[start:], self.mask[start:], self.written)


def _words(text: str) -> list[_Word]:
    """Split at spaces outside of quotes; two quotes inside quotes are one. Raises FilterError."""
    words: list[_Word] = []
    plain = mask = written = ""
    inside, rest = False, f"{text} "
    while rest:
        character, rest = rest[0], rest[1:]
        if character == '"' and inside and rest.startswith('"'):
            plain, mask, written, rest = f'{plain}"', f"{mask}\0", f'{written}""', rest[1:]
        elif character == '"':
            inside, written = not inside, f'{written}"'
        elif inside or not character.isspace():
            plain, mask = plain + character, mask + ("\0" if inside else character)
            written += character
        elif written:
            words.append(_Word(plain, mask, written))
            plain = mask = written = ""
    if inside:
        raise FilterError(f'the quotes in {written.rstrip()} are open; they end with another "')
    return words


def _test(word: _Word, fields: Mapping[str, Field]) -> Callable[[Any], bool]:
    """Return the test of one word. Raises FilterError."""
    if word.mask.startswith("!"):
        if not word.after(1).plain:
            raise FilterError("! negates the word behind it: !alice, !state:wait")
        test = _test(word.after(1), fields)
        return lambda row: not test(row)
    sign = _SIGN.match(word.mask)
    if sign is None:
        wanted = word.plain.casefold()
        reads = [fields[name].read for name in ("id", "owner")]
        return lambda row: any(wanted in read(row).casefold() for read in reads)
    name, value = word.plain[: sign.start(1)], word.plain[sign.end(1) :]
    field = fields.get(name.casefold())
    if field is None:
        raise FilterError(_unknown(name, word.written, fields))
    if not value and not word.written.endswith('""'):
        raise FilterError(f"{word.written} needs a value: {_example(field)}")
    if field.kind in ("text", "phrase"):
        return _text_test(field, sign[1], value)
    return _figure_test(field, sign[1], value)


def _text_test(field: Field, sign: str, value: str) -> Callable[[Any], bool]:
    read, wanted = field.read, value.casefold()
    match sign:
        case ":" if field.kind == "phrase":
            return lambda row: wanted in read(row).casefold()
        case ":":
            return lambda row: read(row).casefold().startswith(wanted)
        case "=" | "!=":
            same = _COMPARE[sign]
            return lambda row: same(read(row).casefold(), wanted)
    raise FilterError(f"{field.name} is a text and has no {sign}: {_example(field)}")


def _figure_test(field: Field, sign: str, value: str) -> Callable[[Any], bool]:
    found, units = _NUMBER.fullmatch(value), _UNITS[field.kind]
    if found is None or found[2].casefold() not in units:
        known = " ".join(unit for unit in units if unit)
        raise FilterError(f"{field.name}{sign}{value}: {value!r} is no number with one of the units {known}")
    read, compare, wanted = field.read, _COMPARE[sign], float(found[1]) * units[found[2].casefold()]

    def test(row: Any) -> bool:
        present = read(row)
        return present is not None and compare(present, wanted)

    return test


def _unknown(name: str, word: str, fields: Mapping[str, Field]) -> str:
    close = difflib.get_close_matches(name.casefold(), fields, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    known = f"the fields are {' '.join(dict.fromkeys(field.name for field in fields.values()))}"
    if not name:
        return f"{word} lacks its field; {known}"
    return f"{word}: no field {name!r}; {meant}{known}"


def _example(field: Field) -> str:
    if field.kind in ("text", "phrase"):
        return f"{field.name}:value or {field.name}=value"
    unit = {"seconds": "5m", "milliseconds": "50ms", "percent": "50%"}.get(field.kind, "40")
    return f"{field.name}>{unit}"
