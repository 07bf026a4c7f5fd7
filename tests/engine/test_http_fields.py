"""Bodies, keys and addresses of the HTTP port, without an engine."""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_world import ASK, world
from ppengine.common.config import ConfigError, Profile
from ppengine.common.http_address import parse_http, takes_connections
from ppengine.common.profile_sections import ModelConfig
from ppengine.http import service
from ppengine.http.api_errors import ApiError
from ppengine.http.api_keys import ApiKeys
from ppengine.http.chat_fields import ChatRequest, DetokenizeRequest, TokenizeRequest
from ppengine.http.messages_fields import CountRequest, MessagesRequest
from ppengine.http.request_fields import MESSAGES_MOST, STRUCTURE_MOST, VALUES_MOST, CompletionRequest, decode
from ppengine.http.responses_fields import ResponsesRequest
from ppengine.http.tool_fields import functions_of
from ppengine.supervisor import http_port
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

KEY = "k" * 20
VALUES = (
    None, True, False, 0, 1, -1, 7, 2**64, 0.5, -0.1, 1e308, "", "x", "7", [], [""], ["x"], [1], [[1]], [None], {},
    {"x": 1}, {"7": 1}, {"7": 1e9}, {"type": "text"}, [{"role": "user"}], [{"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": 5}], {"include_usage": 3},
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": ""}], [{"type": "x"}],
    [{"name": "f", "input_schema": {}}], {"type": "function", "function": {"name": "f"}}, "required", "auto", "none",
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], [{"type": "reasoning"}],
    [{"type": "function_call"}], [{"type": "function_call_output", "output": [{"type": "x"}]}],
    [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text"}]}]}],
    [{"role": "assistant", "content": [{"type": "tool_use"}, {"type": "thinking"}]}, {"role": "user", "content": []}],
)  # fmt: skip
OTHERS = ["prompt", "messages", "echo", "response_format", "metadata", "store", "mcp_servers", "x"]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountRequest])
@pytest.mark.parametrize("seed", range(20))
def test_any_object_is_a_request_or_one_line(kind: type, seed: int) -> None:
    draw = random.Random(seed)
    names = [*kind.__struct_fields__, *OTHERS]  # type: ignore[attr-defined]
    needed = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 5}
    for _ in range(100):
        body = {name: value for name, value in needed.items() if name in kind.__struct_fields__}  # type: ignore[attr-defined]
        body.update({draw.choice(names): draw.choice(VALUES) for _ in range(draw.randrange(6))})
        try:
            request = decode(json.dumps(body).encode(), kind)
            request = request.as_chat() if hasattr(request, "as_chat") else request
            request.sampling()
            for message in getattr(request, "messages", ()):
                message.for_template()
            functions_of(getattr(request, "tools", None), getattr(request, "tool_choice", None))
        except ApiError as error:
            assert error.status == 400 and "\n" not in msgspec.json.decode(error.encode())["error"]["message"]


def test_sampling_keeps_stop_texts_here_and_sends_the_rest() -> None:
    request = decode(b'{"prompt": "x", "stop": "end", "top_k": 5, "logprobs": 2, "min_tokens": 1}', CompletionRequest)
    sampling = request.sampling()
    assert (sampling.stop, sampling.detokenize, sampling.top_k, sampling.logprobs) == ([], False, 5, 2)
    assert sampling.max_tokens == 16 and request.stops() == ["end"]
    chat = decode(b'{"messages": [], "logprobs": true, "max_completion_tokens": 3, "max_tokens": 9}', ChatRequest)
    assert (chat.sampling().logprobs, chat.sampling().max_tokens) == (0, 3)


@pytest.mark.parametrize(
    ("given", "seed"), [(7, 7), (-1, None), (-5, 2**63 - 5), (-(2**63), 0), (2**63 - 1, 2**63 - 1)]
)
def test_a_seed_may_be_negative(given: int, seed: int | None) -> None:
    """OpenAI has seeds of 64 bits. vLLM draws one for -1."""
    request = decode(json.dumps({"prompt": "x", "seed": given}).encode(), CompletionRequest)
    assert request.sampling().seed == seed


