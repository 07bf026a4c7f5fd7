"""The process of texts on a real engine: it makes the tokens of consoles' texts, and may be killed or stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from engines import wait_until
from operators import Operator
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import load_profile, profiles_dir
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.control import Outcome
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import StructuredOutputsParams
from ppengine.protocol.verbs import Submit
from serving import Served, audited

TINY = profiles_dir() / "models" / "tiny"
TOKENIZER = Tokenizer.load(TINY)
PROMPT, STEPS = "Once upon a time", 40
LONG = "The old house by the river was quiet. " * 60
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
assert len(LONG) > 2000


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    settings = [
        "threads_per_stage=1", "model.dtype=float64", "model.max_model_len=1024", "memory.device_mib=128",
        "http.listen=127.0.0.1:0",
    ]  # fmt: skip
    with Served(load_profile("tiny", settings), step_s=0.002) as served:
        yield served


def completion(engine: Served, path: str, body: dict[str, Any]) -> Any:
    """Return the answer of the HTTP port."""
    listen = engine.config.profile.http.listen
    assert listen is not None
    host, _, port = listen.partition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        data = json.loads(answer.read())
        assert answer.status == 200, data
        return data
    finally:
        connection.close()


async def texts_of(op: Operator, submit: Submit) -> list[tuple[list[int], str, str | None]]:
    """Return tokens, text and finish reason of each sample of a submission."""
    end = await op.do(submit)
    assert end.request is not None
    return [await op.output(end.request, sample) for sample in range(submit.sampling.n)]


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bad words": ({"bad_words": ["girl", "was"]}, {"bad_words": ["girl", "was"]}),
    "seeded": ({"n": 2, "temperature": 0.8, "seed": 7}, {"n": 2, "temperature": 0.8, "seed": 7}),
    "structured": ({"structured_outputs": StructuredOutputsParams(regex="[a-z ]{20}")},
                   {"structured_outputs": {"regex": "[a-z ]{20}"}}),
}  # fmt: skip
"""Sampling parameters of a console's request, and the fields of the same request over HTTP."""


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("sampling", "fields"), FIELDS.values(), ids=FIELDS)
async def test_a_text_of_a_console_is_that_of_http(
    engine: Served, prompt: str, sampling: dict[str, Any], fields: dict[str, Any]
) -> None:
    params = SamplingParams(**{**GREEDY, "max_tokens": STEPS, **sampling})
    body = {"prompt": prompt, "max_tokens": STEPS, "ignore_eos": True, "temperature": 0, **fields}
    async with engine.operator() as op:
        samples = await texts_of(op, Submit(prompt=prompt, sampling=params))
        answer = await asyncio.to_thread(completion, engine, "/v1/completions", body)
    assert [(text, reason) for _, text, reason in samples] == [
        (choice["text"], choice["finish_reason"]) for choice in answer["choices"]
    ]
    assert all(text for _, text, _ in samples)


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
async def test_a_chat_of_a_console_has_the_tokens_of_its_template(engine: Served, prompt: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    ids = TOKENIZER.encode_chat(ChatTemplate.load(TINY).render(Chat(messages=messages), 10_000))
    params = SamplingParams(**GREEDY, max_tokens=STEPS)
    body = {"messages": messages, "max_tokens": STEPS, "ignore_eos": True, "temperature": 0}
    async with engine.operator() as op:
        (sample,) = await texts_of(op, Submit(prompt=prompt, chat=True, sampling=params))
        assert [sample] == await texts_of(op, Submit(prompt_token_ids=ids, sampling=params))
        answer = await asyncio.to_thread(completion, engine, "/v1/chat/completions", body)
        planned = await op.do(Submit(prompt=prompt, chat=True, sampling=params), dry_run=True)
    assert answer["choices"][0]["message"]["content"] == sample[1]
    assert planned.text == f"queue 1 sample(s) of {len(ids)} prompt tokens"
    ran = await asyncio.to_thread(
        engine.cli, "submit", prompt, "--chat", "--max-tokens", f"{STEPS}", "--temperature", "0", "--ignore-eos"
    )  # fmt: skip
    assert (ran.code, ran.out.rstrip("\n")) == (0, sample[1].rstrip("\n"))


SUBMITS = [
    Submit(prompt=PROMPT, sampling=SamplingParams(**GREEDY, max_tokens=STEPS)),
    Submit(prompt=LONG, sampling=SamplingParams(**GREEDY, max_tokens=STEPS)),
    Submit(prompt=PROMPT, chat=True, sampling=SamplingParams(**GREEDY, max_tokens=STEPS)),
    Submit(prompt="The king", sampling=SamplingParams(**GREEDY, max_tokens=STEPS, bad_words=["king", "was"])),
]


async def kill(op: Operator, *roles: str) -> None:
    """Kill processes at once, and wait until others have their places and the engine serves."""
    engine = op.engine
    assert engine is not None
    gone = {role: engine.pids[role] for role in roles}
    for pid in gone.values():
        os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        engine.find_pids()
        return all(engine.pids[role] != pid for role, pid in gone.items())

    await asyncio.to_thread(wait_until, replaced, f"others in place of {', '.join(roles)}")


@pytest.mark.parametrize(
    "roles", [["texts"], ["core"], ["gateway"], ["texts", "core"], ["texts", "gateway"]], ids="-".join
)
async def test_kills_lose_no_text_that_waits_for_its_tokens(engine: Served, roles: list[str]) -> None:
    async with engine.operator() as op:
        expected = [await texts_of(op, submit) for submit in SUBMITS]
        with engine.stopped("texts"):
            begun = [await op.begin(submit) for submit in SUBMITS]
            assert all(one.deferred for one in begun), "they wait for the process of texts"
            await kill(op, *roles)
        for one, want in zip(begun, expected, strict=True):
            end = await one.end
            assert isinstance(end, Outcome) and end.state == "applied" and end.request, end
            assert [await op.output(end.request)] == want
        commands = [outcomes for outcomes in audited(engine).values() if "deferred" in outcomes]
        assert all(outcomes.count("applied") == 1 for outcomes in commands), commands


async def test_texts_of_a_stopped_process_wait_and_ids_go_on(engine: Served) -> None:
    ids = Submit(prompt_token_ids=TOKENIZER.encode(PROMPT), sampling=SUBMITS[0].sampling)
    async with engine.operator() as op:
        expected = await texts_of(op, ids)
        with engine.stopped("texts"):
            waiting = await op.begin(SUBMITS[0])
            assert waiting.deferred == ["waits for its tokenizer"]
            end = await op.do(ids)
            assert end.request is not None
            picture = await op.until(lambda picture: end.request not in [one.id for one in picture.requests], "it ends")
            assert picture.engine.state == "serving"
            text = await op.refused(Submit(prompt="another"), "BUSY")
            assert f"the process of texts (pid {engine.pids['texts']}) has not answered for" in text
        assert (await texts_of(op, SUBMITS[0])) == expected
        refused = await waiting.end
        assert not isinstance(refused, Outcome), "it has waited longer than the other"


async def test_the_end_of_the_process_is_an_event(engine: Served) -> None:
    async with engine.operator() as op:
        pid = engine.pids["texts"]
        await kill(op, "texts")
        await texts_of(op, SUBMITS[0])
        text = f"the process of texts (pid {pid}) has ended, killed by SIGKILL; it is restarted"
        assert [event.text for event in await op.heard() if event.kind == "texts.ended"][-1:] == [text]
