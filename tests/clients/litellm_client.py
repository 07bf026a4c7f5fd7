"""LiteLLM: `python tests/clients/litellm_client.py http://HOST:PORT`."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import AS_SCHEMA, NUMBERS, PROMPT, TOOL, run, until_idle

MESSAGES = [{"role": "user", "content": PROMPT}]
# Providers by which users reach such a server.
PROVIDERS = ("openai/tiny", "hosted_vllm/tiny")


def ask(url: str, model: str = PROVIDERS[0], **more: Any) -> Any:
    fields = {"max_tokens": 16, "temperature": 0, "messages": MESSAGES, **more}
    return litellm.completion(model=model, api_base=f"{url}/v1", api_key="none", **fields)


def one_answer(url: str) -> None:
    texts = {ask(url, model).choices[0].message.content for model in PROVIDERS}
    assert len(texts) == 1 and texts.pop()


def stream(url: str) -> str:
    for model in PROVIDERS:
        parts = list(ask(url, model, stream=True, stream_options={"include_usage": True}))
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == ask(url, model).choices[0].message.content
    return f"{len(parts)} parts"


def several(url: str) -> None:
    assert len(ask(url, n=3, temperature=1, seed=1).choices) == 3


def stop(url: str) -> None:
    whole = ask(url).choices[0].message.content
    word = whole[len(whole) // 2 :][:3]
    cut = ask(url, stop=[word]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(word)], "stop")


def logprobs(url: str) -> None:
    content = ask(url, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert content and all(len(one.top_logprobs) == 2 for one in content)


def penalties(url: str) -> None:
    assert ask(url, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"400": -100}, user="ann").usage


def completion(url: str) -> None:
    made = litellm.text_completion(
        model="text-completion-openai/tiny", prompt=PROMPT, api_base=f"{url}/v1", api_key="none", max_tokens=8
    )
    assert made.choices[0].text


def tools(url: str) -> str:
    """A certain call, and that of a stream whose pieces LiteLLM joins.

    Its `hosted_vllm` takes `additionalProperties` out of schemas, so that this model would write on.
    """
    more = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    built: Any = litellm.stream_chunk_builder(list(ask(url, stream=True, **more)))
    for answer in (ask(url, **more), built):
        (choice,) = answer.choices
        (one,) = choice.message.tool_calls
        assert one.function.name == "count" and json.loads(one.function.arguments)["n"] in NUMBERS
        assert choice.finish_reason == "tool_calls"
    return one.function.arguments


def json_schema(url: str) -> str:
    for model in PROVIDERS:
        text = ask(url, model, response_format=AS_SCHEMA, max_tokens=200).choices[0].message.content
        assert json.loads(text)["n"] in NUMBERS
    return " ".join(text.split())


def errors(url: str) -> str:
    try:
        ask(url, temperature=-5)
    except litellm.BadRequestError as error:
        return type(error).__name__
    raise AssertionError("a bad temperature was taken")


def cancel(url: str) -> None:
    parts = ask(url, stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    next(iter(parts))
    parts.completion_stream.close() if hasattr(
        parts.completion_stream, "close"
    ) else parts.completion_stream.response.close()
    until_idle(url)


if __name__ == "__main__":
    run(
        "litellm",
        [one_answer, stream, several, stop, logprobs, penalties, completion, tools, json_schema, errors, cancel],
    )
