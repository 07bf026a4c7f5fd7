"""Paths of the HTTP port and their methods, and failures of their handlers."""

from __future__ import annotations

import asyncio

import openai
import pytest
from http_world import ASK, HTTP, TINY, HttpWorld, served, world
from msgspec.structs import replace
from ppengine.http.client_stats import Client, ClientStats
from ppengine.http.completion_answer import CompletionAnswer

STREAM = b'{"prompt": [5, 6], "stream": true}'
WHOLE = b'{"prompt": [5, 6]}'


def post(body: bytes, path: bytes = b"/v1/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body)


# --- paths ------------------------------------------------------------------------------------------------------


async def test_a_method_that_a_path_does_not_have_is_refused_with_those_it_has() -> None:
    async with world() as one:
        for method, path, methods in (
            ("GET", "/v1/completions", "POST"), ("POST", "/health", "GET, HEAD"),
            ("PUT", "/v1/models/x/y", "GET, HEAD"),
        ):  # fmt: skip
            answer = await one.http.request(method, path)
            assert answer.status_code == 405 and answer.headers["allow"] == methods
            assert (
                answer.json()["error"]["message"] == f"{method} {path}: Method Not Allowed; use {methods.split(',')[0]}"
            )
        assert (await one.http.request("HEAD", "/v1/models")).status_code == 200


async def test_a_model_may_have_slashes_in_its_name() -> None:
    async with world() as one:
        for path in ("/v1/models/tiny", "/v1/models/tiny/"):
            assert (await one.http.get(path)).json()["id"] == "tiny"
        answer = await one.http.get("/v1/models/meta/llama")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "model meta/llama is not served here; it is tiny"


async def test_the_profile_may_name_the_model_for_clients() -> None:
    """As vLLM's `--served-model-name`: each name is listed and taken, and the first is in answers."""
    async with HttpWorld(replace(HTTP, model_names=["chat", "org/chat-8b"])) as one:
        one.model.text = "It rains."
        listed = [model.id for model in (await one.openai.models.list()).data]
        assert listed == ["chat", "org/chat-8b"]
        assert [(await one.openai.models.retrieve(name)).id for name in listed] == listed
        for name in listed:
            assert (await one.openai.completions.create(model=name, prompt="How?")).model == "chat"
        assert (await one.post("/v1/completions", {"prompt": "How?"}))[1]["model"] == "chat"
        assert (await one.post("/v1/messages", {"max_tokens": 4, "messages": ASK}))[1]["model"] == "chat"
        for name in ("tiny", str(TINY)):
            with pytest.raises(openai.NotFoundError) as refused:
                await one.openai.completions.create(model=name, prompt="How?")
            assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
            assert f"model {name[:80]} is not served here; it is chat or org/chat-8b" in str(refused.value)


async def test_errors_of_anthropics_paths_have_its_form() -> None:
    async with world() as one:
        for path in ("/v1/messages", "/v1/messages/batches"):
            answer = (await one.http.get(path)).json()
            assert answer["type"] == "error" and set(answer["error"]) == {"type", "message"}


# --- failures ---------------------------------------------------------------------------------------------------


async def test_a_failure_is_an_answer_and_the_connection_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world("It rains.") as one, served(one.app) as port:
        monkeypatch.setattr(one.service, "check_model", lambda name: 1 / 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(WHOLE))
        failed = await asyncio.wait_for(reader.readuntil(b'"code":null}}'), 20)
        assert failed.startswith(b"HTTP/1.1 500 ") and b'"type":"server_error"' in failed
        assert "POST /v1/completions failed" in caplog.text and "ZeroDivisionError" in caplog.text
        monkeypatch.undo()
        writer.write(post(WHOLE))
        assert (await asyncio.wait_for(reader.readuntil(b"It rains."), 20)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_stream_that_fails_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, begin = list[Client](), ClientStats.begin
    monkeypatch.setattr(ClientStats, "begin", lambda *given: clients.append((call := begin(*given)).client) or call)
    monkeypatch.setattr(CompletionAnswer, "end", lambda self: 1 / 0)
    async with world("It rains.") as one, served(one.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(STREAM))
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert received.startswith(b"HTTP/1.1 200 ") and b'"text":"' in received
        assert not received.endswith(b"0\r\n\r\n") and len(one.model.left) == 1
        assert clients[0].failed == 1