def test_fields_that_an_answer_would_ignore_are_refused() -> None:
    decode(b'{"messages": [], "add_special_tokens": false}', ChatRequest)
    for text, kind in (
        (b'{"messages": [], "add_special_tokens": true}', ChatRequest),
        (b'{"prompt": "x", "temperature": 0}', TokenizeRequest),
        (b'{"tokens": [1], "n": 2}', DetokenizeRequest),
    ):
        with pytest.raises(ApiError) as caught:
            decode(text, kind)
        assert caught.value.body.param in ("add_special_tokens", "temperature", "n")


@pytest.mark.parametrize("text", ['{"prompt": "x", "stop": [""]}', '{"prompt": "x", "logprobs": 50}'])
def test_a_value_out_of_its_range_names_its_field(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(text.encode(), CompletionRequest).sampling()
    assert caught.value.body.param in ("stop", "logprobs")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**63), ("max_tokens", 2**64), ("min_tokens", 2**63), ("seed", 2**64), ("priority", 2**31),
        ("priority", -(2**70)), ("stop_token_ids", [2**70]), ("allowed_token_ids", [2**70]),
        ("logit_bias", {str(2**70): 1}),
    ],
)  # fmt: skip
async def test_a_number_that_no_message_has_names_its_field(path: str, field: str, value: Any) -> None:
    own = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": ASK}
    async with world("Fine.") as one:
        status, answer = await one.post(path, {**own, field: value})
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert not one.model.submitted


async def test_a_prompt_with_a_number_that_no_message_has_is_refused() -> None:
    async with world("Fine.") as one:
        for prompt in ([5, 2**70], [[], [5], [2**31, 5]]):
            status, answer = await one.post("/v1/completions", {"prompt": prompt})
            assert (status, answer["error"]["param"]) == (400, "prompt"), answer
        assert not one.model.submitted


@pytest.mark.parametrize("count", [4, 40])
async def test_many_short_prompts_are_tokenized_beside_the_loop(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    async with world("Fine.") as one:
        tokenizer, threads = one.service.tokenizer, set[int]()
        encode = tokenizer.encode
        monkeypatch.setattr(tokenizer, "encode", lambda text: (threads.add(threading.get_ident()), encode(text))[1])
        prompts = [f"{number} " + "word " * 20 for number in range(count)]
        status, _ = await one.post("/v1/completions", {"prompt": [*prompts, prompts[0]]})
    assert status == 200
    assert [each.prompt_token_ids for each in one.model.submitted] == [*map(encode, prompts), encode(prompts[0])]
    assert (threading.get_ident() in threads) == (count == 4) and len(threads) == 1


@pytest.mark.parametrize("count", [1, 400], ids=["short", "long"])
async def test_a_text_that_the_tokenizer_does_not_take_is_refused(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Backend(models.WordLevel({"a": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    async with world("Fine.") as one:
        monkeypatch.setattr(one.service.tokenizer, "_backend", words)
        calls: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "other " * count}, "/tokenize": {"prompt": "other " * count},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "other " * count}]},
        }  # fmt: skip
        for path, body in calls.items():
            status, answer = await one.post(path, body)
            assert status == 400 and answer["error"]["message"].startswith("the tokenizer fails: "), (path, answer)
        assert not one.model.submitted


async def test_more_tokens_than_a_turn_of_the_loop_takes_have_no_text() -> None:
    async with world("Fine.") as one:
        status, answer = await one.post("/detokenize", {"tokens": [5] * 2**17})
        assert status == 200 and len(answer["prompt"]) == 2**17
        status, answer = await one.post("/detokenize", {"tokens": [5] * (2**17 + 1)})
        assert (status, answer["error"]["param"]) == (400, "tokens")


async def test_more_choices_than_the_core_takes_in_a_turn_are_refused() -> None:
    async with world("Fine.") as one:
        status, answer = await one.post("/v1/completions", {"prompt": [[5]] * 1024, "n": 5})
        assert (status, answer["error"]["param"]) == (400, "n") and "5120 choices" in answer["error"]["message"]
        assert not one.model.submitted
        status, answer = await one.post("/v1/completions", {"prompt": [[5]] * 64, "n": 64})
        assert status == 200 and len(answer["choices"]) == 4096


