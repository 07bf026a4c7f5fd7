"""The process of texts on a real engine: tokens, text and stop texts for consoles, also if it is killed or stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import pytest
from engines import wait_until
from operators import Operator
from ppconsole.link.source import LinkLost, QueryFailed
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import load_profile, profiles_dir
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.control import Outcome
from ppengine.protocol.inspection import BlocksDetail, FinishedDetail
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import StructuredOutputsParams
from ppengine.protocol.verbs import ClearFaults, Fault, Submit
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


@pytest.fixture
def killed() -> Iterator[Served]:
    """An engine whose requests last for seconds, and whose parts may be killed often."""
    settings = ["threads_per_stage=1", "model.dtype=float64", "model.max_model_len=1024", "memory.device_mib=128"]
    with Served(load_profile("tiny", settings), "--allow-faults", step_s=0.004) as served:
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
    "stops": ({"stop": [" was a", "e w", ". "], "n": 3, "temperature": 0.8, "seed": 7},
              {"stop": [" was a", "e w", ". "], "n": 3, "temperature": 0.8, "seed": 7}),
    "late stop": ({"stop": ["a"], "min_tokens": 9}, {"stop": ["a"], "min_tokens": 9}),
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
    assert any(text for _, text, _ in samples)
    if "stop" in sampling:
        assert all(
            stop not in text for _, text, _ in samples for stop in sampling["stop"] if "min_tokens" not in sampling
        )
        assert "stop" in [reason for _, _, reason in samples]


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
        return all(engine.pids.get(role, pid) != pid for role, pid in gone.items())

    await asyncio.to_thread(wait_until, replaced, f"others in place of {', '.join(roles)}")


@pytest.mark.parametrize(
    "roles", [["texts"], ["core"], ["gateway"], ["texts", "core"], ["texts", "gateway"]], ids="-".join
)
async def test_kills_lose_no_text_that_waits_for_its_tokens(engine: Served, roles: list[str]) -> None:
    async with engine.operator() as op:
        expected = [await texts_of(op, submit) for submit in SUBMITS]
        before = audited(engine)
        with engine.stopped("texts"):
            begun = [await op.begin(submit) for submit in SUBMITS]
            assert all(one.deferred for one in begun), "they wait for the process of texts"
            await kill(op, *roles)
        for one, want in zip(begun, expected, strict=True):
            end = await one.end
            assert isinstance(end, Outcome) and end.state == "applied" and end.request, end
            assert [await op.output(end.request)] == want
        commands = [outcomes for name, outcomes in audited(engine).items() if name not in before]
        assert len(commands) == len(SUBMITS)
        assert all("deferred" in outcomes and outcomes.count("applied") == 1 for outcomes in commands), commands


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


async def read_on(op: Operator, name: str) -> tuple[list[int], str, str | None]:
    """Return tokens, text and finish reason of a request, over kills of all that it is read by."""
    tokens: list[int] = []
    text = ""
    async with asyncio.timeout(60):
        while True:
            try:
                part = await op.link.fetch(name, offset=len(tokens), text_offset=len(text))
            except (LinkLost, QueryFailed):
                await asyncio.sleep(0.1)
                continue
            assert part.offset == len(tokens) and part.text_offset == len(text)
            tokens += part.token_ids
            text += part.text
            if part.finished:
                return tokens, text, part.finish_reason


@dataclass
class Cut:
    """A request that a stop text ends late, and its text."""

    submit: Submit
    stop: str
    text: str
    tokens: list[int]
    """The tokens of its text, and those of the stop text."""


async def late_stop(op: Operator, prompt: str, tokens: int = 500) -> Cut:
    """Return a greedy request whose stop text, over several tokens, is in the last part of what it would write."""
    ((ids, text, _),) = await texts_of(op, Submit(prompt=prompt, sampling=SamplingParams(**GREEDY, max_tokens=tokens)))
    stop = next(
        text[at : at + 9] for at in range(len(text) * 4 // 5, len(text) - 9) if text.find(text[at : at + 9]) == at
    )
    at = text.find(stop)
    kept = next(count for count in range(1, len(ids)) if stop in TOKENIZER.decode(ids[:count]))
    sampling = SamplingParams(**GREEDY, max_tokens=900, stop=[stop])
    return Cut(Submit(prompt=prompt, sampling=sampling), stop, text[:at], ids[:kept])


async def test_a_stop_text_is_found_with_nobody_reading(engine: Served) -> None:
    async with engine.operator() as op:
        cut = await late_stop(op, PROMPT, 100)
        end = await op.do(cut.submit)
        picture = await op.until(lambda picture: end.request not in [one.id for one in picture.requests], "it ends")
        assert picture.requests_total == 0
        blocks = await op.link.inspect("blocks", request=end.request)
        assert isinstance(blocks, BlocksDetail)
        assert not {"used", "shared"} & {state for _, state in blocks.runs} and not blocks.mine, (
            "all are free or cached"
        )
        finished = await op.link.inspect("finished")
        assert isinstance(finished, FinishedDetail)
        (info,) = [one for one in finished.requests if one.id == end.request]
        assert info.reason == "stop" and len(cut.tokens) <= info.output_tokens < 100
        assert end.request is not None
        assert await op.output(end.request) == (cut.tokens, cut.text, "stop")
        detail = await op.detail(end.request)
        assert (detail.output_text, detail.output_token_ids, detail.why) == (cut.text, cut.tokens, "stop")
        assert detail.prompt_text == PROMPT


@pytest.mark.parametrize(
    "roles", [["texts"], ["core"], ["gateway"], ["texts", "core"], ["texts", "gateway"]], ids="-".join
)
async def test_kills_lose_no_stop_text_that_has_not_come(killed: Served, roles: list[str]) -> None:
    """One request is read as it grows, the other is not read."""
    engine = killed
    async with engine.operator() as op:
        cuts = [await late_stop(op, prompt) for prompt in (PROMPT, "The king")]
        names = [(await op.do(cut.submit)).request or "" for cut in cuts]
        read = asyncio.create_task(read_on(op, names[0]))
        await op.written(names[1], 50)
        await kill(op, *roles)
        assert await read == (cuts[0].tokens, cuts[0].text, "stop")
        await op.until(lambda picture: picture.requests_total == 0, "both end")
        finished = await op.link.inspect("finished")
        assert isinstance(finished, FinishedDetail)
        assert [one.reason for one in finished.requests if one.id in names] == ["stop", "stop"]
        assert await op.output(names[1]) == (cuts[1].tokens, cuts[1].text, "stop")


@pytest.mark.parametrize("kind", ["texts-kill", "texts-stop"])
async def test_a_fault_of_the_process_on_demand_is_no_fault_of_the_engine(killed: Served, kind: str) -> None:
    async with killed.operator() as op:
        gone = killed.pids["texts"]
        assert kind in (await op.do(Fault(kind=kind))).text
        if kind == "texts-kill":
            await op.until(lambda _: any(each.kind == "texts.ended" for each in op.events), "it is an event", 30.0)
        else:
            picture = await op.until(lambda picture: picture.verdicts, "a verdict")
            (verdict,) = picture.verdicts
            assert (verdict.cause, verdict.suggest) == ("process", f"kill -CONT {gone}")
            assert verdict.summary == f"texts (pid {gone}) is stopped by a signal (state T)"
            assert kind in (await op.do(ClearFaults())).text
        assert len((await texts_of(op, SUBMITS[0]))[0][0]) == STEPS
        await op.until(lambda picture: not picture.verdicts, "no fault is left")
        killed.find_pids()
        assert (killed.pids["texts"] == gone) == (kind == "texts-stop")


async def test_tokens_go_on_while_the_process_is_stopped_and_their_readers_hear_of_it(engine: Served) -> None:
    async with engine.operator() as op:
        cut = await late_stop(op, PROMPT, 100)
        end = await op.do(cut.submit)
        assert end.request is not None
        with engine.stopped("texts"):
            await op.until(
                lambda picture: picture.requests_total == 0, "it writes all that it may: its stop text is not found"
            )
            with pytest.raises(QueryFailed, match="the process of texts gave no answer in time") as failed:
                await op.link.fetch(end.request, wait_ms=0)
            assert failed.value.code == "EXPIRED" and failed.value.passing
        assert await op.output(end.request) == (cut.tokens, cut.text, "stop")


async def test_texts_of_programs_are_read_from_the_first_look_on(engine: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 600, "ignore_eos": True, "temperature": 0}
    async with engine.operator() as op:
        answer = asyncio.create_task(asyncio.to_thread(completion, engine, "/v1/completions", body))
        picture = await op.until(lambda picture: picture.requests, "it is there")
        name = picture.requests[0].id
        await op.written(name, 30)
        detail = await op.detail(name)
        assert detail.prompt_text == PROMPT and detail.output_text
        part = await op.link.fetch(name, wait_ms=0)
        assert len(part.token_ids) >= 30 and part.text
        whole = (await answer)["choices"][0]["text"]
        assert whole.startswith(part.text) and whole.startswith(detail.output_text)
