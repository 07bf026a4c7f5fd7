"""Fields that vLLM has beside OpenAI's: stop texts in answers, token ids, special tokens, cut prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_world import ASK, TINY, HttpWorld, world
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.http.request_fields import CompletionRequest
from ppengine.http.sampling_defaults import SamplingDefaults

TOKENS = Tokenizer.load(TINY)
TEXT = "It rains in Paris. The end."
COMPLETION: dict[str, Any] = {"prompt": "How is it?", "max_tokens": 50}
CHAT: dict[str, Any] = {"messages": ASK, "max_tokens": 50}
PATHS = pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice, or of an event's."""
    found: str | None = choice.get("text", (choice.get("message") or choice.get("delta") or {}).get("content"))
    return found or ""


async def answered(one: HttpWorld, path: str, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Return the only choice of an answer; of a stream, with its events joined."""
    if not stream:
        status, answer = await one.post(path, body)
        assert status == 200, answer
        choice = answer["choices"][0]
        return {**choice, "text": text_of(choice), **{k: v for k, v in answer.items() if k == "prompt_token_ids"}}
    joined: dict[str, Any] = {"text": "", "token_ids": []}
    for event in await one.events(path, body):
        choice = event["choices"][0]
        joined["text"] += text_of(choice)
        joined["token_ids"] += choice.get("token_ids", [])
        for found in (event, choice):
            joined |= {name: found[name] for name in ("prompt_token_ids", "stop_reason") if name in found}
    return joined


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_may_end_the_answer_and_is_its_reason(path: str, body: dict[str, Any], stream: bool) -> None:
    async with world(TEXT) as one:
        plain = await answered(one, path, {**body, "stop": ["no", "aris."]}, stream=stream)
        assert (plain["text"], plain["stop_reason"]) == ("It rains in P", "aris.")
        more = {"stop": ["aris."], "include_stop_str_in_output": True}
        ended = await answered(one, path, {**body, **more}, stream=stream)
        assert (ended["text"], ended["stop_reason"]) == ("It rains in Paris.", "aris.")
        whole = await answered(one, path, body, stream=stream)
        assert whole["text"] == TEXT and "stop_reason" not in whole, "the model's own end has no reason"


@PATHS
async def test_a_stop_token_is_the_reason_if_the_request_has_it(path: str, body: dict[str, Any]) -> None:
    eos = TOKENS.eos_id
    assert eos is not None
    async with world(TEXT) as one:
        ended = await answered(one, path, {**body, "stop_token_ids": [eos]}, stream=False)
        assert (ended["text"], ended["stop_reason"]) == (TEXT, eos)
        more = {"stop_token_ids": [eos], "include_stop_str_in_output": True}
        silent = await answered(one, path, {**body, **more}, stream=False)
        assert silent["text"] == TEXT, "a special token has no text"
        spoken = await answered(one, path, {**body, **more, "skip_special_tokens": False}, stream=False)
        assert spoken["text"] == TEXT + TOKENS.token_text(eos)


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"stop": ["Paris"]}, {"logprobs": True}])
async def test_answers_may_have_the_token_ids(
    path: str, body: dict[str, Any], stream: bool, more: dict[str, Any]
) -> None:
    """With a stop token; without those behind a stop text."""
    given = {**body, **more, "return_token_ids": True}
    if path == "/v1/completions" and "logprobs" in given:
        given["logprobs"] = 1
    async with world(TEXT) as one:
        found = await answered(one, path, given, stream=stream)
        ids = TOKENS.encode_chat(TEXT)
        if "stop" in more:
            assert found["token_ids"] == ids[: len(found["token_ids"])] and "Paris" in TOKENS.decode(found["token_ids"])
        else:
            assert found["token_ids"] == [*ids, TOKENS.eos_id]
        assert found["prompt_token_ids"] == one.model.submitted[0].prompt_token_ids


async def test_a_tool_call_has_its_token_ids_though_its_text_waits() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    async with world(text) as one:
        found = await answered(
            one, "/v1/chat/completions", {**CHAT, "tools": tools, "return_token_ids": True}, stream=True
        )
        assert found["token_ids"] == [*TOKENS.encode_chat(text), TOKENS.eos_id]


async def test_tokens_with_logprobs_may_be_written_as_ids() -> None:
    ids = TOKENS.encode_chat(TEXT)
    names = [f"token_id:{token}" for token in ids]
    async with world(TEXT) as one:
        more = {"logprobs": 1, "return_tokens_as_token_ids": True}
        (choice,) = (await one.post("/v1/completions", {**COMPLETION, **more}))[1]["choices"]
        assert choice["logprobs"]["tokens"] == names
        assert [next(iter(each)) for each in choice["logprobs"]["top_logprobs"]] == names
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[1] == len(TOKENS.token_text(ids[0])), "places are those of the text"
        more = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
        (choice,) = (await one.post("/v1/chat/completions", {**CHAT, **more}))[1]["choices"]
        assert [each["token"] for each in choice["logprobs"]["content"]] == names
        assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == names[0]


@PATHS
async def test_a_prompt_may_be_cut_to_its_last_tokens(path: str, body: dict[str, Any]) -> None:
    async with world(TEXT) as one:
        assert (await one.post(path, body))[0] == 200
        assert (await one.post(path, {**body, "truncate_prompt_tokens": 2}))[0] == 200
        whole, cut = (one.prompt_token_ids or [] for one in one.model.submitted)
        assert len(whole) > 2 and cut == whole[-2:]
        status, answer = await one.post(path, {**body, "truncate_prompt_tokens": 0})
        assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_a_long_prompt_may_be_cut_to_fit() -> None:
    async with world(TEXT) as one:
        long = {"prompt": [5] * 5000, "max_tokens": 96}
        assert (await one.post("/v1/completions", long))[0] == 400
        assert (await one.post("/v1/completions", {**long, "truncate_prompt_tokens": -1}))[0] == 200
        assert len(one.model.submitted[0].prompt_token_ids or []) == 4000
        echo = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "echo": True, "truncate_prompt_tokens": 2}
        (choice,) = (await one.post("/v1/completions", echo))[1]["choices"]
        assert choice["text"].startswith(TOKENS.decode([7, 8]))


async def test_special_tokens_may_have_a_text() -> None:
    async with world("Hm<|user|>so") as one:
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            silent = await answered(one, path, body, stream=True)
            spoken = await answered(one, path, {**body, "skip_special_tokens": False}, stream=True)
            assert (silent["text"], spoken["text"]) == ("Hmso", "Hm<|user|>so")


async def test_the_body_may_have_the_id_of_the_request() -> None:
    async with world(TEXT) as one:
        assert (await one.post("/v1/completions", {**COMPLETION, "request_id": "a-7"}))[1]["id"].startswith("cmpl-a-7-")


async def test_reasoning_may_be_left_out() -> None:
    async with world("<think>I look.</think>It rains.") as one:
        for more, names in (({}, {"reasoning", "reasoning_content"}), ({"include_reasoning": False}, set())):
            message = (await one.post("/v1/chat/completions", {**CHAT, **more}))[1]["choices"][0]["message"]
            assert message["content"] == "It rains." and {"reasoning", "reasoning_content"} & set(message) == names
            events = await one.events("/v1/chat/completions", {**CHAT, **more})
            deltas = [event["choices"][0]["delta"] for event in events]
            assert any("reasoning" in delta for delta in deltas) == bool(names)
            assert "".join(delta.get("content", "") for delta in deltas) == "It rains."


SAID = [{"role": "user", "content": "How is it?"}, {"role": "assistant", "content": " It is "}]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": False}),
        ("/v1/chat/completions", {"continue_final_message": True}),
        ("/v1/messages", {}),
    ],
)
async def test_an_answer_may_go_on_with_the_last_message(path: str, more: dict[str, Any]) -> None:
    """vLLM has a field for it; Anthropic does so whenever the last message is the assistant's."""
    async with world("raining.") as one:
        status, answer = await one.post(path, {"messages": SAID, "max_tokens": 9, **more})
        assert status == 200, answer
        text = one.renderer.texts[-1]
        prompt = one.model.submitted[0].prompt_token_ids
        assert prompt == TOKENS.encode_chat(text.partition("\ufdd0")[0])
        assert TOKENS.decode(prompt or []).endswith(" It is ") and "raining." in str(answer)


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [("<think>I", "raining.", None), ("<think>I look.</think>It is ", None, "raining."), ("It is ", None, "raining.")],
)
async def test_an_answer_may_go_on_with_reasoning(begun: str, reasoning: str | None, content: str | None) -> None:
    async with world("raining.") as one:
        messages = [SAID[0], {"role": "assistant", "content": begun}]
        body = {"messages": messages, "max_tokens": 9, "continue_final_message": True}
        message = (await one.post("/v1/chat/completions", body))[1]["choices"][0]["message"]
        assert (message.get("reasoning"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (SAID[:1], "needs a last message of the assistant; its role is user"),
        ([*SAID[:1], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "has a tool call"),
    ],
)
async def test_other_messages_cannot_be_continued(messages: list[Any], why: str) -> None:
    async with world("raining.") as one:
        body = {"messages": messages, "max_tokens": 9, "continue_final_message": True}
        status, answer = await one.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "messages") and why in answer["error"]["message"]


