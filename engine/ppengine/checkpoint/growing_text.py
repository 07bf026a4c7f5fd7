"""The text of a growing output: detokenized piece by piece, and cut at the first stop text."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.checkpoint.stop_text import StopPrefixes, find_stop
from ppengine.checkpoint.tokenizer import DetokStream


class GrowingText:
    """Text of one continuation.

    `stops` end it, from token number `min_tokens` on, and are no part of it.
    """

    __slots__ = ("_held_back", "_min_tokens", "_prefixes", "_stops", "_stream", "count", "stop_text", "text")

    def __init__(self, stream: DetokStream, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._stream: DetokStream | None = stream
        self._stops, self._min_tokens = stops, min_tokens
        self._prefixes = StopPrefixes(stops) if stops else None
        self._held_back = 0
        self.text = ""
        self.count = 0
        """Number of tokens so far."""
        self.stop_text: str | None = None
        """The stop text at which the text was cut."""

    @property
    def stopped(self) -> bool:
        """Whether the text was cut at a stop text."""
        return self.stop_text is not None

    @property
    def shown(self) -> int:
        """Number of characters that a reader may have: they will not change."""
        return len(self.text) - self._held_back

    def push(self, token: int) -> bool:
        """Append the text of a token; return whether it completes a stop text."""
        assert self._stream is not None, "the text has ended"
        return self._push_text(self._stream.push(token))

    def _push_text(self, piece: str) -> bool:
        self.count += 1
        self.text += piece
        stops = self._stops
        if not stops or not piece:
            return False
        if self.count >= self._min_tokens:
            at = find_stop(self.text, stops, len(piece))
            if at is not None:
                self.stop_text = next(stop for stop in stops if self.text.startswith(stop, at))
                self.text, self._held_back = self.text[:at], 0
                return True
        assert self._prefixes is not None
        self._held_back = self._prefixes.push(piece)
        return False

    def push_each(self, tokens: Sequence[int]) -> int | None:
        """Append the texts of tokens; return how many of them there are up to a stop text, None without one."""
        if len(tokens) == 1:
            return 1 if self.push(tokens[0]) else None
        if self.count < self._min_tokens:
            return next((count for count, token in enumerate(tokens, 1) if self.push(token)), None)
        assert self._stream is not None, "the text has ended"
        pieces, before = list(map(self._stream.push, tokens)), self.text
        more = "".join(pieces)
        self.text += more
        if not self._stops or find_stop(self.text, self._stops, len(more)) is None:
            self.count += len(tokens)
            self._held_back = 0 if self._prefixes is None else self._prefixes.push(more)
            return None
        self.text = before
        return next(count for count, piece in enumerate(pieces, 1) if self._push_text(piece))

    def extend(self, tokens: list[int], by_stop: bool = False) -> None:
        """Append the text of `tokens` up to a stop text.

        `by_stop`: the last one ended the output. It completes a stop text, or is a stop token, which has no text.
        """
        assert self._stream is not None, "the text has ended"
        sure = tokens[:-1] if by_stop else tokens
        if not self._stops:
            self.count += len(tokens)
            self.text += self._stream.extend(sure)
            return
        if self.push_each(sure) is not None or not by_stop or not tokens:
            return
        before = self.text
        if not self.push(tokens[-1]):
            self.text = before

    def end(self, by_stop_token: bool = False) -> None:
        """End the text; half a character at its end becomes U+FFFD, unless a stop text or a stop token ended it."""
        if not self.stopped and not by_stop_token and self._stream is not None:
            self.text += self._stream.flush()
        self._held_back, self._stream = 0, None
