"""Stop texts in a text that grows by pieces: found at their end, held back while one may begin."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache


def find_stop(text: str, stops: Sequence[str], grown: int) -> int | None:
    """Return the start of the first stop text that ends in the last `grown` characters, or None."""
    found = [at for stop in stops if (at := text.find(stop, max(0, len(text) - grown - len(stop) + 1))) >= 0]
    return min(found, default=None)


class StopPrefixes:
    """The same as `may_begin` for a text that grows: each character is looked at once for each stop text.

    A text of one letter and stop texts that begin with it would take 10 ms a token otherwise, and all streams wait.
    """

    __slots__ = ("_lengths", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._lengths = [0] * len(stops)
        """Characters at the end of the text that begin each of them."""

    def push(self, piece: str) -> int:
        """Append a piece to the text; return how many characters at its end may begin a stop text."""
        lengths = self._lengths
        for number, stop in enumerate(self._stops):
            if lengths[number] or stop[0] in piece:
                lengths[number] = _advanced(stop, lengths[number], piece)
        return max(lengths)


def _advanced(stop: str, length: int, piece: str) -> int:
    """Return how many characters of `stop` end a text, in front of whose `piece` there were `length` (KMP)."""
    borders = _borders(stop)
    for char in piece:
        while length and stop[length] != char:
            length = borders[length - 1]
        length += stop[length] == char
        if length == len(stop):  # It is no stop before `min_tokens`.
            length = borders[-1]
    return length


@lru_cache(1024)
def _borders(stop: str) -> array[int]:
    """Return the length of the longest border of each beginning of `stop`."""
    borders, length = array("H", [0]), 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = borders[length - 1]
        length += stop[length] == char
        borders.append(length)
    return borders


def may_begin(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin a stop text."""
    return max(_overlap(text, stop) for stop in stops)


def _overlap(text: str, stop: str) -> int:
    begin = max(0, len(text) - len(stop) + 1)
    while (begin := text.find(stop[0], begin)) >= 0:
        if stop.startswith(text[begin:]):
            return len(text) - begin
        begin += 1
    return 0