async def test_a_template_without_the_last_message_is_refused() -> None:
    async with world("raining.") as one:
        one.renderer.template = ChatTemplate("{{ messages[0].content }}", {})
        body = {"messages": SAID, "max_tokens": 9, "continue_final_message": True}
        status, answer = await one.post("/v1/chat/completions", body)
        assert status == 400 and "the chat template leaves its text out" in answer["error"]["message"]


async def test_the_tokens_of_a_message_that_goes_on_are_counted() -> None:
    async with world() as one:
        whole = (await one.post("/tokenize", {"messages": SAID}))[1]["tokens"]
        begun = (await one.post("/tokenize", {"messages": SAID, "continue_final_message": True}))[1]["tokens"]
        assert len(begun) < len(whole) and TOKENS.decode(begun).endswith(" It is ")


@pytest.mark.parametrize("used", [True, False])
async def test_fields_that_are_left_out_have_the_defaults_of_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, used: bool
) -> None:
    given = {"temperature": 0.6, "top_p": 2.0, "top_k": 20, "min_p": None, "do_sample": True, "max_length": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    async with world(TEXT) as one:
        one.service._defaults = SamplingDefaults(tmp_path, used=used)
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/v1/messages", CHAT)):
            assert (await one.post(path, body))[0] == 200
            assert (await one.post(path, {**body, "temperature": 0, "top_k": 3}))[0] == 200
        left, own = one.model.submitted[::2], one.model.submitted[1::2]
        assert {(each.sampling.temperature, each.sampling.top_p, each.sampling.top_k) for each in left} == {
            (0.6, 1.0, 20) if used else (1.0, 1.0, left[0].sampling.top_k)
        }
        assert {(each.sampling.temperature, each.sampling.top_k) for each in own} == {(0.0, 3)}
    assert ("top_p is 2.0; it must be" in caplog.text) == used


def test_a_checkpoint_without_defaults_changes_nothing(tmp_path: Path) -> None:
    request = CompletionRequest(prompt="x")
    SamplingDefaults(tmp_path, used=True).fill(request)
    assert request == CompletionRequest(prompt="x")
