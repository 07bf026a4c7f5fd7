"""Bytes for connections: those of one message of the core are written together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ppengine.http import front_link
from ppengine.http.followed import Followed
from ppengine.http.outbox import BUFFER_MOST, Outbox
from ppengine.protocol.frames import encode
from ppengine.protocol.offline import News, Piece
from test_http_streams import Transport


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