def test_a_body_of_too_many_values_is_not_read() -> None:
    with pytest.raises(ApiError, match=f"more than {VALUES_MOST} commas"):
        decode(b'{"prompt": [' + b"5," * (VALUES_MOST + 1) + b"5]}", CompletionRequest)


HALF = STRUCTURE_MOST // 2


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, '{"prompt": "a"' + "".join(f', "x{number}": null' for number in range(2 * HALF)) + "}"),
        (CompletionRequest, '{"prompt": [' + ", ".join(["[7]"] * (2 * HALF)) + "]}"),
        (ChatRequest, '{"messages": [{"role": "assistant", "tool_calls": ['
                      + ", ".join(['{ "function" : { "name" : "a" } }'] * HALF) + "]}]}"),
        (ResponsesRequest, '{"input": "a", "metadata": {'
                           + ", ".join(rf'"\"{number}\\": ""' for number in range(2 * HALF)) + "}}"),
        (CompletionRequest, '{"prompt": "' + ":" * 3 * HALF + '"' * (5 * VALUES_MOST)),
    ],
    ids=["fields", "lists", "objects", "escaped keys", "quotes"],
)  # fmt: skip
def test_a_body_of_too_many_parts_is_not_read(kind: type, body: str) -> None:
    """They took an event loop up to five seconds, and all streams of the process waited."""
    with pytest.raises(ApiError, match=f"more than {STRUCTURE_MOST} objects, lists and fields"):
        decode(body.encode(), kind)


def test_a_text_may_have_what_looks_like_many_parts() -> None:
    text = '{"a": ["\\"]}' * STRUCTURE_MOST
    body = json.dumps({"prompt": text}, separators=(";", ":")).encode()
    assert decode(body, CompletionRequest).prompt == text


@pytest.mark.parametrize(
    ("kind", "field"), [(ChatRequest, "messages"), (MessagesRequest, "messages"), (ResponsesRequest, "input")]
)
def test_a_conversation_of_too_many_messages_is_not_read(kind: type, field: str) -> None:
    more = {"model": "m", "max_tokens": 1} if kind is MessagesRequest else {}
    body = {field: [{"role": "user", "content": "a"}] * MESSAGES_MOST, **more}
    decode(json.dumps(body).encode(), kind)
    body[field].append({"role": "user", "content": "a"})
    with pytest.raises(ApiError, match=f"{field} has {MESSAGES_MOST + 1} entries") as caught:
        decode(json.dumps(body).encode(), kind)
    assert caught.value.body.param == field


def test_calls_that_share_the_id_of_a_proxy_have_their_own() -> None:
    """The core refuses an id that is in use. With four digits, one in 65 of a thousand open calls was refused."""
    made = {service._new_id("cmpl-", "same") for _ in range(4000)}
    assert len(made) == 4000 and all(name.startswith("cmpl-same-") for name in made)


