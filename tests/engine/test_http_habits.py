"""Requests as browsers, proxies and clients of OpenAI or vLLM write them."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from http_world import ASK, HTTP, HttpWorld, served, world
from msgspec.structs import replace
from ppengine.common.config import ConfigError, Profile, load_profile
from ppengine.http.api_errors import ApiError
from ppengine.http.api_keys import ApiKeys
from ppengine.http.chat_fields import ChatRequest
from ppengine.http.generation_response import BODY_MOST
from ppengine.http.messages_fields import MessagesRequest
from ppengine.http.request_fields import CompletionRequest, decode
from ppengine.http.responses_fields import ResponsesRequest

CHAT: dict[str, Any] = {"messages": ASK}
PAGE = {"origin": "https://chat.example.org"}
PREFLIGHT = {
    **PAGE, "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}  # fmt: skip


async def test_a_page_may_read_answers_if_the_profile_has_its_origin() -> None:
    async with HttpWorld(replace(HTTP, allowed_origins=["https://chat.example.org"])) as one:
        one.model.text = "It rains."
        answer = await one.http.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
        assert {"authorization", "content-type", "x-stainless-os"} <= {
            name.strip() for name in answer.headers["access-control-allow-headers"].lower().split(",")
        }
        for body in (CHAT, CHAT | {"stream": True}, {"messages": []}):
            answer = await one.http.post("/v1/chat/completions", json=body, headers=PAGE)
            assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
            assert "retry-after" in answer.headers["access-control-expose-headers"]
        other = await one.http.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers


async def test_without_origins_no_page_may() -> None:
    async with world("It rains.") as one:
        preflight = await one.http.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
        answer = await one.http.post("/v1/chat/completions", json=CHAT, headers=PAGE)
    assert preflight.status_code == 405 and answer.status_code == 200
    for one_answer in (preflight, answer):
        assert not [name for name in one_answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "evil.example."])
async def test_a_page_with_a_domain_that_resolves_to_the_port_reads_nothing(host: str) -> None:
    for http in (HTTP, replace(HTTP, allowed_origins=["https://chat.example.org"])):
        async with HttpWorld(http) as one:
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics")):
                answer = await one.http.request(method, path, headers={"host": host})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_host")


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000", "LOCALHOST", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7", "engine",
        "host.docker.internal:8000", "chat.example.org", "",
    ],
)  # fmt: skip
async def test_names_of_this_host_and_of_allowed_pages_reach_the_port(host: str) -> None:
    async with HttpWorld(replace(HTTP, allowed_origins=["https://chat.example.org"])) as one:
        assert (await one.http.get("/v1/models", headers={"host": host})).status_code == 200


async def test_a_port_with_keys_has_any_name() -> None:
    key = "k" * 16
    async with HttpWorld(HTTP, keys=ApiKeys({key.encode(): "a"})) as one:
        headers = {"host": "api.example.org", "authorization": f"Bearer {key}"}
        assert (await one.http.get("/v1/models", headers=headers)).status_code == 200
    async with HttpWorld(replace(HTTP, allowed_origins=["*"])) as one:
        assert (await one.http.get("/v1/models", headers={"host": "api.example.org"})).status_code == 200


def test_an_origin_has_no_path() -> None:
    profile: Profile = load_profile("tiny", ['http.allowed_origins=["http://localhost:3000", "*"]'])
    assert profile.http.allowed_origins == ["http://localhost:3000", "*"]
    with pytest.raises(ConfigError, match="without a slash at its end"):
        load_profile("tiny", ['http.allowed_origins=["http://localhost:3000/"]'])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_compressed_body_is_refused_by_its_coding(path: str) -> None:
    async with world("It rains.") as one:
        body = gzip.compress(b'{"prompt": "Hi"}')
        answer = await one.http.post(path, content=body, headers={"content-encoding": "gzip"})
        assert answer.status_code == 415
        assert answer.json()["error"]["message"] == "the body has the content-encoding gzip; send it without one"
        answer = await one.http.post(
            "/v1/completions", content=b'{"prompt": "Hi"}', headers={"content-encoding": "identity"}
        )
        assert answer.status_code == 200


async def test_a_body_is_refused_before_it_is_sent() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (BODY_MOST + 1)
    async with world() as one, served(one.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert received.startswith(b"HTTP/1.1 413 ") and b"100 Continue" not in received


async def test_a_client_that_sends_too_much_gets_its_answer() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (3 * BODY_MOST)
    async with world() as one, served(one.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        for _ in range(48):
            writer.write(bytes(BODY_MOST // 16))
            await writer.drain()
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_a_long_body_without_a_length_is_refused() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * 2**20

    async with world() as one:
        answer = await one.http.post("/v1/completions", content=pieces())
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/v1/chat/completions/", CHAT), ("GET", "/v1/models/", None), ("GET", "/health/", None)],
)
async def test_a_slash_at_the_end_changes_nothing(method: str, path: str, body: dict[str, Any] | None) -> None:
    async with world("It rains.") as one:
        answer = await one.http.request(method, path, json=body)
        plain = await one.http.request(method, path.rstrip("/"), json=body)
    assert answer.status_code == plain.status_code == 200
    if method == "GET":
        assert answer.text == plain.text


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/embeddings", None),
    ],
)
async def test_an_unknown_path_gets_the_nearest_one(path: str, near: str | None) -> None:
    async with world() as one:
        status, answer = await one.post(path, CHAT)
    message = answer["error"]["message"]
    assert status == 404
    assert message.endswith(f"; did you mean {near}?") if near is not None else "did you mean" not in message


@pytest.mark.parametrize(
    "more",
    [
        {"prediction": {"type": "content", "content": "It rains."}}, {"verbosity": "medium"},
        {"include_reasoning": True, "continue_final_message": False, "documents": []}, {"cache_salt": None},
        {"guided_decoding_backend": "xgrammar"},
        {"return_token_ids": False, "return_tokens_as_token_ids": False}, {"a_field_of_tomorrow": None},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_defaults_of_other_servers_are_taken(more: dict[str, Any]) -> None:
    decode(msgspec.json.encode(CHAT | more), ChatRequest)


@pytest.mark.parametrize(
    ("name", "value"),
    [("verbosity", "low"), ("chat_template", "{{ 1 }}"), ("use_beam_search", True)],
)
def test_values_that_change_something_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ApiError, match="this server does not have it") as caught:
        decode(msgspec.json.encode(CHAT | {name: value}), ChatRequest)
    assert caught.value.body.param == name and caught.value.body.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ChatRequest, "messages"), (CompletionRequest, "prompt"), (ResponsesRequest, "input"),
        (MessagesRequest, "max_tokens"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)  # fmt: skip
def test_a_field_that_is_missing_is_named(kind: Any, name: str) -> None:
    body = {"max_tokens": 5, "messages": ASK} if kind is MessagesRequest else {}
    with pytest.raises(ApiError, match="missing") as caught:
        decode(msgspec.json.encode({key: value for key, value in body.items() if key != name}), kind)
    assert caught.value.body.param == name


async def test_too_many_log_probabilities_are_an_error_of_their_field() -> None:
    async with world("It rains.") as one:
        status, answer = await one.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21})
    assert status == 400 and answer["error"]["param"] == "top_logprobs"
    assert answer["error"]["message"].startswith("top_logprobs is 21")


async def test_a_refusal_of_before_is_text() -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    async with world("It rains.") as one:
        status, _ = await one.post("/v1/chat/completions", {"messages": [*ASK, said, *ASK]})
        assert status == 200 and "<|assistant|>I will not.<|user|>" in one.renderer.texts[-1]
