"""Stop texts in a text that grows by pieces: found at their end, held back while one may begin."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, stops: Sequence[str], grown: int) -> int | None:
    """Return the start of the first stop text that ends in the last `grown` characters, or None."""
    found = [at for stop in stops if (at := text.find(stop, max(0, len(text) - grown - len(stop) + 1))) >= 0]
    return min(found, default=None)


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
