"""Bytes and counts as text."""

from __future__ import annotations


def size_text(size: int) -> str:
    """Return bytes for a reader: `96.0 KiB`, `1.4 MiB`, `60.1 GiB`."""
    for unit, shift in (("KiB", 10), ("MiB", 20)):
        if abs(size) < 2 ** (shift + 10):
            return f"{size / 2**shift:.1f} {unit}"
    return f"{size / 2**30:.1f} GiB"


def counted(number: int, noun: str) -> str:
    """Return `1 request`, `2 requests`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
