"""OpenAI's API on a real engine, by OpenAI's client and by bare connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from checkpoints import reference_logits
from engines import wait_until
from exhausted import forkserver
from llguidance import LLMatcher
from ppengine.common.config import load_profile
from ppengine.http.engine_state import FRESH_S
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.inspection import FinishedDetail
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import DrainClient, Kick, Limit, Pause, Resume, Submit, SwapIn, SwapOut
from serving import Served
from structured_judge import schema_grammar, structured
from trace_receiver import TraceReceiver, values

pytestmark = pytest.mark.long
PROMPT, STEPS, MOST = "Once upon a time", 60, 6
CHAT: list[Any] = [{"role": "user", "content": "Tell me a story."}]
LASTING = 960
"""Tokens of a stream that lasts for some seconds: more than the test needs on a slow machine."""
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def receiver() -> Iterator[TraceReceiver]:
    with TraceReceiver() as made:
        yield made


@pytest.fixture(scope="module")
def engine(receiver: TraceReceiver) -> Iterator[Served]:
    settings = [
        "threads_per_stage=1", "model.dtype=float64", "model.max_model_len=1024", "memory.device_mib=128",
        "http.listen=127.0.0.1:0", "http.processes=2", f"http.most_open={MOST}", "console.publish_hz=20",
        f"http.otlp_traces_endpoint={receiver.endpoint}",
    ]  # fmt: skip
    with Served(load_profile("tiny", settings), step_s=0.002) as served:
        for _ in range(20):  # Either of the two processes answers.
            wait_until(lambda: call(served, "GET", "/ready")[0] == 200, "it is ready")
        yield served


@pytest.fixture(scope="module")
def written(engine: Served) -> str:
    """The text of the prompt, greedy, as a console gets it: from the process of texts."""

    async def run() -> str:
        async with engine.operator() as op:
            _, text, reason = await op.output(await op.submit(PROMPT, max_tokens=STEPS))
            assert reason == "length"
            return text

    return asyncio.run(run())


def address(engine: Served) -> str:
    listen = engine.config.profile.http.listen
    assert listen is not None and not listen.endswith(":0")
    return listen


@pytest.fixture
def client(engine: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address(engine)}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def call(engine: Served, method: str, path: str, body: bytes | dict[str, Any] = b"") -> tuple[int, Any, dict[str, str]]:
    """Return status, body and headers of one call."""
    host, _, port = address(engine).partition(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        answer = connection.getresponse()
        data = answer.read()
        kind = answer.getheader("content-type") or ""
        return answer.status, json.loads(data) if "json" in kind else data.decode(), dict(answer.getheaders())
    finally:
        connection.close()


def sent(engine: Served, body: dict[str, Any]) -> socket.socket:
    """Return a connection on which a streamed completion was asked for."""
    host, _, port = address(engine).partition(":")
    sock = socket.create_connection((host, int(port)), 30)
    data = json.dumps({"prompt": PROMPT, "stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    sock.sendall(head + data)
    return sock


def opened(engine: Served, body: dict[str, Any]) -> socket.socket:
    """Return a connection on which a streamed completion has begun."""
    sock = sent(engine, body)
    assert b"data: " in read_until(sock, b"data: ")
    return sock


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = sock.recv(65536)
        if not piece:
            return data
        data += piece
    return data


def live(engine: Served) -> int:
    """Return how many requests the core has."""

    async def run() -> int:
        async with engine.operator() as op:
            return len((await op.now()).requests)

    return asyncio.run(run())


def streamed(answer: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in answer if chunk.choices)


# --- what OpenAI's client gets ----------------------------------------------------------------------------------


def test_a_completion_is_the_text_that_a_console_gets(client: openai.OpenAI, written: str) -> None:
    (model,) = client.models.list().data
    whole = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=STEPS, **GREEDY)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (written, "length")
    assert whole.usage is not None and whole.usage.completion_tokens == STEPS
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + STEPS
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model=model.id, prompt=PROMPT, max_tokens=STEPS, stream=True, stream_options=options, **GREEDY
        )
    )
    assert streamed(chunks) == written and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == STEPS and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[0].choices[0].text, "the first event has a token: clients take it for the first one"


def test_a_chat_is_rendered_as_the_core_renders_it(engine: Served, client: openai.OpenAI) -> None:
    async def text_of_core() -> str:
        async with engine.operator() as op:
            sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=STEPS)
            outcome = await op.do(Submit(prompt=CHAT[0]["content"], chat=True, sampling=sampling))
            return (await op.output(outcome.request or ""))[1]

    expected = asyncio.run(text_of_core())
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=STEPS, **GREEDY)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", expected)
    parts = list(client.chat.completions.create(model=model, messages=CHAT, max_tokens=STEPS, stream=True, **GREEDY))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert parts[0].choices[0].delta.role == "assistant" and parts[0].choices[0].delta.content
    in_parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    again = client.chat.completions.create(model=model, messages=in_parts, max_tokens=STEPS, **GREEDY)  # type: ignore[arg-type]
    assert again.choices[0].message.content == expected


def test_responses_and_messages_are_the_same_chat(engine: Served, client: openai.OpenAI) -> None:
    import anthropic  # It takes four seconds of a core, and one worker has this test.

    chat = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=STEPS, **GREEDY)
    text, asked = chat.choices[0].message.content, CHAT[0]["content"]
    more = {"model": "tiny", "input": asked, "max_output_tokens": STEPS, **GREEDY}
    whole = client.responses.create(**more)
    assert (whole.output_text, whole.status) == (text, "incomplete")
    assert whole.usage is not None and chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, STEPS)
    events = list(client.responses.create(stream=True, **more))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert sum(event.type == "response.output_text.delta" for event in events) > STEPS // 4, "as it grows"
    ask: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": STEPS}
    ask["extra_body"] = {"temperature": 0, "ignore_eos": True}
    with anthropic.Anthropic(base_url=f"http://{address(engine)}", api_key="none", max_retries=0) as other:
        message = other.messages.create(**ask)
        assert ([block.text for block in message.content], message.stop_reason) == ([text], "max_tokens")
        with other.messages.stream(**ask) as stream:
            assert "".join(stream.text_stream) == text
            usage = stream.get_final_message().usage
        count = other.messages.count_tokens(model="tiny", messages=CHAT).input_tokens
        assert count == chat.usage.prompt_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_several_prompts_and_choices_are_numbered_in_order(client: openai.OpenAI, written: str) -> None:
    prompts, more = [PROMPT, "The dog"], {"extra_body": {"ignore_eos": True}, "max_tokens": 12, "seed": 7}
    whole = client.completions.create(model="tiny", prompt=prompts, n=3, temperature=1.0, **more)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) > 2 and whole.usage is not None and whole.usage.completion_tokens == 6 * 12
    parts = [""] * 6
    for chunk in client.completions.create(model="tiny", prompt=prompts, n=3, temperature=1.0, stream=True, **more):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == texts, "one seed, one answer"


def test_a_stop_text_ends_a_choice_and_its_request(engine: Served, client: openai.OpenAI, written: str) -> None:
    at = len(written) // 2
    stop = written[at : at + 7]
    first = written.index(stop)
    for stream in (False, True):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=400, stop=["never there", stop], stream=stream, **GREEDY
        )
        text = streamed(answer) if stream else answer.choices[0].text
        assert text == written[:first]
        if not stream:
            assert answer.choices[0].finish_reason == "stop"
    wait_until(lambda: live(engine) == 0, "the core computes nothing beyond a stop text")


def test_a_stop_text_ends_one_prompt_of_several(engine: Served, client: openai.OpenAI, written: str) -> None:
    """It ends in the core then, also as sample 0 of two, while the other prompt goes on to its last token."""
    stop = written[len(written) // 2 :][:9]
    for n in (1, 2):
        answer = client.completions.create(
            model="tiny", prompt=[PROMPT, "The dog"], n=n, max_tokens=400, stop=stop, **GREEDY
        )
        stopped = answer.choices[0]
        assert (stopped.text, stopped.finish_reason) == (written[: written.index(stop)], "stop")

        async def ends(name: str = answer.id) -> list[FinishedInfo]:
            async with engine.operator() as op:
                detail = await op.link.inspect("finished")
                assert isinstance(detail, FinishedDetail)
                return [one for one in detail.requests if one.id.partition(".")[0] == f"{name}-0"]

        found = asyncio.run(ends())
        assert [one.reason for one in found] == ["stop"] * n
        assert max(one.output_tokens for one in found) < 100, "of 400"


def test_penalties_bias_and_bad_words_change_the_text(client: openai.OpenAI, written: str) -> None:
    word = written.split()[1]
    without = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=STEPS, temperature=0,
        extra_body={"ignore_eos": True, "bad_words": [word]},
    )  # fmt: skip
    assert word in written and word not in without.choices[0].text.split()
    ids = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    (forced,) = {
        one.token
        for one in (
            client.chat.completions.create(
                model="tiny", messages=CHAT, logprobs=True, logit_bias={"400": 100}, **ids
            ).choices[0].logprobs.content
        )
    }  # fmt: skip
    assert forced, "one token alone, eight times"
    plain, less = (
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=STEPS, temperature=0, frequency_penalty=penalty,
            extra_body={"ignore_eos": True, "repetition_penalty": 1.0 + penalty / 4},
        ).choices[0].text
        for penalty in (0.0, 2.0)
    )  # fmt: skip
    assert plain == written and len(set(less.split())) > len(set(plain.split()))


def test_log_probabilities_are_those_of_the_tokens(client: openai.OpenAI, written: str) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = (chat.choices[0].logprobs and chat.choices[0].logprobs.content) or []
    assert len(content) == 5 and "".join(one.token for one in content) == chat.choices[0].message.content
    assert all(len(one.top_logprobs) == 3 and one.top_logprobs[0].token == one.token for one in content)
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in content)
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, logprobs=2, **GREEDY)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []) == whole.choices[0].text
    assert [len(one) for one in logprobs.top_logprobs or []] == [2] * 5 and (logprobs.text_offset or [9])[0] == 0


def test_an_echoed_prompt_has_the_log_probabilities_of_transformers(engine: Served, client: openai.OpenAI) -> None:
    """Twice the same: the second one finds its prefix in the cache, and leaves it there."""
    ids = call(engine, "POST", "/tokenize", {"prompt": PROMPT * 30})[1]["tokens"]
    expected = torch.log_softmax(reference_logits(Path(engine.config.model_path), ids, torch.float64), -1)
    for _ in range(2):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT * 30, max_tokens=2, echo=True, logprobs=1, extra_body={"prompt_logprobs": 0}
        )
        choice = answer.choices[0]
        assert choice.text.startswith(PROMPT * 30) and choice.logprobs is not None
        known = choice.logprobs.token_logprobs or []
        assert known[0] is None and len(known) == len(ids) + 2
        own = [float(expected[at - 1, token]) for at, token in enumerate(ids[1:], 1)]
        assert known[1 : len(ids)] == pytest.approx(own, abs=1e-5)
        scored = [one[str(token)]["logprob"] for one, token in zip(choice.prompt_logprobs[1:], ids[1:], strict=True)]
        assert scored == known[1 : len(ids)]


def test_tokens_go_there_and_back(engine: Served) -> None:
    status, found, _ = call(engine, "POST", "/tokenize", {"prompt": PROMPT})
    assert status == 200 and found["count"] == len(found["tokens"]) and found["max_model_len"] == 1024
    assert call(engine, "POST", "/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": PROMPT}
    body = {"prompt": found["tokens"], "max_tokens": 4, "temperature": 0}
    by_ids = call(engine, "POST", "/v1/completions", body)[1]["choices"]
    assert by_ids == call(engine, "POST", "/v1/completions", {**body, "prompt": PROMPT})[1]["choices"]


def samples(engine: Served) -> dict[str, float]:
    """Return the sum of each sample's values over its labels."""
    status, text, headers = call(engine, "GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.partition("{")[0]] = found.get(name.partition("{")[0], 0.0) + float(value)
    return found


def test_metrics_count_what_clients_got(engine: Served, client: openai.OpenAI) -> None:
    before = samples(engine)
    for _ in range(2):
        client.completions.create(model="tiny", prompt="A prompt of its own", max_tokens=10, **GREEDY)
    wait_until(lambda: live(engine) == 0, "both have ended")
    after = samples(engine)
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["vllm:generation_tokens_total"] == 20 == grown["vllm:request_generation_tokens_sum"]
    assert grown["vllm:request_success_total"] == grown["vllm:e2e_request_latency_seconds_count"] == 2
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown["vllm:inter_token_latency_seconds_count"] == 18 == grown["ppengine_inter_token_seconds_count"]
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:request_prompt_tokens_sum"] > 0
    assert after["vllm:num_requests_running"] == 0 and after["ppengine_stage_up"] == 2

    def reported() -> bool:
        now = samples(engine)
        calls = sum(now.get(f"http_request_duration_seconds_{part}", 0) for part in ("count", "sum"))
        return calls > 2 and now.get("ppengine_stage_step_seconds", 0) > 0 < now.get("ppengine_stage_idle_ratio", 0)

    wait_until(reported, "HTTP processes and the gateway have reported")
    assert samples(engine)["process_resident_memory_bytes"] > 2 * 2**20


def test_the_console_sees_clients_by_key_and_route(engine: Served, client: openai.OpenAI) -> None:
    sock = opened(engine, {"max_tokens": LASTING, "ignore_eos": True, "user": "ann", "priority": 3})
    client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=5, **GREEDY)

    async def seen() -> None:
        async with engine.operator() as op:
            picture = await op.until(
                lambda picture: {one.route: one.open for one in picture.clients}.items()
                >= {"/v1/completions": 1, "/v1/chat/completions": 0}.items(),
                "one stream is open", 10.0,
            )  # fmt: skip
            assert [(one.owner, one.priority) for one in picture.requests] == [("ann", 3)]
            found = {one.route: one for one in picture.clients}
            plain, chat = found["/v1/completions"], found["/v1/chat/completions"]
            assert (plain.key, plain.open) == ("http", 1) and plain.tokens_total > 0
            assert chat.open == 0 and chat.ttft_ms.count > 0 and (chat.ttft_ms.p50 or 0) > 0
            sock.close()
            await op.until(
                lambda picture: any(one.left_total for one in picture.clients if not one.open), "it has left", 10.0
            )

    asyncio.run(seen())


# --- what is refused --------------------------------------------------------------------------------------------

BAD: list[tuple[bytes | dict[str, Any], int, str | None, str]] = [
    (b"", 400, None, "no JSON"),
    (b'"text"', 400, None, "must be an object"),
    (b"\xff\xfe{}", 400, None, "no JSON"),
    (b'{"prompt": "\xff"}', 400, None, "no JSON"),
    (b"[" * 100_000, 400, None, "no JSON"),
    (b'{"prompt": ' + b"[" * 100_000 + b"}", 400, None, "no JSON"),
    ({"prompt": "x", "tempreature": 1}, 400, "tempreature", "did you mean temperature?"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature", "0 (greedy) to 100"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "it must be a number or null"),
    ({"prompt": "x", "n": 0}, 400, "n", "1 to 64"),
    ({"prompt": "x", "best_of": 5}, 400, "best_of", "it must be n (1)"),
    ({"prompt": "x", "logit_bias": {"7": 1000}}, 400, "logit_bias", "-100 to 100"),
    ({"prompt": "x", "allowed_token_ids": [10**9]}, 400, "allowed_token_ids", "not in the vocabulary"),
    ({"prompt": "x", "stop_token_ids": [10**9]}, 400, "stop_token_ids", "not in the vocabulary"),
    ({"prompt": "x", "logit_bias": {"1000000000": 1}}, 400, "logit_bias", "not in the vocabulary"),
    ({"prompt": "x", "suffix": "end"}, 400, "suffix", "does not have it"),
    ({"prompt": "x", "model": "gpt-4"}, 404, "model", "it is tiny"),
    ({"prompt": [], "max_tokens": 1}, 400, "prompt", "empty list"),
    ({"prompt": [1, "x"]}, 400, "prompt", "mixes"),
    ({"prompt": [10**9]}, 400, "prompt", "not in the vocabulary"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": "word " * 2000}, 400, "prompt", "max_model_len"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
]


@pytest.mark.parametrize(("body", "status", "param", "words"), BAD)
def test_bad_input_gets_one_line_that_names_the_field(
    engine: Served, body: bytes | dict[str, Any], status: int, param: str | None, words: str
) -> None:
    got, answer, _ = call(engine, "POST", "/v1/completions", body)
    error = answer["error"]
    assert (got, error["param"]) == (status, param), error
    assert words in error["message"] and len(error["message"]) <= 500 and "\n" not in error["message"]


def test_values_that_change_nothing_are_taken(engine: Served) -> None:
    body = {
        "prompt": PROMPT, "max_tokens": 2, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logit_bias": {}, "stop": None, "echo": False, "user": "me", "best_of": 1, "seed": None,
        "stream_options": None, "suffix": None,
    }  # fmt: skip
    status, answer, headers = call(engine, "POST", "/v1/completions", body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 2
    assert headers["x-request-id"] == answer["id"]


def test_a_request_that_has_ended_is_shown_by_the_id_of_its_client(engine: Served, client: openai.OpenAI) -> None:
    named = {"x-request-id": "log-line-7"}
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, **GREEDY, extra_headers=named)
    assert "log-line-7" in answer.id and answer.usage is not None
    wait_until(lambda: "are not kept" in engine.cli("show", answer.id).out, "its output was received")
    lines = engine.cli("show", "log-line-7").out.splitlines()
    assert lines[:2] == [f"request   {answer.id}", "state     finished: length"]
    assert f"tokens    {answer.usage.prompt_tokens} in, 3 out" in lines
    shown = engine.cli("show", answer.id, "--json").json
    assert 0 < shown["ttft_s"] < shown["took_s"] and shown["itl_ms"] > 0
    gone = engine.cli("show", "log-line-8")
    assert gone.code == 7 and "the engine keeps the newest 1,000 that ended (those since " in gone.err


def test_a_long_body_and_an_unknown_path_get_an_answer(engine: Served) -> None:
    assert call(engine, "GET", "/v1/nothing")[0] == 404
    status, _, headers = call(engine, "GET", "/v1/completions")
    assert status == 405 and headers["allow"] == "POST"
    status, answer, _ = call(engine, "POST", "/v1/completions", b" " * (17 * 2**20))
    assert status == 413 and "16777216" in answer["error"]["message"]


# --- clients that leave, processes that end -------------------------------------------------------------------------


def test_a_client_that_leaves_takes_its_request_along(engine: Served) -> None:
    sock = opened(engine, {"max_tokens": LASTING, "ignore_eos": True})
    assert live(engine) == 1
    sock.close()
    wait_until(lambda: live(engine) == 0, "its request is aborted")


def test_more_requests_than_the_process_takes_are_told_to_come_later(engine: Served) -> None:
    async def crowd() -> list[bytes]:
        async with engine.operator() as op:
            await op.do(Pause(mode="keep"))  # None ends meanwhile.
            socks = [sent(engine, {"max_tokens": 2}) for _ in range(8 * MOST)]
            answers = [read_until(sock, b"\r\n\r\n") for sock in socks]
            taken = sum(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
            assert len((await op.now()).requests) == taken == 2 * MOST, "both processes are full"
            refused = [
                answer if b"}}" in answer else answer + read_until(sock, b"}}")
                for sock, answer in zip(socks, answers, strict=True)
                if not answer.startswith(b"HTTP/1.1 200 ")
            ]
            for sock in socks:
                sock.close()
            await op.do(Resume())
            await op.idle()
            return refused

    for answer in asyncio.run(crowd()):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in head
        assert json.loads(body)["error"]["type"] == "rate_limit_error"


def test_a_key_is_limited_kicked_and_drained(engine: Served) -> None:
    long = {"max_tokens": LASTING, "ignore_eos": True}

    def status() -> int:
        return call(engine, "POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0]

    async def work() -> None:
        async with engine.operator() as op:
            await op.do(Limit(client="http", limit="2"))
            await op.do(Pause(mode="keep"))  # None ends meanwhile.
            socks = [await asyncio.to_thread(sent, engine, long) for _ in range(2)]
            heads = [await asyncio.to_thread(read_until, sock, b"\r\n\r\n") for sock in socks]
            assert all(head.startswith(b"HTTP/1.1 200 ") for head in heads)
            for _ in range(6):  # Either process answers, and both have the same limit.
                assert await asyncio.to_thread(status) == 429
            (client, *_) = (await op.now()).clients
            assert client.most_open == 2
            await op.do(Kick(client="http"))
            ends = [await asyncio.to_thread(read_until, sock, b"[DONE]") for sock in socks]
            assert all(b'"finish_reason":"abort"' in end for end in ends)
            await op.do(DrainClient(client="http"))
            assert await asyncio.to_thread(status) == 503
            await op.do(Resume())
            await op.do(Limit(client="http", limit="off"))
            await op.idle()

    asyncio.run(work())
    # The kernel chooses the process of each call.
    wait_until(lambda: all(status() == 200 for _ in range(8)), "both processes have taken the end of the drain")


def test_a_killed_process_takes_its_own_streams_alone(engine: Served, client: openai.OpenAI, written: str) -> None:
    socks = [opened(engine, {"max_tokens": 400, "ignore_eos": True, "temperature": 0}) for _ in range(6)]
    gone = engine.pids["http0"]
    os.kill(gone, signal.SIGKILL)
    closed = [b"[DONE]" not in read_until(sock, b"[DONE]") for sock in socks]
    assert 0 < closed.count(True) < 6 or len(set(closed)) == 1, closed
    wait_until(lambda: live(engine) == 0, "no request stays behind")
    wait_until(lambda: engine.find_pids() is None and engine.pids.get("http0", gone) != gone, "another one is there")
    for _ in range(8):
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=STEPS, **GREEDY)
        assert answer.choices[0].text == written


def test_a_stopped_process_is_named_here_and_by_the_others(engine: Served) -> None:
    """The kernel hands a part of all connections to it, which get no answer."""
    pid = engine.pids["http0"]
    wait_until(lambda: 'role="http0"' in call(engine, "GET", "/metrics")[1], "it has reported")

    def health() -> str:
        with contextlib.suppress(TimeoutError), socket.create_connection(address(engine).split(":"), 0.5) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
            return read_until(sock, b"serving").decode()
        return ""

    async def work() -> None:
        async with engine.operator() as op:
            os.kill(pid, signal.SIGSTOP)
            try:
                picture = await op.until(lambda picture: picture.verdicts, "a verdict")
                (verdict,) = picture.verdicts
                assert verdict.summary == f"http0 (HTTP process, pid {pid}) is stopped by a signal (state T)"
                assert (verdict.cause, verdict.suggest) == ("process", f"kill -CONT {pid}")
                await asyncio.to_thread(wait_until, lambda: "do not answer: http0" in health(), "another one says it")
            finally:
                os.kill(pid, signal.SIGCONT)
            over = await op.until(lambda picture: not picture.verdicts, "it goes on, and has not hung")
            assert over.incident.cause == "process" and over.incident.summary == verdict.summary
            assert over.incident.ended == "nothing shows it any more"
            await asyncio.to_thread(wait_until, lambda: health().endswith("serving"), "the others know")

    asyncio.run(work())
    rows = engine.cli("incidents").out.splitlines()
    assert " - " in rows[-1] and " process " in rows[-1] and "nothing shows it any more" in rows[-1]


def test_a_process_that_leaves_in_order_ends_its_answers(engine: Served) -> None:
    body = {"max_tokens": LASTING, "ignore_eos": True, "temperature": 0}
    socks = [opened(engine, body) for _ in range(MOST - 1)]
    # Its client reads no more, and must not hold the others up.
    socks.append(opened(engine, {**body, "logprobs": 5}))
    gone = [engine.pids[role] for role in ("http0", "http1")]
    for pid in gone:
        os.kill(pid, signal.SIGTERM)
    for sock in socks[:-1]:
        last = read_until(sock, b"0\r\n\r\n").rpartition(b'data: {"error"')[2]
        assert b"the HTTP server is stopped" in last and last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), last
        assert not sock.recv(1)
    wait_until(lambda: live(engine) == 0, "no request stays behind")
    wait_until(
        lambda: engine.find_pids() is None and not set(gone) & set(engine.pids.values()), "others are there"
    )  # fmt: skip
    for _ in range(8):
        wait_until(lambda: call(engine, "GET", "/ready")[0] == 200, "they are ready")


@pytest.mark.parametrize("role", ["stage1", "core", "gateway"])
def test_a_stream_outlives_a_part_of_the_engine(
    engine: Served, client: openai.OpenAI, written: str, role: str, receiver: TraceReceiver
) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=STEPS, stream=True, extra_headers=traced(role), **GREEDY
    )  # fmt: skip
    text = next(answer).choices[0].text
    os.kill(engine.pids[role], signal.SIGKILL)
    seen = {call(engine, "GET", "/health")[0] for _ in range(20)}
    assert text + streamed(answer) == written
    assert seen == {200}, "a restart must not make an orchestrator kill the engine"
    wait_until(lambda: call(engine, "GET", "/ready")[0] == 200, "it is ready again", 30.0)

    async def settled() -> None:
        async with engine.operator() as op:
            await op.until(lambda picture: picture.engine.state == "serving", "it serves", 30.0)

    asyncio.run(settled())
    engine.find_pids()
    names = [span.name for span in spans_of(receiver, role)]
    assert names.count("restart") == (role != "gateway") and {"queue", "prefill", "decode"} < set(names)


def test_connections_that_take_all_descriptors_end_no_stream(engine: Served) -> None:
    roles = ["http0", "http1"]
    before = {role: resource.prlimit(engine.pids[role], resource.RLIMIT_NOFILE) for role in roles}
    streams = [opened(engine, {"max_tokens": LASTING, "ignore_eos": True}) for _ in range(4)]
    idle = list[socket.socket]()
    try:
        for role, (_, hard) in before.items():
            used = sum(1 for _ in Path(f"/proc/{engine.pids[role]}/fd").iterdir())
            resource.prlimit(engine.pids[role], resource.RLIMIT_NOFILE, (used + 8, hard))
        host, _, port = address(engine).partition(":")
        idle += [socket.create_connection((host, int(port))) for _ in range(100)]
        # They report their descriptors each second.
        time.sleep(2.0)
        assert all(b"[DONE]" in read_until(sock, b"[DONE]") for sock in streams)
    finally:
        for sock in [*streams, *idle]:
            sock.close()
        for role, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(engine.pids[role], resource.RLIMIT_NOFILE, limits)
    known = {role: engine.pids[role] for role in roles}
    engine.find_pids()
    assert {role: engine.pids[role] for role in roles} == known
    wait_until(lambda: call(engine, "GET", "/ready")[0] == 200, "it answers")


def test_an_engine_whose_stage_restarts_is_alive_and_not_ready(engine: Served) -> None:
    forks = forkserver(engine)
    # No stage is started meanwhile: a restart takes 0.2 s here.
    os.kill(forks, signal.SIGSTOP)
    try:
        os.kill(engine.pids["stage1"], signal.SIGKILL)
        wait_until(lambda: call(engine, "GET", "/ready")[0] == 503, "it is not ready")
        # The other process may answer with a state of `FRESH_S` ago.
        time.sleep(5 * FRESH_S)
        for _ in range(8):
            status, text, _ = call(engine, "GET", "/ready")
            assert status == 503 and "stage 1" in text, text
            assert {call(engine, "GET", path)[0] for path in ("/health", "/ping", "/v1/models")} == {200}
    finally:
        os.kill(forks, signal.SIGCONT)
    wait_until(lambda: call(engine, "GET", "/ready")[0] == 200, "it is ready again", 30.0)
    engine.find_pids()


# --- traces -----------------------------------------------------------------------------------------------------------


def traced(name: str) -> dict[str, str]:
    """Return the header of a client's own trace."""
    return {"traceparent": f"00-{name.encode().hex():0>32}-00f067aa0ba902b7-01"}


def spans_of(receiver: TraceReceiver, name: str) -> list[Any]:
    """Return the spans of a client's trace, once the last has come: that of its call."""
    trace = bytes.fromhex(f"{name.encode().hex():0>32}")

    def found() -> list[Any]:
        return [span for span in receiver.spans if span.trace_id == trace]

    wait_until(lambda: any(span.parent_span_id.hex() == "00f067aa0ba902b7" for span in found()), "it has come", 30.0)
    return found()


def test_a_trace_has_the_swaps_of_its_request(engine: Served, client: openai.OpenAI, receiver: TraceReceiver) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=400, stream=True, extra_headers=traced("swaps"), **GREEDY
    )  # fmt: skip
    next(answer)

    async def swap() -> None:
        async with engine.operator() as op:
            (row,) = (await op.now()).requests
            await op.do(SwapOut(request=row.id))
            await op.do(SwapIn(request=row.id))

    asyncio.run(swap())
    streamed(answer)
    *children, call = spans_of(receiver, "swaps")
    assert [span.name for span in children] == ["prepare", "queue", "prefill", "decode", "swap-out", "swap-in"]
    assert {span.parent_span_id for span in children} == {call.span_id} and call.name == "text_completion tiny"
    assert values(call)["gen_ai.usage.output_tokens"] == 400
    _, queue, prefill, decode, out, back = children
    times = [queue.start_time_unix_nano, prefill.start_time_unix_nano, decode.start_time_unix_nano,
             out.start_time_unix_nano, out.end_time_unix_nano, back.start_time_unix_nano, back.end_time_unix_nano,
             decode.end_time_unix_nano]  # fmt: skip
    assert times == sorted(times)


def test_a_client_that_leaves_has_a_trace(engine: Served, receiver: TraceReceiver) -> None:
    host, _, port = address(engine).partition(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    body = {"prompt": PROMPT, "stream": True, "max_tokens": LASTING, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), traced("left"))
    assert connection.getresponse().read(1)
    connection.close()
    *children, call = spans_of(receiver, "left")
    assert values(call)["ppconsole.client_left"]
    assert [span.name for span in children] == ["prepare", "queue", "prefill", "decode"]


# --- structured outputs ---------------------------------------------------------------------------------------------

SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["name", "age", "pets"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "pets": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["cat", "dog"]}},
    },
}  # fmt: skip
AS_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}
FORMS: list[tuple[dict[str, Any], str]] = [
    (AS_SCHEMA, schema_grammar(SCHEMA)),
    ({"structured_outputs": {"regex": "[a-f]{4,40}!"}}, LLMatcher.grammar_from_regex("[a-f]{4,40}!")),
    ({"guided_choice": ["never", "for ever"]}, LLMatcher.grammar_from_lark('start: "never" | "for ever"')),
    ({"guided_grammar": 'start: ("he" | "she") " ran" (" far")*'},
     LLMatcher.grammar_from_lark('start: ("he" | "she") " ran" (" far")*')),
]  # fmt: skip


