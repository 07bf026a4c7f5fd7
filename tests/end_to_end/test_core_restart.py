"""A core that is killed under load: requests, streams, commands and settings go on with the next one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from operators import Operator
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.source import LinkLost
from ppengine.protocol.control import Outcome
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit
from serving import Served

from profiles import small

STREAMS, STEPS = 30, 300
PROMPTS = reference.prompts(5, 100, low=20, high=60, seed=7)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "core", "opt", dtype="float64", layers=4, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Tokens of transformers, for each prompt."""
    return [reference.greedy(folder, prompt, STEPS) for prompt in PROMPTS]


@pytest.fixture
def engine(folder: Path) -> Iterator[Served]:
    with Served(small(folder, stages=2, model={"max_model_len": 2048})) as served:
        yield served


async def stream(engine: Served, prompt: list[int], sample: int = 0, **sampling: object) -> list[int]:
    """Submit on a link of its own and return the tokens of a sample, by offset."""
    link = EngineLink(engine.record, find=lambda: engine.record, user="streams", slow=True, passing=True)
    await link.start(lambda update: None)
    try:
        await link.attached(10)
        fields = {"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True, **sampling}
        answer = await link.command(Submit(prompt_token_ids=prompt, sampling=SamplingParams(**fields)), timeout=30)  # type: ignore[arg-type]
        assert isinstance(answer, Outcome) and answer.state == "applied", answer
        tokens: list[int] = []
        while True:
            try:
                part = await link.fetch(answer.request or "", offset=len(tokens))
            except LinkLost:
                await link.attached(20)
                continue
            tokens += part.token_ids
            if part.finished:
                assert part.finish_reason == "length", part.finish_reason
                return tokens
    finally:
        await link.close()


async def kill(op: Operator) -> float:
    """Kill the core; return the seconds until the engine serves again."""
    began, gone = time.monotonic(), op.engine.pids["core"]
    os.kill(gone, signal.SIGKILL)
    await op.until(lambda picture: picture.engine.state == "degraded", "the end of the core shows", 20.0, core=False)
    await op.until(lambda picture: picture.engine.state == "serving", "the next one serves", 20.0)
    took = time.monotonic() - began
    op.engine.find_pids()
    assert op.engine.pids["core"] != gone
    return took


async def test_streams_go_on_to_the_same_tokens(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        before = dict(engine.pids)
        tasks = [asyncio.create_task(stream(engine, PROMPTS[number % 5])) for number in range(STREAMS)]
        took = []
        for number in range(2):
            await asyncio.sleep(0.3 + number)
            took.append(await kill(op))
        assert await asyncio.gather(*tasks) == [expected[number % 5] for number in range(STREAMS)]
        await op.until(lambda picture: picture.engine.state == "serving", "a last picture")
        ended = Counter(event.request for event in await op.heard() if event.kind == "request.finished")
        assert set(ended.values()) == {1} and len(ended) == STREAMS
        assert {**engine.pids, "core": 0} == {**before, "core": 0}, "all other processes are the same"
        print(f"\nserving again after {', '.join(f'{seconds:.2f}' for seconds in took)} s")
