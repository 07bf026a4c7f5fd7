"""Events of a stream that differ in the text of one token alone: nearly all events of most streams.

With hundreds of streams, nothing of one is in the processor's caches when its token comes. So one object has all that
such an event needs, and counts by itself. The other objects of the stream get the counts before they work again.
"""

from __future__ import annotations

import asyncio

import msgspec

from ppengine.http.client_stats import Call
from ppengine.http.generation import Generation
from ppengine.http.outbox import Outbox, Writer

_encode = msgspec.json.Encoder().encode


class PlainEvents:
    """Takes the single tokens of a request with one sample; each has the same text in any output."""

    __slots__ = (
        "_at", "_begun", "_call", "_characters", "_choice", "_client", "_generation", "_head", "_known", "_size",
        "_tail", "_texts", "_tokenizer", "_transport", "_waiting", "_writer",
    )  # fmt: skip

    def __init__(
        self, generation: Generation, frame: tuple[bytes, bytes], call: Call, transport: asyncio.WriteTransport,
        outbox: Outbox, writer: Writer,
    ) -> None:  # fmt: skip
        """`generation` is even. `frame`: the bytes around a text. `writer` may be filled by the events."""
        self._generation, self._call, self._client = generation, call, call.client
        assert generation.tokenizer.fixed_texts is not None, "the generation is even"
        self._tokenizer, self._texts = generation.tokenizer, generation.tokenizer.fixed_texts
        self._transport, self._waiting, self._writer = transport, outbox.waiting, writer
        self._head, self._tail = frame
        self._size = len(self._head) + len(self._tail)
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
        try:
            text = self._texts.get(token) or self._tokenizer.fixed_text(token)
            body = _encode(text)
        except Exception:  # noqa: BLE001  # The next reader fails at it too, and that ends this request alone.
            return False
        if text is None:
            return False
        self._known += 1
        self._characters += len(text)
        client, before = self._client, self._at
        if client.now != now:
            client.turn(now)
        client.between[before] = client.between.get(before, 0) + 1
        self._at = now
        chunk = b"%x\r\n%b%b%b\r\n" % (self._size + len(body), self._head, body, self._tail)
        self._waiting.append((self._transport, chunk, self._writer))
        return True

    def settle(self) -> None:
        """Hand the counts to the other objects of the stream. It is the last call."""
        count = self._known - self._begun
        if count:
            self._generation.followed.counts[0] = self._known
            self._generation.catch_up(count, self._characters)
            self._call.times[self._choice] = self._at
