"""The text of a continuation whose tokens come in pieces, as processes make it that get token ids from the core."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.checkpoint.growing_text import GrowingText
from ppengine.checkpoint.tokenizer import DetokStream


class PieceText:
    """Text of one continuation, which `stops` end from token number `min_tokens` on."""

    __slots__ = ("_growing", "_stream", "given", "over")

    def __init__(self, stream: DetokStream, stops: Sequence[str], min_tokens: int) -> None:
        self._stream = stream
        self._growing = GrowingText(stream, stops, min_tokens) if stops else None
        """Its text, if a stop text may end it; otherwise all text is given out and none is kept."""
        self.given = 0
        """Characters that were given out."""
        self.over = False
        """Whether it has ended, by the core or by a stop text."""

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended it."""
        return None if self._growing is None else self._growing.stop_text

    @property
    def length(self) -> int:
        """Number of its characters, with those that are held back as a stop text may take them."""
        return self.given if self._growing is None else len(self._growing.text)

    @property
    def even(self) -> bool:
        """Whether the next token adds its fixed text alone, if it has one."""
        return self._growing is None and not self.over and self._stream.even

    def catch_up(self, characters: int) -> None:
        """Count the characters of tokens that have added their fixed texts."""
        self.given += characters

    def take(self, tokens: list[int], reason: str | None) -> tuple[str, int, int, str | None]:
        """Take tokens; `reason`: the finish reason of the core, if they are the last.

        Return the text that they add, how many of them have a text, how many belong to the continuation, and its
        finish reason. A stop token has no text. Tokens behind a stop text do not belong to it.
        """
        growing = self._growing
        if growing is not None:
            return self._take(growing, tokens, reason)
        if reason is None and len(tokens) == 1:
            # Nearly all of a stream.
            text = self._stream.push(tokens[0])
            self.given += len(text)
            return text, 1, 1, None
        by_token = reason == "stop" and bool(tokens)
        spoken = tokens[:-1] if by_token else tokens
        text = self._stream.extend(spoken)
        if reason is not None:
            self.over = True
            if not by_token:
                text += self._stream.flush()
        self.given += len(text)
        return text, len(spoken), len(tokens), reason

    def _take(self, growing: GrowingText, tokens: list[int], reason: str | None) -> tuple[str, int, int, str | None]:
        by_token = reason == "stop" and bool(tokens)
        kept, spoken = len(tokens), len(tokens) - by_token
        stopped = growing.push_each(tokens[:-1] if by_token else tokens)
        if stopped is not None:
            spoken, kept, by_token, reason = stopped, stopped, False, "stop"
        if reason is not None:
            self.over = True
            growing.end(by_stop_token=by_token)
        begin, self.given = self.given, growing.shown
        return growing.text[begin : self.given], spoken, kept, reason
