"""Answers made of blocks: the work that the forms of `/v1/responses` and `/v1/messages` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import msgspec

from ppengine.http.api_errors import ApiError, unavailable
from ppengine.http.generation import Generation, Part
from ppengine.http.reply.reply_blocks import Block, Change, ReplyBlocks
from ppengine.http.reply.reply_events import settled
from ppengine.http.reply.reply_reader import ReplyFactory

Reason = Literal["stop", "length", "tool_calls"]


class BlockAnswer(ABC):
    """See `Answer`. One reply, in blocks."""

    def __init__(self, generation: Generation, replies: ReplyFactory) -> None:
        self.generation, self.replies = generation, replies
        self.reader = replies.reader()
        self.blocks: list[Block] = []
        """The blocks that have begun."""
        self.reason: Reason = "stop"
        """Why the reply has ended."""
        self.stop_text: str | None = None
        """The stop text that has ended it."""
        self._changes = ReplyBlocks()

    @abstractmethod
    def begin(self) -> bytes:
        """See `Answer`."""

    @abstractmethod
    def end(self) -> bytes:
        """See `Answer`."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""

    @abstractmethod
    def refusal(self, error: ApiError) -> bytes:
        """See `Answer`."""

    @abstractmethod
    def message(self) -> msgspec.Struct:
        """Return the answer with all of `blocks`."""

    @abstractmethod
    def change(self, change: Change) -> bytes:
        """Return the events of a change."""

    def part(self, part: Part) -> bytes:
        """See `Answer`. Raises ApiError if an operator has aborted the request."""
        over = part.finish_reason is not None
        events = self._shown(self._changes.take(self.reader.push(part.text, len(part.token_ids), last=over)))
        if over:
            self._finish(part)
            events += self._shown(self._changes.end(complete=self.reason != "length"))
        return events

    def frame(self, choice: int) -> tuple[bytes, bytes] | None:
        """See `Answer`. Each event has a number, or is one of several."""
        return None

    def whole(self, parts: list[list[Part]]) -> msgspec.Struct:
        """See `Answer`. Raises ApiError if an operator has aborted the request."""
        events = [
            event
            for part in parts[0]
            for event in self.reader.push(part.text, len(part.token_ids), last=part.finish_reason is not None)
        ]
        self._finish(parts[0][-1])
        changes = [*self._changes.take(settled(events)), *self._changes.end(complete=self.reason != "length")]
        self.blocks = [change.block for change in changes if change.kind == "begin"]
        return self.message()

    def _shown(self, changes: Iterator[Change]) -> bytes:
        events = []
        for change in changes:
            if change.kind == "begin":
                self.blocks.append(change.block)
            events.append(self.change(change))
        return b"".join(events)

    def _finish(self, part: Part) -> None:
        reason = self.reader.finish_reason(part.finish_reason)
        if reason not in ("stop", "length", "tool_calls"):
            raise unavailable("the request was aborted by an operator of the engine")
        self.reason, self.stop_text = reason, part.stop_text  # type: ignore[assignment]