def test_keys_are_read_from_a_file_that_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who\nann {KEY}a\nbob {KEY}b\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        ApiKeys.load(str(file))
    file.chmod(0o600)
    monkeypatch.setenv("PPCONSOLE_API_KEY", f"{KEY}c")
    keys = ApiKeys.load(str(file))
    assert [keys.caller(f"Bearer {KEY}{last}") for last in "abc"] == ["ann", "bob", "api"]
    assert keys.caller(f"bearer  {KEY}b") == keys.caller(None, f"{KEY}b") == "bob"
    for wrong in (None, "", "Bearer", "Bearer ", f"Basic {KEY}a", f"Bearer {KEY}", f"Bearer {KEY}d", "Bearer \udcff"):
        with pytest.raises(ApiError) as caught:
            keys.caller(wrong)
        assert caught.value.status == 401
    for text in ("", "# none yet\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="has no key"):
            ApiKeys.load(str(file))
    file.write_text("ann short\n")
    with pytest.raises(ConfigError, match="line 1: write NAME KEY"):
        ApiKeys.load(str(file))


def test_without_keys_the_host_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPCONSOLE_API_KEY", raising=False)
    keys = ApiKeys.load(None)
    assert keys.caller(None) == "http"
    keys.check(parse_http("127.0.0.1:80"))
    with pytest.raises(ConfigError, match="other hosts can reach"):
        keys.check(parse_http("0.0.0.0:80"))
    monkeypatch.setenv("PPCONSOLE_API_KEY", "short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        ApiKeys.load(None)
    monkeypatch.setenv("PPCONSOLE_API_KEY", KEY)
    ApiKeys.load(None).check(parse_http("0.0.0.0:80"))


@pytest.mark.parametrize("text", ["8000", "host:1", "0.0.0.0:70000", "::1:80", "[::1]", "http://127.0.0.1:80", ":80"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="it must be HOST:PORT"):
        parse_http(text)


def test_other_hosts_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPCONSOLE_API_KEY", raising=False)
    profile = Profile(name="x", model=ModelConfig(path="/x"))

    def listening(listen: str, **more: object) -> Profile:
        return msgspec.structs.replace(profile, http=msgspec.structs.replace(profile.http, listen=listen, **more))

    http_port.check_http(listening("[::1]:80"))
    http_port.check_http(listening("0.0.0.0:80", keys="/keys"))
    with pytest.raises(ConfigError, match="other hosts can reach, and no API key"):
        http_port.check_http(listening("0.0.0.0:80"))
    monkeypatch.setenv("PPCONSOLE_API_KEY", KEY)
    http_port.check_http(listening("0.0.0.0:80"))


def test_a_port_that_is_held_takes_no_connection_until_a_process_listens() -> None:
    with http_port.reserve(parse_http("127.0.0.1:0")) as held:
        address = parse_http("127.0.0.1:0")._replace(port=held.getsockname()[1])
        assert not takes_connections(address)
        held.listen()
        assert takes_connections(address)


def test_a_port_is_held_and_shared_with_the_processes_alone() -> None:
    import socket

    from ppengine.http.listener import listen

    with http_port.reserve(parse_http("127.0.0.1:0")) as held:
        port = held.getsockname()[1]
        address = parse_http(f"127.0.0.1:{port}")
        with listen(address, keys=False), listen(address, keys=False):
            with socket.create_connection(("127.0.0.1", port), 5):
                pass
            with pytest.raises(OSError, match="in use"):
                http_port.reserve(parse_http(f"127.0.0.1:{port}"))
        with pytest.raises(OSError, match="in use"):
            http_port.reserve(parse_http(f"127.0.0.1:{port}"))


def test_a_port_whose_old_connections_the_kernel_keeps_is_free() -> None:
    import socket

    from ppengine.http.listener import listen

    with http_port.reserve(parse_http("127.0.0.1:0")) as held:
        port = held.getsockname()[1]
        listener = listen(parse_http(f"127.0.0.1:{port}"), keys=False)
        listener.setblocking(True)
        with listener, socket.create_connection(("127.0.0.1", port), 5) as client:
            listener.accept()[0].close()  # The side that closes first keeps the address, in TIME_WAIT.
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))
    http_port.reserve(parse_http(f"127.0.0.1:{port}")).close()


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (ChatRequest, {"prompt": "x", "messages": []}, "unknown field prompt; it is one of /v1/completions"),
        (CompletionRequest, {"messages": []}, "unknown field messages; it is one of /v1/chat/completions"),
        (
            CompletionRequest,
            {"extra_body": {}},
            "unknown field extra_body; its fields are written beside the others; op",
        ),
        (CompletionRequest, {"max_token": 1}, "unknown field max_token; did you mean max_tokens?"),
        (CompletionRequest, {"quux": 1}, "unknown field quux"),
        (CompletionRequest, {"logprobs": True}, "logprobs is true; it must be a whole number or null"),
        (CompletionRequest, {"max_tokens": "5"}, 'max_tokens is "5"; it must be a whole number or null'),
        (ChatRequest, {"messages": "Hi"}, 'messages is "Hi"; it must be a list'),
        (ChatRequest, {"messages": ["Hi"]}, 'messages[0] is "Hi"; it must be an object'),
        (ChatRequest, {"messages": {}}, "messages is an object; it must be a list"),
        (ChatRequest, {"messages": [{}]}, "messages[0].role is missing"),
        (
            ChatRequest,
            {"messages": [{"role": "robot"}]},
            'messages[0].role is "robot"; it must be one of "system", "devel',
        ),
        (
            ChatRequest,
            {"messages": [], "tool_choice": "now"},
            'tool_choice is "now"; it must be one of "none", "auto"',
        ),
        (ChatRequest, {"messages": [], "tool_choice": {"type": "x"}}, 'tool_choice.type is "x"; it must be "function"'),
        (ChatRequest, {"messages": [], "tool_choice": 5}, "tool_choice is 5; it must be a text or an object or null"),
        (ChatRequest, {"messages": "Hi" * 40}, f'messages is "{"Hi" * 30}...; it must be a list'),
        (CompletionRequest, {"n": 1.5}, "n is 1.5; it must be a whole number or null"),
        (CompletionRequest, {"logit_bias": {"five": 1}}, 'logit_bias has the key "five"; it must be a whole number'),
        (CompletionRequest, {"logit_bias": {"5": 1, "6": "a"}}, 'logit_bias["6"] is "a"; it must be a number'),
        (CompletionRequest, {"stop": ["a", 3]}, "stop[1] is 3; it must be a text"),
        (
            CompletionRequest,
            {"stream_options": {"include_usage": 1}},
            "stream_options.include_usage is 1; it must be a b",
        ),
        (MessagesRequest, {"messages": [], "max_tokens": 1, "tools": [{}]}, "tools[0].name is missing"),
        (MessagesRequest, {"messages": []}, "max_tokens is missing"),
        (CompletionRequest, {}, "prompt is missing"),
    ],
)
def test_a_wrong_field_is_answered_with_its_place_and_kind(kind: Any, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(json.dumps({"prompt": "x", **fields} if kind is CompletionRequest and fields else fields).encode(), kind)
    assert str(caught.value).startswith(text)
    field = re.match("[a-z_]+", text.removeprefix("unknown field "))
    assert field is not None and caught.value.body.param == field[0]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest, TokenizeRequest])
