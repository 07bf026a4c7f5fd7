"""Bytes for connections: those of one message of the core are written together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from http_world import served, world
from ppengine.http import connection, front_link
from ppengine.http.event_stream import EventStream
from ppengine.http.followed import Followed
from ppengine.http.outbox import BUFFER_MOST, Outbox
from ppengine.protocol.frames import encode
from ppengine.protocol.offline import News, Piece
from test_http_streams import Transport, answer, generation, new_call


class Broken(Transport):
    """A connection that takes no byte."""

    def write(self, data: bytes) -> None:
        raise OSError("broken")

    def abort(self) -> None:
        self.closed = True


def test_an_outbox_writes_at_the_end_of_a_message_and_otherwise_at_once() -> None:
    outbox, filled = Outbox(), list[str]()
    first, second, closed, broken = Transport(), Transport(), Transport(), Broken()
    closed.closed = True
    writers: list[Any] = [SimpleNamespace(fill=lambda name=name: filled.append(name)) for name in "ab"]
    connections: list[Any] = [first, broken, second, closed, first]
    with outbox:
        for transport in connections:
            outbox.write(transport, b"x" * 10, writers[0])
        assert not first.written and not second.written
    assert (first.written, second.written) == (b"x" * 20, b"x" * 10)
    assert broken.closed and not filled, "one that fails is cut, and the others are written to"
    outbox.write(connections[0], b"y" * BUFFER_MOST, writers[1])
    assert len(first.written) == BUFFER_MOST + 20 and filled == ["b"]


def test_a_link_writes_behind_its_work_on_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_link, "FrontSocket", lambda endpoint, take: None)
    link = front_link.FrontLink("x", "http0", lambda state: None)
    transport, seen = Transport(), list[bytes]()
    connection: Any = transport

    def read(piece: Piece) -> None:
        link.outbox.write(connection, piece.request.encode(), SimpleNamespace(fill=lambda: None))
        seen.append(transport.written)

    for name in ("a", "b"):
        link._open[name] = Followed(name, 1, [0])
        link._open[name].to(read)
    link._read(encode(News(nonce=1, cursor=1, pieces=[Piece(name, 0, 0, [5]) for name in ("a", "b")])))
    assert seen == [b"", b""] and transport.written == b"ab"


class Counting(Transport):
    """A connection that counts its system calls."""

    calls = 0

    def write(self, data: bytes) -> None:
        super().write(data)
        self.calls += 1


async def test_the_last_events_of_an_answer_are_one_write_with_its_end() -> None:
    one, connected, sent = generation(), Counting(), list[Any]()
    transport: Any = connected

    async def send(message: Any) -> None:
        sent.append(message)

    stream = EventStream(answer("completion"), [one], new_call(), transport, close=lambda: b"0\r\n\r\n")
    running = asyncio.ensure_future(stream.run(send))
    await asyncio.sleep(0)
    for token, reason in enumerate([None, None, "length"]):
        with one.link.outbox:
            one.followed.take(Piece("r", 0, token, [token + 3], [], reason))
        assert connected.calls == token + 1
    assert connected.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert await running is None
    assert connected.calls == 3 and not sent


def test_the_choices_of_an_answer_are_not_copied_again_and_again() -> None:
    class Chunk(bytes):
        """It counts the bytes that are copied when others are joined to it."""

        copied = 0

        def __add__(self, other: bytes) -> Chunk:  # type: ignore[override]
            Chunk.copied += len(self)
            return Chunk(bytes(self) + other)

    outbox, connected, chunk, count = Outbox(), Counting(), Chunk(b"x" * 300), 1024
    transport: Any = connected
    writer: Any = SimpleNamespace(fill=lambda: None)
    with outbox:
        for _ in range(count):
            outbox.write(transport, chunk, writer)
    assert len(connected.written) == 300 * count and connected.calls < count / 4
    assert Chunk.copied < 20 * 300 * count, "not the square"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"completions", b'{"prompt": [5], "stream": true}'),
        (b"chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'),
    ],
)
async def test_each_answer_of_a_connection_has_one_end(path: bytes, body: bytes) -> None:
    head = b"POST /v1/%b HTTP/1.1\r\ncontent-length: %d\r\n" % (path, len(body))
    async with world("It rains.") as one, served(one.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(2 * (head + b"\r\n" + body) + head + b"connection: close\r\n\r\n" + body)
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    *answers, behind = received.split(b"\r\n0\r\n\r\n")
    assert len(answers) == 3 and not behind
    assert all(each.startswith(b"HTTP/1.1 200 OK") and each.count(b"[DONE]") == 1 for each in answers)


def test_no_comment_is_sent_behind_the_last_event() -> None:
    known: dict[str, Any] = {"cycle": lambda: SimpleNamespace()}
    scope = {"extensions": {connection.TRANSPORT: known}}
    connection.begin_events(scope, lambda: None, chunked=True)
    assert known["sign"]
    assert connection.end_events(scope, chunked=True) == b"0\r\n\r\n" and not known["sign"]
    assert connection.end_events(scope, chunked=False) == b""
