"""A reply as blocks, one after the other: reasoning, text, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ppengine.http.reply.reply_events import Event


@dataclass(eq=False, kw_only=True)
class Block:
    """A block and its text so far; of a call, the JSON of its arguments. `name` is the called function's."""

    kind: Literal["reasoning", "text", "call"]
    name: str = ""
    text: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


class Change(NamedTuple):
    """A block that begins, grows by `text`, or ends."""

    kind: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class ReplyBlocks:
    """Makes blocks of events. Read each change before the next, which changes the block.

    The rest of a broken call, which has begun, goes on as text.
    """

    def __init__(self) -> None:
        self._open: Block | None = None

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """Yield the changes by events."""
        for event in events:
            if event.kind == "call":
                yield from self.end()
                yield from self._begin(Block(kind="call", name=event.text))
            elif event.kind == "end":
                yield from self.end()
            elif event.kind == "arguments":
                yield from self._grow(event.text)
            elif event.kind == "cut":
                yield from self.end(complete=False)
            elif event.kind == "broken":
                yield from self.end(complete=False)
                yield from self._text("text", event.source)
            else:
                yield from self._text(event.kind, event.text)

    def end(self, *, complete: bool = True) -> Iterator[Change]:
        """End the block that is open."""
        block, self._open = self._open, None
        if block is not None:
            block.status = "completed" if complete else "incomplete"
            yield Change("end", block)

    def _text(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Change]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self.end()
            yield from self._begin(Block(kind=kind))
        yield from self._grow(text)

    def _begin(self, block: Block) -> Iterator[Change]:
        self._open = block
        yield Change("begin", block)

    def _grow(self, text: str) -> Iterator[Change]:
        assert self._open is not None, "a block has begun"
        self._open.text += text
        yield Change("grow", self._open, text)
