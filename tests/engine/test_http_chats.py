"""Chats with tools and reasoning, from a scripted model to OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chat_world import renderers
from http_world import ASK, BROKEN, CALL, SCRIPTS, TINY, TOOL, HttpWorld, world
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import HttpConfig, ModelConfig
from ppengine.http import chat_renderer
from ppengine.http.chat_renderer import ChatRenderer
from ppengine.http.client_limits import ClientLimits
from ppengine.http.client_stats import ClientStats
from ppengine.http.event_stream import all_parts
from ppengine.http.followed import Followed
from ppengine.http.front_link import FrontLink
from ppengine.http.generation import Generation
from ppengine.http.service import Service
from ppengine.protocol.chat_messages import Chat, Rendered
from ppengine.protocol.offline import Piece


async def test_a_chat_has_reasoning_content_and_calls_whole_and_streamed() -> None:
    async with world(SCRIPTS["all"]) as one:
        whole = await one.openai.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])  # type: ignore[list-item]
        (choice,) = whole.choices
        message = choice.message
        assert (choice.finish_reason, message.content) == ("tool_calls", "Let me see.")
        assert message.reasoning == message.reasoning_content == "I look."  # type: ignore[attr-defined]
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]  # type: ignore[union-attr]
        assert calls == [("weather", '{"city": "Paris"}')] * 2
        assert whole.usage and whole.usage.completion_tokens_details
        assert 0 < (whole.usage.completion_tokens_details.reasoning_tokens or 0) < whole.usage.completion_tokens

        names, arguments, text, reasons = [], ["", ""], "", []
        async for chunk in await one.openai.chat.completions.create(
            model="tiny", messages=ASK, tools=[TOOL], stream=True  # type: ignore[list-item]
        ):  # fmt: skip
            delta = chunk.choices[0].delta
            text += delta.content or ""
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
            for call in delta.tool_calls or []:
                assert call.function is not None
                arguments[call.index] += call.function.arguments or ""
                names += [(call.index, call.function.name)] if call.function.name else []
        assert (text, reasons) == ("Let me see.", ["tool_calls"])
        assert (names, arguments) == ([(0, "weather"), (1, "weather")], ['{"city": "Paris"}'] * 2)


async def test_a_malformed_call_is_content() -> None:
    async with world(BROKEN) as one:
        _, answer = await one.post("/v1/chat/completions", {"messages": ASK, "tools": [TOOL]})
        assert answer["choices"][0]["message"]["content"] == BROKEN
        assert answer["choices"][0]["finish_reason"] == "stop" and "tool_calls" not in answer["choices"][0]["message"]
        events = await one.events("/v1/chat/completions", {"messages": ASK, "tools": [TOOL]})
        deltas = [event["choices"][0]["delta"] for event in events]
        content = "".join(delta.get("content") or "" for delta in deltas)
        arguments = "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", []))
        assert BROKEN.endswith(arguments + content) and events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_without_tools_calls_are_content_and_one_is_enough_if_asked_so() -> None:
    async with world(f"{CALL}\n{CALL}") as one:
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            _, answer = await one.post("/v1/chat/completions", {"messages": ASK, **more})
            assert answer["choices"][0]["message"]["content"] == f"{CALL}\n{CALL}"
            assert "weather" not in one.renderer.texts[-1]
        _, answer = await one.post(
            "/v1/chat/completions", {"messages": ASK, "tools": [TOOL], "parallel_tool_calls": False}
        )
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


async def test_log_probabilities_of_text_that_is_held_back_are_not_lost() -> None:
    async with world(SCRIPTS["all"]) as one:
        body = {"messages": ASK, "tools": [TOOL], "logprobs": True}
        events = await one.events("/v1/chat/completions", body)
        tokens = [token for event in events for token in event["choices"][0]["logprobs"]["content"]]
        assert "".join(token["token"] for token in tokens) == SCRIPTS["all"]


async def test_the_template_gets_tools_calls_results_and_reasoning() -> None:
    async with world("Fine.") as one:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        await one.post(
            "/v1/chat/completions",
            {
                "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True},
                "messages": [
                    {"role": "developer", "content": "Be brief."}, *ASK,
                    {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
                    {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
                ],
            },
        )  # fmt: skip
        expected = (
            f"<tool>{json.dumps(TOOL)}</tool><|system|>Be brief.<|user|>How is it in Paris?<|assistant|>"
            '<think>Hm.</think><call c1>{"name": "weather", "arguments": {"city": "Paris"}}</call>'
            "<|tool|>Rain<|assistant|><think>"
        )
        assert one.renderer.texts == [expected]


async def test_the_effort_of_reasoning_reaches_the_template() -> None:
    async with world("Fine.") as one:
        one.renderer.template = ChatTemplate("{{ reasoning_effort }} {{ enable_thinking }}", {})
        for body in ({"reasoning_effort": "none"}, {"reasoning_effort": "high"}, {}):
            await one.post("/v1/chat/completions", {"messages": ASK, **body})
        await one.post("/v1/responses", {"input": "x", "reasoning": {"effort": "none"}})
        assert one.renderer.texts == ["none False", "high ", " ", "none False"]


async def test_each_choice_that_ends_at_a_stop_text_ends_in_the_core() -> None:
    async with world() as one:
        tokenizer = one.model.tokenizer
        followed = Followed("r", 3, [0, 0, 0])
        link = cast(FrontLink, one.model)
        generation = Generation(link, tokenizer, followed, [], 0, ["stop"], 0)
        ids = tokenizer.encode_chat("Now stop here")
        for sample, reason in ((1, None), (2, "length"), (0, None)):
            followed.take(Piece("r", sample, 0, ids, [], reason))
        parts = await all_parts([generation], ClientStats().begin("key", "/v1/chat/completions"))
        assert [one[-1].finish_reason for one in parts] == ["stop"] * 3
        assert one.model.ended_samples == [("r", 1), ("r", 0)], "one has ended in the core already"


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "tool_choice of a call"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not in tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no function"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions weather"),
        ({"tools": [{"type": "web_search"}]}, "tools", "runs no tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "'a b'"),
        ({"tools": 5}, "tools", "it must be a list or null"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
          "tool_choice": "required"}, "tools", "the type 'array'"),
    ],
)  # fmt: skip
async def test_tools_that_cannot_be_honoured_are_refused(more: dict[str, Any], param: str, words: str) -> None:
    async with world() as one:
        status, answer = await one.post("/v1/chat/completions", {"messages": ASK, "tools": [TOOL], **more})
        assert (status, answer["error"]["param"]) == (400, param) and words in answer["error"]["message"]
        assert not one.model.submitted


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "text", "arguments", "schema"),
    [
        ("required", '[{"name": "weather", "arguments": {"city": "Ulm"}}]', '{"city": "Ulm"}', "minItems"),
        (NAMED, '{"city":"Ulm"}', '{"city":"Ulm"}', "city"),
        (NAMED, f'{{"city":{"12" * 50}}}', f'{{"city":{"12" * 50}}}', "city"),
    ],
)
@pytest.mark.parametrize("form", ["none", "hermes"])
async def test_a_call_that_is_certain(choice: Any, text: str, arguments: str, schema: str, form: str) -> None:
    """The model is constrained to JSON, for any form of its template; a stream has the same call."""
    async with HttpWorld(HttpConfig(tool_parser=form, reasoning="think")) as one:
        one.model.text = text
        body = {"messages": ASK, "tools": [TOOL], "tool_choice": choice}
        _, answer = await one.post("/v1/chat/completions", body)
        (only,) = answer["choices"]
        (called,) = only["message"]["tool_calls"]
        assert called["function"] == {"name": "weather", "arguments": arguments}
        assert (only["message"]["content"], only["finish_reason"]) == (None, "tool_calls")
        outputs = one.model.submitted[-1].sampling.structured_outputs
        assert outputs is not None and schema in str(outputs.json)
        deltas = [event["choices"][0]["delta"] for event in await one.events("/v1/chat/completions", body)]
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
        assert "".join(part.get("arguments") or "" for part in parts) == arguments


@pytest.mark.parametrize(
    ("choice", "text", "called"),
    [
        ("required", '[{"name": "weat', []),
        ("required", '[{"name": "weather", "arguments": ', [("weather", "")]),
        ("required", '[{"name": "weather", "arguments": {"city": "Ul\\', [("weather", '{"city": "Ul\\')]),
        ("required", '[{"name": "weather", "arguments": {"city": "Ulm"}', [("weather", '{"city": "Ulm"}')]),
        ("required", '[{"name": "weather", "arguments": {}}, {"name', [("weather", "{}")]),
        (NAMED, '{"city":"Ul', [("weather", '{"city":"Ul')]),
        (NAMED, " ", []),
    ],
)
async def test_a_certain_call_that_is_cut_is_no_content(choice: Any, text: str, called: list[tuple[str, str]]) -> None:
    """As with OpenAI and vLLM: the arguments so far, and `length`."""
    async with HttpWorld(HttpConfig(tool_parser="none")) as one:
        one.model.text, one.model.reason = text, "length"
        body = {"messages": ASK, "tools": [TOOL], "tool_choice": choice}
        _, answer = await one.post("/v1/chat/completions", body)
        (only,) = answer["choices"]
        calls = [call["function"] for call in only["message"].get("tool_calls") or []]
        assert [(call["name"], call["arguments"]) for call in calls] == called
        assert (only["message"]["content"] or "", only["finish_reason"]) == ("", "length")
        events = await one.events("/v1/chat/completions", body)
        deltas = [event["choices"][0]["delta"] for event in events]
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
        assert "".join(part.get("arguments") or "" for part in parts) == "".join(each for _, each in called)
        assert not any(delta.get("content") for delta in deltas)
        assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("parallel", "reason", "calls"), [(True, "stop", 2), (False, "tool_calls", 1)])
async def test_calls_are_no_finish_reason_if_a_stop_text_cuts_one(parallel: bool, reason: str, calls: int) -> None:
    """A client that reads `tool_calls` parses the arguments of all."""
    call = '{"name": "weather", "arguments": {"city": "%s"}}'
    async with HttpWorld(HttpConfig(tool_parser="none")) as one:
        one.model.text, one.model.reason = f"[{call % 'Ulm'}, {call % 'Bonn'}]", "stop"
        body = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "stop": "onn"}
        body["parallel_tool_calls"] = parallel
        _, answer = await one.post("/v1/chat/completions", body)
        (only,) = answer["choices"]
        assert (only["finish_reason"], len(only["message"]["tool_calls"])) == (reason, calls)
        events = await one.events("/v1/chat/completions", body)
        assert events[-1]["choices"][0]["finish_reason"] == reason


async def test_a_constrained_text_is_content_though_the_template_begins_with_reasoning() -> None:
    async with HttpWorld(HttpConfig(tool_parser="llama3", reasoning="think")) as one:
        one.renderer.template = ChatTemplate("x<think>\n", {})
        one.model.text = '{"name": "weather", "parameters": {}}'
        body = {"messages": ASK, "tools": [TOOL], "response_format": {"type": "json_object"}}
        _, answer = await one.post("/v1/chat/completions", body)
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (one.model.text, "stop")


async def test_many_prompts_with_a_large_schema_are_refused() -> None:
    """The core would check each: it took 20 ms for one of these."""
    async with world() as one:
        schema = {"enum": ["x" * 1000]}
        body = {"prompt": [[1]] * 1024, "guided_json": schema}
        status, answer = await one.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "guided_json") and "over all prompts" in str(answer)
        status, answer = await one.post("/v1/completions", {"prompt": [[1]], "guided_json": {"a": [{}] * 9000}})
        assert status == 400 and "9002 objects and lists" in str(answer) and not one.model.submitted


async def test_tools_need_a_parser() -> None:
    async with HttpWorld(HttpConfig()) as one:
        status, answer = await one.post("/v1/chat/completions", {"messages": ASK, "tools": [TOOL]})
        assert status == 400 and "http.tool_parser" in answer["error"]["message"]


class Child:
    """The process of chat templates: it renders a chat at the third look at it, and stays."""

    def __init__(self, *given: Any, socket: str) -> None:
        self.idle, self.busy, self.looks = True, False, 0
        self._end: Any = None

    def check_room(self) -> None:
        """There is room."""

    def render(self, chat: Chat, most: int, end: Any) -> None:
        self.idle, self.busy, self._end = False, True, end

    def advance(self) -> None:
        self.looks += 1
        if self.looks % 3 == 0 and self.busy:
            self.busy = False
            self._end(Rendered(number=1, text="done"))

    def close(self) -> None:
        """Nothing is left."""


def config_of(folder: Path, *, skip_tokenizer: bool = False) -> EngineConfig:
    """Return the configuration of an engine whose model and run folder is `folder`."""
    profile = Profile(name="t", model=ModelConfig(path=str(folder), skip_tokenizer=skip_tokenizer))
    return EngineConfig(
        id="e", name="t", epoch="epoch", profile=profile, model_path=str(folder), model_type="opt", layers=[(0, 1)],
        max_model_len=64, run_dir=str(folder), ring_dir="/d", started_wall=0.0,
    )  # fmt: skip


async def test_the_first_chat_does_not_wait_for_a_process(tmp_path: Path) -> None:
    """A start takes half a second, all of it in the first chat's time to its first token."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    config = config_of(tmp_path)
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(config))
    renderer = ChatRenderer(config, "http0")
    running = asyncio.create_task(renderer.run(early=True))
    try:
        async with asyncio.timeout(60):
            while not renderer._process.child.ready:
                await asyncio.sleep(0.01)
            (pid,) = renderers()
            assert await renderer.render(Chat(messages=[{"role": "user", "content": "Hi"}]), 9) == "Hi!"
            assert renderers() == [pid]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("template", "skipped", "taken"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_an_engine_that_takes_no_chats_starts_none(tmp_path: Path, template: bool, skipped: bool, taken: bool) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    if template:
        (tmp_path / "chat_template.jinja").write_text("x")
    one: Any = None
    made = Service(config_of(tmp_path, skip_tokenizer=skipped), one, one, ClientLimits(ClientStats()), 9)
    assert made.takes_chats is taken


async def test_the_templates_process_is_looked_at_often_only_while_it_has_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_renderer, "TemplateProcess", Child)
    monkeypatch.setattr(chat_renderer, "LOOK_S", 0.001)
    monkeypatch.setattr(chat_renderer, "CALM_S", 3600.0)
    config: Any = SimpleNamespace(run_dir=str(tmp_path), endpoint=lambda name: f"ipc://{tmp_path}/s")
    renderer = ChatRenderer(config, "http0")
    child: Any = renderer._process
    running = asyncio.create_task(renderer.run(early=False))
    try:
        for looks in (3, 6):
            await asyncio.sleep(0.02)
            assert child.looks == looks - 3
            assert await asyncio.wait_for(renderer.render(Chat(messages=[]), 9), 60) == "done"
            assert child.looks == looks
        await asyncio.sleep(0.02)
        assert child.looks == 6
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
