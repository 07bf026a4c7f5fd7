"""Connections of the HTTP port whose requests are too large, or never come in full."""

from __future__ import annotations

import asyncio

import pytest
from http_world import served, world
from ppengine.http import connection, generation_response, service
from ppengine.http.api_errors import ApiError
from ppengine.http.connection import HEAD_MOST
from ppengine.http.generation_response import SHORT_BODY, BodyReader
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

REFUSED = b"HTTP/1.1 431 Request Header Fields Too Large"


class App:
    """It reads the body, waits until it is let, and answers."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.waits = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin ", "more_body": True})
        self.waits.set()
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"end"})


async def answer_to(port: int, data: bytes, size: int = 2**30) -> bytes:
    """Send `data` in pieces of `size` bytes and return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await asyncio.sleep(0)
    received = bytearray()
    try:
        while part := await asyncio.wait_for(reader.read(2**16), 60):
            received += part
    except ConnectionResetError:
        pass  # It was closed with bytes of ours unread.
    writer.close()
    return bytes(received)


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nx: " + b"y" * 60 * HEAD_MOST, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10 * HEAD_MOST],
    ids=["one long header", "many headers"],
)
async def test_headers_without_an_end_are_refused(head: bytes) -> None:
    async with served(App()) as port:
        received = await answer_to(port, head)
        assert received.startswith(REFUSED) or not received


GET = b"GET / HTTP/1.1\r\n\r\n"


async def test_few_requests_are_made_of_those_that_wait_for_an_answer() -> None:
    """A read has thousands, and reading went on behind each answer: a client without a key had gigabytes made."""
    waiting = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal waiting
        own = scope["extensions"][connection.TRANSPORT]["cycle"]().on_response.__self__
        waiting = max(waiting, len(own.pipeline))
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    many = 4 * 2**18 // len(GET)
    async with served(app) as port:
        received = await answer_to(port, GET * many + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert received.count(b"200 OK") == many + 1
    assert 0 < waiting <= connection.PARSED_AT_ONCE // len(GET) + connection.BEHIND_MOST + 1


async def test_all_requests_before_a_closed_sending_side_are_answered() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        rest = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        rest.cancel()

    many = 2 * connection.PARSED_AT_ONCE // len(GET)
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * many)
        writer.write_eof()
        received = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert received.count(b"200 OK") == many


@pytest.mark.parametrize("behind", [b"", GET], ids=["alone", "before another request"])
async def test_an_answer_is_notified_that_its_client_has_left(behind: bytes) -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        began.set()
        if (await receive())["type"] == "http.disconnect":
            left.set()

    async with served(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + behind)
        await began.wait()
        writer.transport.abort()
        await asyncio.wait_for(left.wait(), 20)


@pytest.mark.parametrize(("count", "status"), [(connection.HEADERS_MOST, b"HTTP/1.1 200"), (10_000, REFUSED)])
async def test_many_headers_are_refused_before_their_end(count: int, status: bytes) -> None:
    app = App()
    app.go_on.set()
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * count + b"\r\n" * (count < 1_000))
        assert (await asyncio.wait_for(reader.read(4096), connection.QUIET_S / 2)).startswith(status)
        writer.close()


CHUNKS = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        CHUNKS + b"0\r\n" + b"a: b\r\n" * HEAD_MOST, CHUNKS + b"0\r\na: " + b"b" * 60 * HEAD_MOST,
        CHUNKS + b"1;" + b"e" * 60 * HEAD_MOST,
    ],
    ids=["trailers", "one long trailer", "an extension of a chunk"],
)  # fmt: skip
async def test_trailers_and_extensions_without_an_end_are_refused(data: bytes) -> None:
    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass

    async with served(reads) as port:
        received = await asyncio.wait_for(answer_to(port, data), 20)
        assert received.startswith(REFUSED) or not received


