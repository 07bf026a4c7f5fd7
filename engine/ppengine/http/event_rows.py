"""Events of a stream that differ in the text of one token alone: nearly all events of most streams.

A stream that has come so far gets a row, and `event_rows.c` sends the events of all rows of a message. The Python that
did so took nearly as long as its system calls. The other objects of a stream get its counts before they work again.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import resource
from array import array
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Protocol

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.http import event_library
from ppengine.http.client_stats import Call, Client
from ppengine.http.event_library import ROW, TEXT, address_of
from ppengine.http.followed import Followed
from ppengine.protocol.offline import Singles

ROWS_MOST = 8192
"""Streams that have a row at once; others take the longer way."""
TEXTS_MOST = 2**18
"""Token ids with a text here; events of others take the longer way."""


def most_rows() -> int:
    """Return how many rows a process may have. Each takes a descriptor, and connections need most of them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(ROWS_MOST, limit // 4)


class Stream(Protocol):
    """As much of a `Generation` as a row needs. Its next token adds its fixed text alone, to its only choice."""

    tokenizer: Tokenizer
    followed: Followed
    first: int

    def catch_up(self, tokens: int, characters: int) -> None:
        """Count tokens and their characters."""
        ...


class _Table:
    """Memory with an address. Pages that are not used take none."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class EventRow:
    """One stream, from its creation until it settles. Its row begins once nothing waits in its transport."""

    __slots__ = ("begun", "call", "frame", "number", "over", "rows", "stream", "transport", "write")

    def __init__(
        self, rows: EventRows, stream: Stream, frame: tuple[bytes, bytes], call: Call,
        transport: asyncio.WriteTransport, write: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        """`stream` is the only one of its connection. `frame`: the bytes around a text. `write`: to the transport."""
        self.rows, self.stream, self.call, self.transport, self.write = rows, stream, call, transport, write
        self.frame = frame[0], frame[1] + b"\r\n"
        self.begun = stream.followed.counts[0]
        self.number: int | None = None
        self.over = False

    def settle(self) -> None:
        """Hand the counts to the other objects of the stream. It is the last call."""
        self.over = True
        if self.number is not None:
            self.rows.end(self, self.number)


class EventRows:
    """The rows of a process."""

    def __init__(self, library: ctypes.PyDLL | None = None, most: int = ROWS_MOST) -> None:
        self.library = library
        """The code of `event_rows.c`. Without it there are no rows, and every event takes the longer way."""
        self._rows, self._texts = _Table(ROW.size * ROWS_MOST), _Table(TEXT.size * TEXTS_MOST)
        self._spoken: dict[bytes, int] = {}
        """Texts in JSON, with their addresses."""
        self._message, self._result = event_library.Message(), event_library.Result()
        self._lists = array("I"), array("I")
        self._free = list(range(most - 1, -1, -1))
        self._numbers: dict[str, int] = {}
        """Rows by request."""
        self._owners: dict[int, EventRow] = {}
        self._waiting: list[EventRow] = []
        """Streams that will have a row."""
        self._clients: list[Client] = []
        self._client_numbers: dict[Client, int] = {}

    def add(
        self, stream: Stream, frame: tuple[bytes, bytes], call: Call, transport: asyncio.WriteTransport,
        write: Callable[[bytes], None],
    ) -> EventRow | None:  # fmt: skip
        """Give a stream a row as soon as its transport has sent all; None without the library."""
        if self.library is None:
            return None
        row = EventRow(self, stream, frame, call, transport, write)
        self._waiting.append(row)
        return row

    def send(self, tokens: Singles, now: float) -> Iterable[int]:
        """Send the events of tokens that came at the time `now`; return the positions of those without a row."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._waiting = [one for one in waiting if not one.over and not self._begin(one)]
        if not self._numbers:
            return range(len(tokens.requests))
        rows = array("i", map(self._numbers.get, tokens.requests, repeat(-1)))
        return self._send(rows, array("I", tokens.offsets), array("I", tokens.token_ids), now)

    def end(self, owner: EventRow, number: int) -> None:
        """End a row; its owner gets its counts."""
        at, *_, known, characters, descriptor, _ = ROW.unpack_from(self._rows.memory, number * ROW.size)
        stream = owner.stream
        del self._numbers[stream.followed.request], self._owners[number]
        self._free.append(number)
        os.close(descriptor)
        stream.followed.counts[0] = known
        if known > owner.begun:
            stream.catch_up(known - owner.begun, characters)
            owner.call.times[stream.first] = at

    def _begin(self, one: EventRow) -> bool:
        """Give a stream its row, unless bytes of it wait, which come first. Return whether that needs no other try."""
        if one.transport.is_closing() or not self._free:
            return True
        if one.transport.get_write_buffer_size():
            return False
        try:
            # The transport may close its descriptor, whose number then is another connection's, between two messages.
            descriptor = os.dup(one.transport.get_extra_info("socket").fileno())
        except OSError:
            return True  # The process has too many of them.
        one.number = number = self._free.pop()
        stream, (head, tail) = one.stream, one.frame
        ROW.pack_into(
            self._rows.memory, number * ROW.size, one.call.times[stream.first], address_of(head), address_of(tail),
            len(head), len(tail), one.begun, 0, descriptor, self._client(one.call.client),
        )  # fmt: skip
        self._numbers[stream.followed.request] = number
        self._owners[number] = one
        return True

    def _client(self, client: Client) -> int:
        if client not in self._client_numbers:
            self._client_numbers[client] = len(self._clients)
            self._clients.append(client)
        return self._client_numbers[client]

    def _send(
        self, rows: array[int], offsets: array[int], tokens: array[int], now: float, *, learn: bool = True
    ) -> list[int]:
        assert self.library is not None, "without it there are no rows"
        left, unknown, count, behind, out = list[int](), list[int](), len(rows), 0, self._result
        if len(self._lists[0]) < count:
            self._lists = array("I", bytes(4 * count)), array("I", bytes(4 * count))
            out.left, out.unknown = (each.buffer_info()[0] for each in self._lists)
        self._message.rows, self._message.offsets = rows.buffer_info()[0], offsets.buffer_info()[0]
        self._message.tokens, self._message.count, self._message.now = tokens.buffer_info()[0], count, now
        message, result = ctypes.addressof(self._message), ctypes.addressof(out)
        while behind < count:
            behind = self.library.send_events(self._rows.at, self._texts.at, TEXTS_MOST, message, behind, result)
            left += self._lists[0][: out.left_count]
            unknown += self._lists[1][: out.unknown_count]
            for group in out.groups[: out.group_count]:
                self._clients[group.client].add_later(group.at, group.count, now)
            if out.sent:
                self._send_rest(self._owners[rows[behind - 1]], tokens[behind - 1], out.sent)
        if unknown and learn:
            for at in unknown:
                self._learn(tokens[at], self._owners[rows[at]].stream.tokenizer)
            some = [array(each.typecode, map(each.__getitem__, unknown)) for each in (rows, offsets, tokens)]
            unknown = [unknown[at] for at in self._send(some[0], some[1], some[2], now, learn=False)]
        return left + unknown

    def _learn(self, token: int, tokenizer: Tokenizer) -> None:
        """Note the text of a token, if it is the same in any output."""
        try:
            known = tokenizer.fixed_json(token)
        except Exception:  # noqa: BLE001  # The longer way fails at it too, and that ends this request alone.
            return
        if known is not None and token < TEXTS_MOST:
            json, characters = known
            if json not in self._spoken:
                self._spoken[json] = address_of(json)
            TEXT.pack_into(self._texts.memory, token * TEXT.size, self._spoken[json], len(json), characters)

    def _send_rest(self, owner: EventRow, token: int, sent: int) -> None:
        """Leave the rest of an event to the transport, and later events with it: the client does not read."""
        known = owner.stream.tokenizer.fixed_json(token)
        assert known is not None, "a part of it was sent"
        (head, tail), (text, _) = owner.frame, known
        chunk = b"%x\r\n%b%b%b" % (len(head) + len(text) + len(tail) - 2, head, text, tail)
        owner.stream.followed.settle()
        owner.write(chunk[sent:])
