"""Text of errors: one printable line of a bounded length for any input."""

from __future__ import annotations

LINE_MOST = 300
"""Characters of a line with an error."""
PREFIX = "error: "
TEXT_MOST = LINE_MOST - len(PREFIX)
"""Characters of an error without the word in front."""
_VALUE_MOST = 80
_HEAD = 0.35
"""Share of a cut text that comes from its begin; its end says what would be right."""


def one_line(text: str, most: int = TEXT_MOST) -> str:
    """Return `text` as one line of at most `most` characters that moves no cursor.

    Line ends become spaces, other characters without a picture their escapes, and a long text loses its middle.
    """
    text = _cut(text, 4 * most)  # Escaping a megabyte would take a second.
    return _cut("".join(map(_printable, text.replace("\r\n", "\n"))), most)


def shown(value: object, most: int = _VALUE_MOST) -> str:
    """Return a value as Python writes it, in one line of at most `most` characters."""
    try:
        return one_line(repr(value), most)
    except (ValueError, RecursionError):  # Python prints no whole number above 4,300 digits.
        return f"a value of type {type(value).__name__}, too large to print"


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\n\t" else character.encode("unicode_escape").decode("ascii")


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    head = int(most * _HEAD)
    return f"{text[:head]}…{text[head + 1 - most :]}"