class TestStructuredOutputs:
    """Answers that follow a schema or grammar, with the tokens of the judge."""

    @pytest.mark.parametrize(("fields", "grammar"), FORMS, ids=lambda value: next(iter(value), "")[:20])
    @pytest.mark.parametrize("min_tokens", [0, 12])
    def test_a_text_is_the_judges(self, engine: Served, fields: dict[str, Any], grammar: str, min_tokens: int) -> None:
        folder = Path(engine.config.model_path)
        body = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, "min_tokens": min_tokens, **fields}
        status, answer, _ = call(engine, "POST", "/v1/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["text"] == structured(folder, PROMPT, grammar, 80, min_tokens=min_tokens)

    def test_a_chat_answers_by_its_schema(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="tiny", messages=CHAT, n=4, seed=1, max_tokens=400, **AS_SCHEMA)
        for choice in answer.choices:
            found = json.loads(choice.message.content or "")
            assert found.keys() == {"name", "age", "pets"} and len(found["name"]) <= 20 and 1 <= found["age"] <= 99
            assert 1 <= len(found["pets"]) <= 3 and {"cat", "dog"}.issuperset(found["pets"])
            assert choice.finish_reason == "stop"

    def test_a_call_is_certain(self, client: openai.OpenAI) -> None:
        """The bundled model knows no tools; its output is a call all the same, also in a stream."""
        tool: Any = {"type": "function", "function": {"name": "greet", "parameters": SCHEMA}}
        body: Any = {"model": "tiny", "messages": CHAT, "seed": 1, "max_tokens": 400, "tools": [tool]}
        (choice,) = client.chat.completions.create(tool_choice="required", parallel_tool_calls=False, **body).choices
        (made,) = choice.message.tool_calls or []
        assert made.type == "function" and made.function.name == "greet" and choice.finish_reason == "tool_calls"
        assert json.loads(made.function.arguments).keys() == {"name", "age", "pets"}
        named: Any = {"type": "function", "function": {"name": "greet"}}
        deltas = [event.choices[0].delta for event in client.chat.completions.create(
            tool_choice=named, stream=True, **body)]  # fmt: skip
        calls = [call.function for delta in deltas for call in delta.tool_calls or [] if call.function]
        assert json.loads("".join(call.arguments or "" for call in calls)).keys() == {"name", "age", "pets"}
        body["max_tokens"] = 15
        (choice,) = client.chat.completions.create(tool_choice=named, **body).choices
        (cut,) = choice.message.tool_calls or []
        assert cut.type == "function" and cut.function.arguments.startswith("{")
        assert (choice.finish_reason, choice.message.content or "") == ("length", "")

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}},
             "Invalid type: objct"),
            ({"guided_regex": "(a"}, "unclosed group"),
            ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag is not supported"),
        ],
    )  # fmt: skip
    def test_a_bad_one_is_refused_by_its_field(self, engine: Served, fields: dict[str, Any], says: str) -> None:
        status, answer, _ = call(engine, "POST", "/v1/completions", {"prompt": PROMPT, **fields})
        assert status == 400 and says in answer["error"]["message"]
        assert answer["error"]["param"] == next(iter(fields))

    @pytest.mark.parametrize("role", ["grammar", "stage1", "core"])
    def test_a_stream_outlives_a_part(self, engine: Served, client: openai.OpenAI, role: str) -> None:
        body: dict[str, Any] = {"structured_outputs": {"regex": "([a-f] ?){30,80}!"}}
        grammar = LLMatcher.grammar_from_regex(body["structured_outputs"]["regex"])
        expected = structured(Path(engine.config.model_path), PROMPT, grammar, 120)
        made = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=120, temperature=0, stream=True, extra_body=body
        )  # fmt: skip
        text = next(made).choices[0].text
        os.kill(grammar_pid(engine) if role == "grammar" else engine.pids[role], signal.SIGKILL)
        assert text + streamed(made) == expected
        wait_until(lambda: call(engine, "GET", "/ready")[0] == 200, "it is ready again", 30.0)
        engine.find_pids()


def grammar_pid(engine: Served) -> int:
    """Return the grammar process with the masks, a child of the core."""
    core = engine.pids["core"]
    children = Path(f"/proc/{core}/task/{core}/children").read_text().split()
    command = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
    (found,) = [pid for pid, words in command.items() if b"ppengine.grammar" in words and words[-4].startswith(b"m")]
    return found
