"""Answers of Responses and Messages, from a scripted model to the clients of both vendors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from http_world import ASK, HTTP, PARAMETERS, SCRIPTS, TOOL, HttpWorld, world
from ppengine.http.api_keys import ApiKeys
from ppengine.http.key_limits import KeyLimits
from ppengine.http.shared_use import SharedUse
from ppengine.protocol.clients import KeyLimit
from ppengine.protocol.offline import Added
from published_schemas import errors, event_errors

FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS}
SCHEMA = {"name": "weather", "input_schema": PARAMETERS}


# --- the published schemas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_answers_fit_the_published_schemas(script: str, reason: str) -> None:
    if not script and reason == "length":
        pytest.skip("a limit of tokens leaves one at least")
    chat = {"messages": ASK, "tools": [TOOL], "n": 2, "logprobs": True, "top_logprobs": 1}
    plain, completion = {"messages": ASK}, {"prompt": "x", "logprobs": 1}
    responses = {"input": ASK, "tools": [FLAT]}
    messages = {"messages": ASK, "tools": [SCHEMA], "max_tokens": 99}
    usage = {"stream_options": {"include_usage": True}}
    broken = []
    async with world(script, reason) as one:
        for vendor, schema, path, body in (
            ("openai", "CreateChatCompletionResponse", "/v1/chat/completions", chat),
            ("openai", "CreateChatCompletionResponse", "/v1/chat/completions", plain),
            ("openai", "CreateCompletionResponse", "/v1/completions", completion),
            ("openai", "Response", "/v1/responses", responses),
            ("anthropic", "Message", "/v1/messages", messages),
        ):
            status, answer = await one.post(path, body)
            assert status == 200
            broken += errors(vendor, schema, answer)
        for body in (chat, {**chat, **usage}, plain):
            for event in await one.events("/v1/chat/completions", body):
                broken += errors("openai", "CreateChatCompletionStreamResponse", event)
        for event in await one.events("/v1/completions", completion):
            # The schema is that of the whole; as in OpenAI's own events, the reason is null before the end.
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            broken += errors("openai", "CreateCompletionResponse", event)
        for event in await one.events("/v1/responses", responses):
            broken += event_errors("openai", "ResponseStreamEvent", event)
        for event in await one.events("/v1/messages", messages):
            broken += event_errors("anthropic", "MessageStreamEvent", event)
    assert not broken, "\n".join(broken)


async def test_other_answers_fit_the_published_schemas() -> None:
    async with world() as one:
        assert errors("openai", "ListModelsResponse", (await one.http.get("/v1/models")).json()) == []
        for path in ("/v1/chat/completions", "/v1/responses"):
            status, answer = await one.post(path, {})
            assert status == 400 and errors("openai", "ErrorResponse", answer) == []
        status, answer = await one.post("/v1/messages", {})
        assert status == 400 and errors("anthropic", "ErrorResponse", answer) == []
        status, answer = await one.post("/v1/messages/count_tokens", {"messages": ASK})
        assert status == 200 and errors("anthropic", "CountMessageTokensResponse", answer) == []


# --- Responses ----------------------------------------------------------------------------------------------------


async def test_a_response_is_the_same_whole_and_streamed() -> None:
    async with world(SCRIPTS["all"]) as one:
        whole = await one.openai.responses.create(model="tiny", input="Hello", tools=[FLAT])  # type: ignore[list-item]
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
        assert (whole.output_text, whole.status, whole.store) == ("Let me see.", "completed", False)  # type: ignore[attr-defined]
        assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens > 0
        async with one.openai.responses.stream(model="tiny", input="Hello", tools=[FLAT]) as stream:  # type: ignore[list-item]
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        same = {"id": True, "call_id": True, "parsed_arguments": True, "content": {"__all__": {"parsed"}}}
        shown = [[item.model_dump(exclude=same) for item in one.output] for one in (whole, final)]  # type: ignore[arg-type]
        assert shown[0] == shown[1] and events[-1].type == "response.completed"


async def test_a_response_that_is_cut_is_incomplete() -> None:
    async with world(SCRIPTS["half"], "length") as one:
        events = await one.events("/v1/responses", {"input": "Hello", "tools": [FLAT]})
        response = events[-1]["response"]
        assert (events[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_certain_call_that_is_cut_is_an_incomplete_item() -> None:
    async with world('[{"name": "weather", "arguments": {"city": "Pa', "length") as one:
        body = {"input": "Hello", "tools": [FLAT], "tool_choice": "required"}
        _, whole = await one.post("/v1/responses", body)
        streamed = (await one.events("/v1/responses", body))[-1]["response"]
        for response in (whole, streamed):
            (item,) = response["output"]
            shown = (item["type"], item["status"], item["arguments"])
            assert shown == ("function_call", "incomplete", '{"city": "Pa') and response["status"] == "incomplete"


async def test_the_items_of_a_conversation_become_a_chat() -> None:
    async with world("Fine.") as one:
        status, _ = await one.post(
            "/v1/responses",
            {
                "instructions": "Be brief.", "tools": [FLAT, {"type": "web_search"}], "store": False,
                "reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"],
                "input": [
                    {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How?"}]},
                    {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                    {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
                    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "text", "text": "Sun"}]},
                ],
            },
        )  # fmt: skip
        assert status == 200
        (text,) = one.renderer.texts
        assert text.endswith(
            "<|system|>Be brief.\n\nBe kind.<|user|>How?<|assistant|><think>Hm.</think>"
            '<call c1>{"name": "weather", "arguments": {}}</call><call c2>{"name": "weather", "arguments": {}}</call>'
            "<|tool|>Rain<|tool|>Sun<|assistant|>"
        )


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": 5}, "input"),
    ],
)
async def test_a_response_that_would_need_a_memory_is_refused(more: dict[str, Any], param: str) -> None:
    async with world() as one:
        status, answer = await one.post("/v1/responses", {"input": "x", **more})
        assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize("role", ["system", "developer", "user"])
async def test_a_picture_is_refused_in_each_role(role: str) -> None:
    async with world() as one:
        picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        items = [{"role": role, "content": [picture]}, {"role": "user", "content": "What is it?"}]
        status, answer = await one.post("/v1/responses", {"input": items})
        assert (status, answer["error"] and answer["error"]["param"]) == (400, "input"), answer
        assert "input_image" in answer["error"]["message"]


# --- Messages -----------------------------------------------------------------------------------------------------


async def test_a_message_is_the_same_whole_and_streamed() -> None:
    async with world(SCRIPTS["all"]) as one:
        whole = await one.anthropic.messages.create(model="tiny", max_tokens=99, messages=ASK, tools=[SCHEMA])  # type: ignore[list-item]
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole.stop_reason == "tool_use" and whole.content[2].input == {"city": "Paris"}  # type: ignore[union-attr]
        assert whole.usage.cache_read_input_tokens == 3
        async with one.anthropic.messages.stream(model="tiny", max_tokens=99, messages=ASK, tools=[SCHEMA]) as stream:  # type: ignore[list-item]
            final = await stream.get_final_message()
        same = {"content": {"__all__": {"id"}}, "id": True}
        assert final.model_dump(exclude=same) == whole.model_dump(exclude=same)  # type: ignore[arg-type]


@pytest.mark.parametrize("limited", [False, True])
async def test_a_message_has_the_id_that_the_client_logs(limited: bool, tmp_path: Path) -> None:
    key, limit = "k" * 20, {"ann": KeyLimit(concurrent=1, requests_per_minute=9)}
    limits = KeyLimits(limit if limited else {}, SharedUse(tmp_path, "http0", [], ["ann"]))
    async with HttpWorld(HTTP, ApiKeys({key.encode(): "ann"}), key, limits) as one:
        one.model.text = "Fine."
        whole = await one.anthropic.messages.create(model="tiny", max_tokens=9, messages=ASK)
        assert whole._request_id == whole.id
        async with one.anthropic.messages.stream(model="tiny", max_tokens=9, messages=ASK) as stream:
            final = await stream.get_final_message()
        assert stream.request_id == final.id
        assert ("x-ratelimit-limit-requests" in stream.response.headers) == limited


async def test_a_message_ends_at_a_stop_sequence_or_at_its_tokens() -> None:
    async with world("One two three") as one:
        whole = await one.anthropic.messages.create(
            model="tiny", max_tokens=99, messages=ASK, stop_sequences=["never", " two"]
        )
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", " two")
        assert [block.text for block in whole.content] == ["One"]  # type: ignore[union-attr]
    async with world("One", "length") as one:
        whole = await one.anthropic.messages.create(model="tiny", max_tokens=99, messages=ASK)
        assert (whole.stop_reason, one.model.submitted[-1].sampling.max_tokens) == ("max_tokens", 99)


async def test_a_certain_call_that_is_cut_has_no_input() -> None:
    """Its arguments are no JSON, and `input` must be; a stream has them as text."""
    async with world('[{"name": "weather", "arguments": {"city": "Pa', "length") as one:
        body = {"max_tokens": 9, "messages": ASK, "tools": [SCHEMA], "tool_choice": {"type": "any"}}
        _, message = await one.post("/v1/messages", body)
        (block,) = message["content"]
        assert (block["type"], block["input"], message["stop_reason"]) == ("tool_use", {}, "max_tokens")
        events = await one.events("/v1/messages", body)
        parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(parts) == '{"city": "Pa'


async def test_the_blocks_of_a_conversation_become_a_chat() -> None:
    async with world("Fine.") as one:
        await one.anthropic.messages.create(
            model="tiny", max_tokens=9, system=[{"type": "text", "text": "Be brief."}], tools=[SCHEMA],  # type: ignore[list-item]
            tool_choice={"type": "auto", "disable_parallel_tool_use": True}, thinking={"type": "adaptive"},
            metadata={"user_id": "u"},
            messages=[
                *ASK,
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}]},
                    {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
                ]},
            ],
        )  # fmt: skip
        (text,) = one.renderer.texts
        assert text.endswith(
            "<|system|>Be brief.<|user|>How is it in Paris?<|assistant|><think>Hm.</think>I look."
            '<call t1>{"name": "weather", "arguments": {"city": "Paris"}}</call>'
            "<|tool|>Rain<|user|>And?<|assistant|><think>"
        )
        counted = await one.anthropic.messages.count_tokens(model="tiny", messages=ASK)
        text = one.renderer.texts[-1]
        assert counted.input_tokens == len(one.model.tokenizer.encode_chat(text))


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not served"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "at least 1"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
                ]
            },
            anthropic.BadRequestError,
            "the last message has a tool call",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, "text alone"),
        ({"tools": [SCHEMA], "tool_choice": {"type": "tool", "name": "x"}}, anthropic.BadRequestError, "not in tools"),
    ],
)
async def test_errors_of_messages_have_their_form(more: dict[str, Any], kind: type[Exception], words: str) -> None:
    async with world() as one:
        with pytest.raises(kind, match=words) as caught:
            await one.anthropic.messages.create(**{"model": "tiny", "max_tokens": 9, "messages": ASK, **more})
        assert isinstance(caught.value, anthropic.APIStatusError)
        assert errors("anthropic", "ErrorResponse", caught.value.response.json()) == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_request_that_is_lost_ends_its_answer_with_an_error(path: str) -> None:
    async with world("One two three four", "lost") as one:
        body = {"messages": ASK, "max_tokens": 9} if "resp" not in path else {"input": "x"}
        status, answer = await one.post(path, body)
        assert status == 500 and "the request was lost" in answer["error"]["message"]
        last = (await one.events(path, body))[-1]
        assert "the request was lost" in json.dumps(last)
        assert last.get("type") in (None, "response.failed", "error")


_BAD_SCHEMA: dict[str, Any] = {"type": "json_schema", "name": "x", "schema": {"type": "object", "$ref": 5}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/responses", {"input": "x", "text": {"format": _BAD_SCHEMA}}, "text.format"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/messages", {"output_config": {"format": _BAD_SCHEMA}, "max_tokens": 9}, "output_config.format"),
        ("/v1/messages", {"stop_sequences": [""], "max_tokens": 9}, "stop_sequences"),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_an_error_names_the_field_that_the_client_sent(path: str, body: dict[str, Any], field: str) -> None:
    """The core refuses the schema: a grammar process has looked at it."""
    async with world() as one:
        if "format" in field:
            one.model.refusal = Added(nonce=0, requests=[], error="structured_outputs: Invalid type")
        body = body if "input" in body else {**body, "messages": ASK}
        status, answer = await one.post(path, body)
        error = answer["error"]
        assert status == 400 and error["message"].startswith(f"{field}: " if "format" in field else f"{field} "), error
        assert error.get("param", field) == field


@pytest.mark.parametrize(("path", "field"), [("/v1/responses", "input"), ("/v1/chat/completions", "messages")])
async def test_a_long_chat_names_the_field_that_has_it(path: str, field: str) -> None:
    async with world() as one:
        one.model.refusal = Added(nonce=0, requests=[], error="prompt 0: 9000 tokens, max_model_len is 4096")
        status, answer = await one.post(path, {"input": "x"} if field == "input" else {"messages": ASK})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, field, "context_length_exceeded")


async def test_keys_come_in_either_header() -> None:
    keys = ApiKeys({b"k" * 20: "ann"})
    async with HttpWorld(HTTP, keys, key="k" * 20) as one:
        one.model.text = "Fine."
        assert (await one.anthropic.messages.create(model="tiny", max_tokens=9, messages=ASK)).stop_reason == "end_turn"
        assert (await one.openai.responses.create(model="tiny", input="x")).output_text == "Fine."
    async with HttpWorld(HTTP, keys, key="wrong") as one:
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await one.anthropic.messages.create(model="tiny", max_tokens=9, messages=ASK)
        with pytest.raises(openai.AuthenticationError, match="not known here"):
            await one.openai.responses.create(model="tiny", input="x")
