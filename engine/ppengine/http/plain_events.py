"""Events of a stream that differ in the text of one token alone: nearly all events of most streams.

With hundreds of streams, nothing of one is in the processor's caches when its token comes. So one object has all that
such an event needs, and counts by itself. The other objects of the stream get the counts before they work again.
"""

from __future__ import annotations

import asyncio
import functools

from ppengine.http.client_stats import Call
from ppengine.http.generation import Generation
from ppengine.http.outbox import Outbox, Writer


@functools.cache
def _size_line(size: int) -> bytes:
    """Return the line before a chunk of `size` bytes. Texts of tokens have few sizes."""
    return b"%x\r\n" % size


class PlainEvents:
    """Takes the single tokens of a request with one sample; each has the same text in any output."""

    __slots__ = (
        "_at", "_begun", "_call", "_characters", "_choice", "_client", "_generation", "_head", "_json", "_known",
        "_size", "_tail", "_tokenizer", "_transport", "_waiting", "_writer",
    )  # fmt: skip

    def __init__(
        self, generation: Generation, frame: tuple[bytes, bytes], call: Call, transport: asyncio.WriteTransport,
        outbox: Outbox, writer: Writer,
    ) -> None:  # fmt: skip
        """`generation` is even. `frame`: the bytes around a text. `writer` may be filled by the events."""
        self._generation, self._call, self._client = generation, call, call.client
        self._tokenizer, self._json = generation.tokenizer, generation.tokenizer.known_json
        self._transport, self._waiting, self._writer = transport, outbox.waiting, writer
        self._head, tail = frame
        self._size, self._tail = len(self._head) + len(tail), tail + b"\r\n"
        self._choice = generation.first
        self._begun = self._known = generation.followed.counts[0]
        self._characters = 0
        self._at = call.times[self._choice]

    def take(self, offset: int, token: int, now: float) -> bool:
        """Make the event of the token behind `offset` others, of the time `now`, in an open block of the outbox.

        Return False, with nothing done, unless it is the next token and has a text of its own.
        """
        if offset != self._known:
            return False
        known = self._json.get(token)
        if known is None:
            try:
                known = self._tokenizer.fixed_json(token)
            except Exception:  # noqa: BLE001  # The next reader fails at it too, and that ends this request alone.
                return False
            if known is None:
                return False
        text, characters = known
        self._known = offset + 1
        self._characters += characters
        client, before = self._client, self._at
        if client.now != now:
            client.turn(now)
        between = client.between
        between[before] = between.get(before, 0) + 1
        self._at = now
        # A format would take twice as long.
        chunk = b"".join((_size_line(self._size + len(text)), self._head, text, self._tail))
        self._waiting.append((self._transport, chunk, self._writer))
        return True

    def settle(self) -> None:
        """Hand the counts to the other objects of the stream. It is the last call."""
        count = self._known - self._begun
        if count:
            self._generation.followed.counts[0] = self._known
            self._generation.catch_up(count, self._characters)
            self._call.times[self._choice] = self._at
