"""`echo` and `prompt_logprobs` of the HTTP port, with OpenAI's and vLLM's meaning."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from http_world import ASK, world
from ppengine.http import answer_fields as fields
from ppengine.http import answer_forms, answer_limits, completion_answer, generation_response
from ppengine.http.generation import Part

PROMPT, TEXT = "Once upon a time", " there was"
STORY = " there was a king and there was a dog."
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 9}


async def test_a_text_begins_with_its_prompt_once() -> None:
    async with world(TEXT) as one:
        ids = one.model.tokenizer.encode("The dog")
        body = {**BODY, "echo": True, "n": 2}
        _, whole = await one.post("/v1/completions", body)
        assert [choice["text"] for choice in whole["choices"]] == [PROMPT + TEXT] * 2
        assert one.model.submitted[-1].sampling.prompt_logprobs is None
        texts = ["", ""]
        for event in await one.events("/v1/completions", body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == [PROMPT + TEXT] * 2
        _, whole = await one.post("/v1/completions", {**BODY, "prompt": ids, "echo": True})
        assert whole["choices"][0]["text"] == f"The dog{TEXT}", "tokens have the text that they write"


async def test_log_probabilities_of_the_prompt_come_first() -> None:
    async with world(TEXT) as one:
        ids = one.model.tokenizer.encode(PROMPT)
        for stream in (False, True):
            body = {**BODY, "echo": True, "logprobs": 2}
            if stream:
                parts = [event["choices"][0] for event in await one.events("/v1/completions", body)]
            else:
                parts = (await one.post("/v1/completions", body))[1]["choices"]
            found: dict[str, list[Any]] = {}
            for part in parts:
                for name, values in part["logprobs"].items():
                    found.setdefault(name, []).extend(values)
            count = len(ids)
            assert found["token_logprobs"][: count + 1] == [None, *[-1.5] * (count - 1), -0.5]
            assert found["top_logprobs"][0] is None and -1.5 in found["top_logprobs"][1].values()
            assert len(found["top_logprobs"][1]) == 3, "two best ones, and the token of the prompt"
            assert "".join(found["tokens"]) == PROMPT + TEXT
            text = PROMPT + TEXT
            assert all(text[at:].startswith(token) for at, token in zip(
                found["text_offset"], found["tokens"], strict=True))  # fmt: skip
            assert one.model.submitted[-1].sampling.prompt_logprobs == 2


@pytest.mark.parametrize("text", [STORY, f" there was 🙂🙂{STORY}", f"<|user|><|user|><|user|>{STORY}"])
@pytest.mark.parametrize("stop", [None, ["a queen", "g and he", "e was a cat"]])
async def test_places_of_tokens_are_those_of_their_texts(text: str, stop: list[str] | None) -> None:
    """Also behind text that is held back, as a stop text may take it, and behind parts of characters."""
    async with world(text) as one:
        body = {**BODY, "logprobs": 0, "stop": stop}
        _, whole = await one.post("/v1/completions", body)
        (choice,) = whole["choices"]
        events = [event["choices"][0] for event in await one.events("/v1/completions", body)]
        places = choice["logprobs"]["text_offset"]
        assert places == [place for event in events for place in event["logprobs"]["text_offset"]]
        tokens = choice["logprobs"]["tokens"]
        pairs = zip(places, tokens, strict=True)
        known = [(at, token) for at, token in pairs if token not in ("\ufffd", "<|user|>")]
        assert len(known) > 7 and all(choice["text"][at:].startswith(token) for at, token in known)


async def test_without_an_output_the_prompt_is_scored_alone() -> None:
    """As evaluation harnesses do."""
    async with world(TEXT, "length") as one:
        body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
        _, whole = await one.post("/v1/completions", body)
        (choice,) = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert len(choice["logprobs"]["tokens"]) == len(one.model.tokenizer.encode(PROMPT))
        assert whole["usage"]["completion_tokens"] == 0
        assert one.model.submitted[-1].sampling.max_tokens == 1
        status, answer = await one.post("/v1/completions", {**body, "echo": False})
        assert (status, answer["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompt_logprobs_have_the_form_of_vllm(path: str) -> None:
    async with world(TEXT) as one:
        body = {"prompt_logprobs": 1, **(BODY if "chat" not in path else {"messages": ASK})}
        _, whole = await one.post(path, body)
        found = (whole if "chat" in path else whole["choices"][0])["prompt_logprobs"]
        ids = one.model.submitted[-1].prompt_token_ids or []
        assert found[0] is None and len(found) == len(ids)
        own = found[1][str(ids[1])]
        assert own == {"logprob": -1.5, "rank": 7, "decoded_token": one.model.tokenizer.token_text(ids[1])}
        assert found[1]["3"]["rank"] == 1
        status, answer = await one.post(path, {**body, "stream": True})
        assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
        assert "prompt_logprobs" not in str(await one.post(path, {**body, "prompt_logprobs": None}))


async def test_log_probabilities_that_were_lost_are_an_error() -> None:
    async with world(TEXT) as one:
        one.model.forgets = True
        status, answer = await one.post("/v1/completions", {**BODY, "echo": True, "logprobs": 1})
        assert status == 503 and "send it again" in answer["error"]["message"]
        assert (await one.post("/v1/completions", {**BODY, "echo": True}))[0] == 200


async def test_choices_share_the_log_probabilities_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        completion_answer, "prompt_tokens", lambda *given: made.append(given[2]) or answer_forms.prompt_tokens(*given)
    )  # fmt: skip
    async with world(TEXT) as one:
        ids = one.model.tokenizer.encode(PROMPT)
        body = {**BODY, "n": 3, "echo": True, "logprobs": 1, "prompt_logprobs": 2}
        _, whole = await one.post("/v1/completions", body)
        first, *others = whole["choices"]
        assert made == [2], "once for all choices"
        assert len(first["prompt_logprobs"]) == len(ids) < len(first["logprobs"]["tokens"])
        for other in others:
            assert {**other, "index": 0} == first


async def test_too_many_log_probabilities_of_prompts_are_refused_by_their_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(TEXT) as one:
        count = len(one.model.tokenizer.encode(PROMPT))
        scored, echo = {**BODY, "prompt_logprobs": 1}, {**BODY, "echo": True, "logprobs": 1}
        monkeypatch.setattr(answer_limits, "ANSWER_VALUES_MOST", count * 2 * 3)
        for body, field in ((scored, "prompt_logprobs"), (echo, "logprobs")):
            assert (await one.post("/v1/completions", {**body, "n": 3}))[0] == 200
            for more in ({"n": 4}, {"prompt": [PROMPT] * 4}):
                status, answer = await one.post("/v1/completions", {**body, **more})
                assert (status, answer["error"]["param"]) == (400, field)
        assert (await one.post("/v1/chat/completions", {"messages": ASK, "prompt_logprobs": 0, "n": 9}))[0] == 200
        monkeypatch.setattr(answer_limits, "VALUES_MOST", count * 2 - 1)
        for body, field in ((scored, "prompt_logprobs"), (echo, "logprobs")):
            status, answer = await one.post("/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
async def test_too_many_copies_of_prompts_are_refused_by_their_field(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """64 choices of a million tokens were an answer of 400 MB."""
    async with world(TEXT) as one:
        count = len(one.model.tokenizer.encode(PROMPT))
        monkeypatch.setattr(answer_limits, "COPIES_MOST", 3 * count)
        body = {**BODY, field: True}
        assert (await one.post("/v1/completions", {**body, "n": 3}))[0] == 200
        for more in ({"n": 4}, {"prompt": [PROMPT] * 2, "n": 2}):
            for stream in (False, True):
                status, answer = await one.post("/v1/completions", {**body, **more, "stream": stream})
                assert (status, answer["error"]["param"]) == (400, field)
        assert (await one.post("/v1/completions", {**BODY, "n": 4}))[0] == 200
        assert (await one.post("/v1/completions", {**body, "prompt": [PROMPT] * 4}))[0] == 200, "each has it once"
        chat = {"messages": ASK, "return_token_ids": True}
        monkeypatch.setattr(answer_limits, "COPIES_MOST", 1)
        assert (await one.post("/v1/chat/completions", chat))[0] == 200
        status, answer = await one.post("/v1/chat/completions", {**chat, "n": 2})
        assert (status, answer["error"]["param"]) == (400, "return_token_ids")


async def test_a_large_answer_is_encoded_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    whole = completion_answer.CompletionAnswer.whole

    def noted(answer: completion_answer.CompletionAnswer, parts: list[list[Part]]) -> fields.Completion:
        threads.append(threading.current_thread() is threading.main_thread())
        return whole(answer, parts)

    monkeypatch.setattr(completion_answer.CompletionAnswer, "whole", noted)
    async with world(TEXT) as one:
        count = len(one.model.tokenizer.encode(PROMPT))
        await one.post("/v1/completions", BODY)
        monkeypatch.setattr(generation_response, "INLINE_SIZE", count)
        _, made = await one.post("/v1/completions", {**BODY, "prompt_logprobs": 0})
        assert made["choices"][0]["text"] == TEXT and threads == [True, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_come_before_the_first_wait_for_its_log_probabilities(stream: bool) -> None:
    async with world(TEXT) as one:
        one.model.backwards = True
        body = {**BODY, "echo": True, "logprobs": 1, "n": 3}
        found = [0] * 3
        if stream:
            for event in await one.events("/v1/completions", body):
                (choice,) = event["choices"]
                found[choice["index"]] += choice["logprobs"]["token_logprobs"].count(-1.5)
        else:
            status, whole = await one.post("/v1/completions", body)
            assert status == 200
            found = [choice["logprobs"]["token_logprobs"].count(-1.5) for choice in whole["choices"]]
        assert found == [len(one.model.tokenizer.encode(PROMPT)) - 1] * 3
        one.model.forgets = True
        assert (await one.post("/v1/completions", body))[0] == 503
