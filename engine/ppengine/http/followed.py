"""One request of the core's, followed: the pieces that come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ppengine.protocol.offline import Piece


class SingleTokens(Protocol):
    """A reader of nearly all tokens of a request; see `EventRow`."""

    def settle(self) -> None:
        """End its work, before another piece is read."""
        ...


@dataclass(eq=False, slots=True)
class Followed:
    """One request and the pieces that have come and are not read. `samples`: how many have not ended."""

    request: str
    samples: int
    counts: list[int]
    """Tokens that have come, by sample."""
    error: str = ""
    """Why no more will come, once that is so."""
    interval: int = 1
    """Tokens of a sample that are handed out together, after its first."""
    single: SingleTokens | None = None
    """Reader of the next single tokens, until another piece comes."""
    _waiting: list[Piece] = field(default_factory=list)
    _kept: dict[int, Piece] = field(default_factory=dict)
    """Pieces with fewer tokens, by sample."""
    _reader: Callable[[Piece], None] | None = None
    _ended: set[int] = field(default_factory=set)

    def to(self, reader: Callable[[Piece], None]) -> None:
        """Hand all pieces to `reader`, which raises nothing. After an error it gets a piece without tokens."""
        self._reader, waiting = reader, self._waiting
        self._waiting = []
        for piece in waiting:
            self.settle()  # The piece before may have begun the work of a reader of single tokens.
            reader(piece)

    def give(self, piece: Piece) -> None:
        """Hand a piece to the reader, or keep it until there is one, or until it has enough tokens."""
        if self.interval > 1 and not self.error:
            before = self._kept.pop(piece.sample, None)
            if before is not None:
                piece.offset = before.offset
                piece.token_ids, piece.logprobs = before.token_ids + piece.token_ids, before.logprobs + piece.logprobs
                piece.prompt_logprobs = before.prompt_logprobs or piece.prompt_logprobs
            if piece.offset and piece.finish_reason is None and len(piece.token_ids) < self.interval:
                self._kept[piece.sample] = piece
                return
        if self._reader is None:
            self._waiting.append(piece)
        else:
            self._reader(piece)

    def settle(self) -> None:
        """End the work of the reader of single tokens."""
        if self.single is not None:
            self.single.settle()
            self.single = None

    def leave(self) -> None:
        """End the reading: no further piece comes. The reader has this object, so both would wait for a collection."""
        self.settle()
        self._reader = None

    def take(self, piece: Piece) -> bool:
        """Take the new tokens of a piece; return False if tokens before it are missing."""
        if self.single is not None:
            self.settle()
        known = self.counts[piece.sample]
        if known != piece.offset and not piece.skip(known):
            return False
        if piece.finish_reason is not None:
            if piece.sample in self._ended:
                return True  # All was sent again, as an answer was lost.
            self._ended.add(piece.sample)
            self.samples -= 1
        self.counts[piece.sample] = known + len(piece.token_ids)
        if self.interval > 1 or self._reader is None:
            self.give(piece)
        else:
            self._reader(piece)
        return True
