"""Requests of the HTTP port: clients that leave, questions to the core, and nothing that is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from http_world import ASK, served, world
from ppengine.http import connection, front_link
from ppengine.http.client_stats import Call, ClientStats
from ppengine.http.followed import Followed
from ppengine.http.generation import Generation
from ppengine.protocol.frames import Codec
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.verbs import Submit
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

STREAM = b'{"prompt": [5, 6], "stream": true}'
WHOLE = b'{"prompt": [5, 6]}'


def post(body: bytes, path: bytes = b"/v1/completions", more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (path, more, len(body), body)


async def until(known: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not known():
            await asyncio.sleep(0.005)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return the calls that begin in this test."""
    begun, begin = list[Call](), ClientStats.begin

    def noting(self: ClientStats, *given: Any) -> Call:
        begun.append(begin(self, *given))
        return begun[-1]

    monkeypatch.setattr(ClientStats, "begin", noting)
    return begun


# --- clients that leave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["events", "whole"])
@pytest.mark.parametrize(("together", "later"), [(1, 0), (3, 0), (1, 1)])
async def test_a_client_that_leaves_ends_its_request(
    body: bytes, together: int, later: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with further requests behind it on the same connection, which have not begun."""
    async with world("", "length") as one, served(one.app) as port:  # The model never writes.
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(body) * together)
        await until(lambda: one.model.submitted)
        writer.write(post(body) * later)
        await asyncio.sleep(0.05)
        assert not one.model.left
        # A reset: a connection that is closed in order looks the same until bytes are sent on it.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await until(lambda: one.model.left)
        assert len(one.model.left) == len(one.model.submitted) == 1
        await asyncio.sleep(0.05)
    assert not caplog.records


async def test_a_client_that_leaves_behind_a_long_body_ends_its_request() -> None:
    """uvicorn reads no further while more than 64 KiB of a body wait."""
    body = STREAM[:-1] + b" " * 400_000 + b"}"
    async with world("", "length") as one, served(one.app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        whole = post(body)
        for piece in (whole[:200_000], whole[200_000:]):
            await asyncio.sleep(0.05)  # The handler waits for the rest.
            writer.write(piece)
        await until(lambda: one.model.submitted)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await until(lambda: one.model.left)


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(("text", "body"), [("", STREAM), ("", WHOLE), ("It rains.", STREAM), ("It rains.", WHOLE)])
async def test_a_client_that_leaves_before_the_core_answers_ends_its_request(
    text: str, body: bytes, together: int, calls: list[Call], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its answer may have come in full meanwhile."""
    async with world(text, "length") as one, served(one.app) as port:
        answers, submit = asyncio.Event(), one.model.submit

        async def late(*given: Any) -> tuple[Added, list[Followed]]:
            found = await submit(*given)
            await answers.wait()
            return found

        monkeypatch.setattr(one.model, "submit", late)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(body) * together)
        await until(lambda: one.model.submitted)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await asyncio.sleep(0.05)
        answers.set()
        await until(lambda: one.model.left)
        await asyncio.sleep(0.05)
    assert len(one.model.submitted) == len(calls) == calls[0].client.left == 1
    assert not caplog.records


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["events", "whole"])
async def test_an_answer_that_an_operator_closes_is_no_error(
    body: bytes, calls: list[Call], caplog: pytest.LogCaptureFixture
) -> None:
    async with world("", "length") as one, served(one.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(body))
        await until(lambda: one.model.submitted)
        await asyncio.sleep(0.05)
        calls[0].close()
        with contextlib.suppress(ConnectionResetError):
            assert b"Internal Server Error" not in await asyncio.wait_for(reader.read(), 20)
        await until(lambda: one.model.left)
        writer.close()
    assert not calls[0].client.left and not caplog.records


# --- requests behind others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [9, 45])
@pytest.mark.parametrize("together", [False, True])
async def test_a_request_that_is_late_is_not_refused_in_the_answer_before_it(
    together: bool, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its head alone, or a part of that."""
    monkeypatch.setattr(connection, "QUIET_S", 0.2)
    first, second = post(STREAM), post(STREAM)[:-cut]
    async with world("", "length") as one, served(one.app) as port:  # The model never writes.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first + second[:-4] if together else first)
        begun = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert begun.startswith(b"HTTP/1.1 200 ")
        writer.write(second[-4:] if together else second)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 1.0)
        writer.close()


# --- the core ---------------------------------------------------------------------------------------------------


async def test_a_question_is_sent_again_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    class Socket:
        def __init__(self, endpoint: str, take: object) -> None: ...

        def send(self, message: bytes) -> None:
            sent.append(message)

        async def run(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(front_link, "FrontSocket", Socket)
    monkeypatch.setattr(front_link, "AGAIN_S", 0.2)
    link = front_link.FrontLink("x", "http0", lambda state: None)
    running = asyncio.create_task(link.run())

    def added() -> list[bytes]:
        return [one for one in sent if b"add-many" in one]

    asking = asyncio.create_task(link.submit([Submit(prompt_token_ids=[1], request="r")], "o", "c", 0.0))
    await until(lambda: len(added()) == 3)
    assert len(set(added())) == 1, "the same question"
    nonce = Codec(AddMany).decode(added()[0]).nonce
    for _ in range(2):  # The core answers each time.
        link._read(front_link.encode(Added(nonce=nonce, requests=["r"])))
    answer, (followed,) = await asking
    assert answer.requests == [followed.request] == ["r"]
    await asyncio.sleep(0.6)
    assert len(added()) == 3
    running.cancel()


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [b"false", b"true"], ids=["whole", "events"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions", b"/v1/messages"])
async def test_an_answered_request_leaves_nothing_for_the_collector(path: bytes, stream: bytes) -> None:
    """A search for garbage looks at the objects of all open streams. A prompt may have a million tokens."""
    prompt = WHOLE[:-1] if path.endswith(b"/completions") and b"chat" not in path else b""
    body = prompt or b'{"max_tokens": 9, "messages": [{"role": "user", "content": "%b"}]' % ASK[0]["content"].encode()
    kinds = (Generation, Followed, Call, RequestResponseCycle)
    async with world("It rains.") as one, served(one.app) as port:
        gc.collect()
        gc.disable()
        try:
            known = {id(each) for each in gc.get_objects() if isinstance(each, kinds)}
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(post(b'%b, "stream": %b}' % (body, stream), path, b"connection: close\r\n"))
                assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 ")
                writer.close()
            await asyncio.sleep(0.05)
            assert len(one.model.left) == 3
            one.model.submitted.clear()
            one.model.left.clear()
            left = [each for each in gc.get_objects() if isinstance(each, kinds) and id(each) not in known]
            assert not left
        finally:
            gc.enable()


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_looks_at_the_state_again_before_it_is_refused(route: str) -> None:
    body = {"prompt": "x"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with world("It rains.") as one:
        serves = one.model.state
        one.model.state = msgspec.structs.replace(serves, state="loading", message="stage 1 loads")
        status, answer = await one.post(route, body)
        assert status == 503 and "stage 1 loads" in answer["error"]["message"]
        one.model.later = serves
        assert (await one.post(route, body))[0] == 200