@pytest.mark.parametrize("size", [1, 5, 65_536])
async def test_a_trailer_is_no_header_of_its_request_or_the_next_one(size: int) -> None:
    async def headers(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        await Response(b"%b %b" % (body, b",".join(name for name, _ in scope["headers"])))(scope, receive, send)

    one = CHUNKS + b"2;x=y\r\nhe\r\n0\r\nauthorization: Bearer key\r\n\r\n"
    async with served(headers) as port:
        received = await answer_to(port, one + b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n", size)
    assert received.count(b"he transfer-encoding") == 1 and received.endswith(b" connection")
    assert b"authorization" not in received


async def test_an_answered_request_that_does_not_go_on_gets_no_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.05)
    async with served(Response(b"no")) as port:
        received = await answer_to(port, b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf")
    assert received.count(b"HTTP/1.1") == 1 and received.endswith(b"no")


async def test_headers_of_a_usual_size_are_taken_and_counted_by_request() -> None:
    app = App()
    app.go_on.set()
    get = b"POST / HTTP/1.1\r\nx: " + b"y" * (HEAD_MOST // 2) + b"\r\ncontent-length: 3\r\n"
    async with served(app) as port:
        received = await answer_to(port, (get + b"\r\nabc") * 4 + get + b"connection: close\r\n\r\nabc")
        assert received.count(b"HTTP/1.1 200 OK") == 5 and received.count(b"end") == 5


async def test_a_request_that_does_not_go_on_is_ended_and_an_answer_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.05)
    app = App()
    async with served(app) as port:
        whole = asyncio.ensure_future(answer_to(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"))
        await asyncio.wait_for(app.waits.wait(), 60)
        assert await answer_to(port, b"") == b""
        assert (await answer_to(port, b"GET / HTTP/1.1\r\nx: ")).startswith(b"HTTP/1.1 408 Request Timeout")
        half = await answer_to(port, b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n")
        assert half.startswith(b"HTTP/1.1 408 Request Timeout")
        assert not whole.done(), "an answer takes as long as it likes"
        app.go_on.set()
        assert b"end" in await whole


async def test_a_connection_waits_for_its_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_S", 0.5)
    app = App()
    app.go_on.set()
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for pause in (0.1, 0.1, 0):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.wait_for(reader.readuntil(b"end\r\n0\r\n\r\n"), 60)
            await asyncio.sleep(pause)
        assert await asyncio.wait_for(reader.read(), 3) == b""
        writer.close()


def body_of(pieces: list[bytes]) -> Request:
    left = [*pieces]

    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "headers": []}, receive)


async def test_long_bodies_are_refused_while_others_fill_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_response, "BODIES_MOST", 3 * SHORT_BODY)
    reader, long = BodyReader(), [b"x" * SHORT_BODY] * 2
    bodies = await asyncio.gather(*(reader.read(body_of(long)) for _ in range(3)), return_exceptions=True)
    refused = [one for one in bodies if isinstance(one, ApiError)]
    assert 1 <= len(refused) < 3 and all(one.status == 429 and one.headers for one in refused)
    assert all(one == b"".join(long) for one in bodies if not isinstance(one, ApiError))
    assert reader.held == 0
    reader.held = 3 * SHORT_BODY
    assert await reader.read(body_of([b"short"])) == b"short"


@pytest.mark.parametrize(
    ("count", "length", "words"),
    [(1, 4096, "the prompt has 4096 tokens, max_model_len is 4096"), (3, 4000, "have 12000 tokens; at most 9000 are")],
)
async def test_prompts_that_are_too_long_do_not_reach_the_core(
    monkeypatch: pytest.MonkeyPatch, count: int, length: int, words: str
) -> None:
    monkeypatch.setattr(service, "TOKENS_MOST", 9000)
    async with world("x") as one:
        status, answer = await one.post("/v1/completions", {"prompt": [[5] * length] * count})
        assert status == 400 and words in answer["error"]["message"] and not one.model.submitted
        assert answer["error"]["code"] == "context_length_exceeded"
        status, _ = await one.post("/v1/completions", {"prompt": [[5] * 4000] * 2})
        assert status == 200


class Waiting:
    """It takes a request, and answers once it is let, unless its client has left. `events`: by a stream."""

    def __init__(self, *, events: bool = False) -> None:
        self.events, self.go_on, self.took, self.left = events, asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.settled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if self.events:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            connection.begin_events(scope, self._settle, chunked=True)
        self.took.set()
        gone = asyncio.create_task(receive())
        went = asyncio.create_task(self.go_on.wait())
        await asyncio.wait({gone, went}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.left.set()
            return
        gone.cancel()
        if not self.events:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"end"})

    def _settle(self) -> None:
        self.settled += 1


ASKS = b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize("events", [False, True], ids=["whole", "events"])
async def test_a_client_that_closes_its_sending_side_gets_its_answer(events: bool) -> None:
    app = Waiting(events=events)
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKS)
        writer.write_eof()
        await app.took.wait()
        # It is longer than the time in which a client that has left is known.
        await asyncio.sleep(4 * connection.PROBE_S)
        app.go_on.set()
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    head, _, body = received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), received
    assert body.endswith(b"3\r\nend\r\n0\r\n\r\n" if events else b"end"), received
    assert not app.left.is_set()
    assert events or b"connection: close" in head
    # Otherwise a sign may come into an event that is sent past the transport.
    assert app.settled == (received.count(b":\n\n") if events else 0), received
    assert app.settled > 1 or not events


async def test_bytes_that_are_no_request_cut_a_stream_under_way() -> None:
    """A refusal would come between two of its chunks, or into one that is sent past the transport."""
    app = Waiting(events=True)
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKS)
        await app.took.wait()
        writer.write(b"no request\r\n\r\n")
        received = await asyncio.wait_for(reader.read(), 20)
        assert received.startswith(b"HTTP/1.1 200") and received.count(b"HTTP/1.1") == 1, received
        await asyncio.wait_for(app.left.wait(), 20)
        writer.close()


@pytest.mark.parametrize("events", [False, True], ids=["whole", "events"])
@pytest.mark.parametrize("halves", [False, True], ids=["at once", "its sending side first"])
async def test_a_client_that_leaves_is_known_before_its_answer_is(events: bool, halves: bool) -> None:
    app = Waiting(events=events)
    async with served(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKS)
        await app.took.wait()
        if halves:
            writer.write_eof()
            await asyncio.sleep(2 * connection.PROBE_S)
        writer.close()
        await asyncio.wait_for(app.left.wait(), 20 * connection.PROBE_S)
