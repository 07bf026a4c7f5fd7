"""langchain-openai: `python tests/clients/langchain_client.py http://HOST:PORT`."""

from __future__ import annotations

from checks import NUMBERS, PROMPT, SCHEMA, TOOL, run, until_idle
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI


def chat(url: str, **more: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=16, temperature=0, **more)


def one_answer(url: str) -> str:
    answer = chat(url).invoke([("system", "Be brief."), ("user", PROMPT)])
    assert answer.content and answer.usage_metadata["output_tokens"] <= 16
    return answer.response_metadata["finish_reason"]


def stream(url: str) -> str:
    parts = list(chat(url, stream_usage=True).stream(PROMPT))
    text = "".join(part.content for part in parts)
    assert text == chat(url).invoke(PROMPT).content
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) <= 16
    return f"{len(parts)} parts"


def several(url: str) -> None:
    made = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=8, temperature=1, n=3)
    assert len(made.generate([[HumanMessage(PROMPT)]]).generations[0]) == 3


def stop(url: str) -> None:
    whole = chat(url).invoke(PROMPT).content
    word = whole[len(whole) // 2 :][:3]
    assert chat(url, stop_sequences=[word]).invoke(PROMPT).content == whole[: whole.index(word)]


def logprobs(url: str) -> None:
    answer = chat(url, logprobs=True, top_logprobs=2).invoke(PROMPT)
    content = answer.response_metadata["logprobs"]["content"]
    assert content and all(len(one["top_logprobs"]) == 2 for one in content)


def completion(url: str) -> None:
    made = OpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=8, temperature=0)
    assert made.invoke(PROMPT) == "".join(made.stream(PROMPT)) != ""


def batch(url: str) -> None:
    assert len({one.content for one in chat(url).batch([PROMPT, "The dog", "A king"])}) > 1


def long(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=200, temperature=0)


def tools(url: str) -> None:
    """A certain call, whole and as the sum of a stream's pieces."""
    model = long(url).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    pieces = iter(model.stream(PROMPT))
    joined = next(pieces)
    for piece in pieces:
        joined += piece
    for answer in (model.invoke(PROMPT), joined):
        (one,) = answer.tool_calls
        assert one["name"] == "count" and one["args"]["n"] in NUMBERS


def json_schema(url: str) -> str:
    answer = long(url).with_structured_output({"title": "number", **SCHEMA}, method="json_schema").invoke(PROMPT)
    assert answer["n"] in NUMBERS
    return str(answer)


def cancel(url: str) -> None:
    long = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=900, extra_body={"ignore_eos": True}
    )
    parts = long.stream(PROMPT)
    next(parts)
    parts.close()
    until_idle(url)


if __name__ == "__main__":
    run(
        "langchain-openai",
        [one_answer, stream, several, stop, logprobs, completion, batch, tools, json_schema, cancel],
    )