def test_a_value_of_a_wrong_kind_is_never_answered_in_words_of_msgspec(kind: Any) -> None:
    chance, names = random.Random(7), [*kind.__struct_fields__, "role", "content", "type", "function", "text"]

    def value(depth: int) -> Any:
        plain = [None, True, -1, 1.5, 10**30, "x", "\x00`$.", "user"]
        pick = chance.randrange(4 if depth else 2)
        if pick == 2:
            return [value(depth - 1) for _ in range(chance.randrange(3))]
        return {chance.choice(names): value(depth - 1) for _ in range(3)} if pick == 3 else chance.choice(plain)

    for _ in range(1000):
        whole = {"prompt": "x", "messages": [], "input": "x", "max_tokens": 1, "model": "m"}
        body = {name: one for name, one in whole.items() if name in kind.__struct_fields__} | {
            chance.choice(kind.__struct_fields__): value(4)
        }
        try:
            decode(json.dumps(body).encode(), kind)
        except ApiError as error:
            assert error.body.param in body and re.match("Expected|Object|Invalid", str(error)) is None


async def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    """It had an empty one."""
    async with world() as one:
        last = one.service.vocabulary - 1
        assert (await one.post("/detokenize", {"tokens": [5, last]}))[0] == 200
        for wrong in (last + 1, 10**6, 2**40, -1):
            status, answer = await one.post("/detokenize", {"tokens": [5, wrong, 7]})
            assert (status, answer["error"]["param"]) == (400, "tokens")
            assert answer["error"]["message"] == f"tokens has {wrong}, which is not in the vocabulary (0 to {last})"
