"""Requests of clients that offer an upgrade, as Java's HttpClient does, or have HTTP/1.0."""

from __future__ import annotations

import asyncio

import pytest
from http_world import served, world
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
NEXT = b"POST /next HTTP/1.1\r\nContent-Length: 4\r\nConnection: close\r\n\r\nlast"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the path and the body of a request."""
    request = Request(scope, receive)
    await Response(b"[%b %b]" % (request.url.path.encode(), await request.body()))(scope, receive, send)


async def answer_to(port: int, data: bytes, size: int) -> bytes:
    """Send `data` in pieces of `size` bytes and return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await writer.drain()
        await asyncio.sleep(0)
    received = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return received


@pytest.mark.parametrize("size", [1, 7, 65_536])
@pytest.mark.parametrize(
    ("head", "body", "answer"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n", b"hello", b"[/ hello]"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"[/ hello]"),
        (b"GET /v1 HTTP/1.1\r\n", b"", b"[/v1 ]"),
    ],
    ids=["length", "chunks", "no body"],
)
async def test_an_upgrade_that_is_offered_changes_nothing(head: bytes, body: bytes, answer: bytes, size: int) -> None:
    one = head + OFFER + b"\r\n" + body
    async with served(echo) as port:
        received = await answer_to(port, one + one + NEXT, size)
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert received.count(answer) == 2 and received.endswith(b"[/next last]")


async def test_many_offers_in_one_read_are_answered() -> None:
    """A request that was read by a call within the one before it met the limit of Python's stack."""
    many = 2000
    async with served(echo) as port:
        received = await answer_to(
            port, b"GET /v1 HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n" * many + NEXT, 2**20
        )
    assert received.count(b"[/v1 ]") == many and received.endswith(b"[/next last]")


async def test_the_lengths_of_a_request_with_an_offer_are_checked() -> None:
    both = b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n" + OFFER + b"\r\n0\r\n\r\n"
    async with served(echo) as port:
        received = await answer_to(port, both + NEXT, 65_536)
    assert received.startswith(b"HTTP/1.1 400") and b"last" not in received


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_stream_of_a_client_with_http_1_0_ends_with_its_connection(version: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'
    head = b"POST /v1/chat/completions HTTP/%b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    async with world("It rains.") as one, served(one.app) as port:
        received = await answer_to(port, head % (version, len(body)) + body, 65_536)
    top, _, events = received.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in top
    if version == b"1.0":
        assert b"transfer-encoding" not in top
        assert events.startswith(b"data: {") and events.endswith(b"}\n\ndata: [DONE]\n\n")
        assert all(each.startswith(b"data: ") for each in events.split(b"\n\n") if each)
    else:
        assert b"transfer-encoding: chunked" in top and events.endswith(b"\r\n0\r\n\r\n")


async def test_a_whole_answer_to_a_client_with_http_1_0_has_its_length() -> None:
    body = b'{"prompt": "Hi"}'
    async with world("It rains.") as one, served(one.app) as port:
        received = await answer_to(port, b"POST /v1/completions HTTP/1.0\r\nContent-Length: 16\r\n\r\n" + body, 65_536)
    top, _, rest = received.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(rest) in top and b"It rains." in rest
