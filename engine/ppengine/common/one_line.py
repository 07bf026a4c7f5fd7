"""Texts from outside as one printable line, for errors and logs."""

from __future__ import annotations

LINE_MOST = 300
"""Most characters of a line."""


def one_line(text: str, most: int = LINE_MOST) -> str:
    """Return the beginning of `text` in one line of at most `most` printable characters; others are escaped."""
    words = " ".join(text[:most].split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)[:most]
