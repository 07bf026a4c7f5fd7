"""A core that is killed under load: requests, streams, commands and settings go on with the next one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from checkpoints import make_checkpoint
from operators import Operator
from ppengine.common.config import profiles_dir
from ppengine.gateway.audit import ENDS
from ppengine.offline.llm import LLM
from ppengine.offline.request_output import RequestOutput
from ppengine.protocol.control import Logprob, Outcome
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import (
    Cordon,
    Pause,
    Preempt,
    Priority,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Submit,
    SwapOut,
)
from serving import LASTING_S, Served, audited
from streaming import stream
from transformers import AutoTokenizer

from profiles import small

TINY = profiles_dir() / "models" / "tiny"
STREAMS, STEPS = 12, 300
PROMPTS = reference.prompts(5, 100, low=20, high=60, seed=7)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "core", "opt", dtype="float64", layers=4, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Tokens of transformers, for each prompt."""
    return reference.greedy_each(folder, PROMPTS, STEPS)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def engine(folder: Path) -> Iterator[Served]:
    with Served(small(folder, stages=2, model={"max_model_len": 2048}), step_s=LASTING_S) as served:
        yield served


async def kill(op: Operator) -> float:
    """Kill the core; return the seconds until the engine serves again."""
    began, gone = time.monotonic(), op.engine.pids["core"]
    os.kill(gone, signal.SIGKILL)
    await op.until(lambda picture: picture.engine.state == "degraded", "the end of the core shows", 20.0, core=False)
    await op.until(lambda picture: picture.engine.state == "serving", "the next one serves")
    took = time.monotonic() - began
    op.engine.find_pids()
    assert op.engine.pids["core"] != gone
    return took


def one_end(engine: Served) -> None:
    for lines in audited(engine).values():
        assert lines[0] == "received" and sum(line in ENDS for line in lines) == 1, lines


async def test_four_kills_lose_nothing_and_the_fifth_ends_the_engine(
    engine: Served, expected: list[list[int]]
) -> None:  # fmt: skip
    async with engine.operator() as op:
        before = dict(engine.pids)
        tasks = [
            asyncio.create_task(stream(lambda: engine.record, PROMPTS[number % 5], STEPS)) for number in range(STREAMS)
        ]
        took = []
        for number in range(4):
            # The first kill meets streams that are still being submitted.
            await asyncio.sleep(0.1 + 0.3 * number)
            took.append(await kill(op))
        assert await asyncio.gather(*tasks) == [expected[number % 5] for number in range(STREAMS)]
        await op.until(lambda picture: picture.engine.state == "serving", "a last picture")
        ended = Counter(event.request for event in await op.heard() if event.kind == "request.finished")
        assert set(ended.values()) == {1} and len(ended) == STREAMS
        assert {**engine.pids, "core": 0} == {**before, "core": 0}, "all other processes are the same"
        numbers = [event.seq for event in op.events]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        ends = [event.text for event in op.events if event.kind == "core.ended"]
        assert len(ends) == 4 and all("killed by SIGKILL" in text for text in ends)
        one_end(engine)
        os.kill(engine.pids["core"], signal.SIGKILL)
        await op.until(lambda picture: picture.engine.state == "stopped", "the engine has ended", core=False)
        print(f"\nserving again after {', '.join(f'{seconds:.2f}' for seconds in took)} s")
    engine.ended(1, "core ended: killed by SIGKILL, and it is the end number 5 in 10 minutes")


async def parts(op: Operator, name: str, sample: int = 0) -> tuple[list[int], list[Any], str]:
    """Return tokens, rounded log-probabilities and text of a sample at its end: batches differ in the last bits."""
    tokens, logprobs, text = list[int](), list[Logprob](), ""
    while True:
        part = await op.link.fetch(name, offset=len(tokens), text_offset=len(text), sample=sample)
        tokens, logprobs, text = tokens + part.token_ids, logprobs + part.logprobs, text + part.text
        if part.finished:
            rounded = [(round(one.chosen, 6), [token for token, _ in one.top]) for one in logprobs]
            return tokens, rounded, f"{text}|{part.finish_reason}"


SAMPLINGS = [
    SamplingParams(temperature=0.9, seed=11, n=2, max_tokens=60, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.0, seed=12, top_k=20, top_p=0.9, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=80, stop=["e "], min_tokens=20),
    SamplingParams(temperature=1.0, seed=13, max_tokens=70, ignore_eos=True, logprobs=0),
    SamplingParams(
        temperature=0.9, seed=14, max_tokens=70, ignore_eos=True, logprobs=1, min_p=0.05, presence_penalty=0.5,
        frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={5: -3.0}, bad_words=["the", "She"],
    ),
]  # fmt: skip


async def outcomes_of(op: Operator, kills: int) -> list[Any]:
    """Submit one request a sampling, kill the core meanwhile, and return everything that readers get."""
    names = []
    for number, sampling in enumerate(SAMPLINGS):
        end = await op.do(Submit(prompt="Once upon a time", sampling=sampling, priority=number))
        names.append(end.request or "")
    for _ in range(kills):
        await op.written(names[1], 5)
        await kill(op)
    seen: list[Any] = []
    for name, sampling in zip(names, SAMPLINGS, strict=True):
        seen += [await parts(op, name, sample) for sample in range(sampling.n)]
    return seen


async def test_sampled_tokens_texts_and_logprobs_are_the_same() -> None:
    profile = small(TINY, stages=2, model={"skip_tokenizer": False, "max_model_len": 512})
    with Served(profile) as engine:
        async with engine.operator() as op:
            assert await outcomes_of(op, 2) == await outcomes_of(op, 0)


async def test_held_requests_settings_and_cordons_are_as_before(engine: Served) -> None:
    async with engine.operator() as op:
        names = await op.submit_all([PROMPTS[0]] * 3, max_tokens=1500)
        await op.written(names[0], 4)
        await op.do(SwapOut(request=names[0]))
        await op.do(Preempt(request=names[1], hold=True))
        await op.do(Priority(request=names[2], priority=7))
        await op.do(SetMemory(utilization=0.5))
        await op.do(Cordon(stage=1), reason="look")
        await op.do(SetCheck(check="finite", mode="on"))
        await op.do(Pause(mode="keep"))
        before = await op.quiet()
        os.kill(engine.pids["core"], signal.SIGKILL)
        after = await op.until(lambda picture: picture.engine.state == "paused", "it is paused again")
        engine.find_pids()
        assert [(one.id, one.priority, one.output_tokens) for one in after.requests] == [
            (one.id, one.priority, one.output_tokens) for one in before.requests
        ]
        assert [one.state for one in after.requests] == ["held", "held", "waiting"]
        assert (after.engine.memory_utilization, after.engine.memory_revision) == (0.5, before.engine.memory_revision)
        assert after.stages[0].kv_blocks.mapped == before.stages[0].kv_blocks.mapped
        cordon = after.stages[1].cordon
        assert cordon is not None and (cordon.by, cordon.reason) == ("op", "look")
        assert after.engine.checks.finite
        await op.do(Cordon(stage=1, undo=True))
        await op.do(SetCheck(check="finite", mode="off"))
        await op.do(Resume())
        for name in names[:2]:
            await op.do(Release(request=name))
        for name in names:
            await op.written(name, 30)
        one_end(engine)
        await op.abort(*names)


async def test_a_kill_during_a_change_of_memory_or_a_restart_of_a_stage(engine: Served) -> None:
    async with engine.operator() as op:
        (name,) = await op.submit_all([PROMPTS[0]], max_tokens=1500)
        await op.written(name, 4)
        with engine.stopped("stage1"):
            change = asyncio.create_task(op.ask(SetMemory(utilization=0.4)))
            await op.until(lambda picture: picture.operations, "it is under way")
            os.kill(engine.pids["core"], signal.SIGKILL)
            await op.until(lambda picture: picture.engine.state == "degraded", "it shows", core=False)
            await asyncio.sleep(0.5)
        end = await change
        assert isinstance(end, Outcome) and end.state == "applied", end
        engine.find_pids()
        assert (await op.now()).engine.memory_utilization == 0.4
        before = engine.pids["stage1"]
        restart = asyncio.create_task(op.ask(RestartStage(stage=1)))
        # A load of 0.2 s may fall between two snapshots.
        await op.until(
            lambda now: now.stages[1].state == "loading" or now.stages[1].pid not in (None, before), "it loads"
        )
        os.kill(engine.pids["core"], signal.SIGKILL)
        end = await restart
        assert isinstance(end, Outcome) and end.state == "applied", end
        engine.find_pids()
        await op.written(name, 30)
        one_end(engine)
        await op.abort(name)


async def test_a_stage_that_is_killed_with_the_core_is_restarted(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        task = asyncio.create_task(stream(lambda: engine.record, PROMPTS[1], STEPS))
        await asyncio.sleep(0.5)
        os.kill(engine.pids["core"], signal.SIGSTOP)
        os.kill(engine.pids["stage1"], signal.SIGKILL)
        await asyncio.sleep(0.2)
        os.kill(engine.pids["core"], signal.SIGKILL)
        await op.until(lambda picture: picture.engine.state == "serving", "it serves again", 60.0)
        engine.find_pids()
        assert await task == expected[1]


async def test_the_end_of_the_core_is_an_incident_that_heals(engine: Served) -> None:
    async with engine.operator() as op:
        gone = engine.pids["core"]
        os.kill(gone, signal.SIGKILL)
        killed = f"the engine core (pid {gone}) was killed by SIGKILL"

        def named(picture: Snapshot) -> bool:
            """It may be seen as gone before its supervisor has its exit status."""
            return [verdict.summary for verdict in picture.verdicts] == [killed]

        (verdict,) = (await op.until(named, killed, core=False)).verdicts
        assert (verdict.stage, verdict.cause) == (None, "core")
        over = await op.until(lambda picture: picture.incident and picture.incident.over_wall, "it is over")
        assert over.verdicts == [] and over.incident.cause == "core"
        assert over.incident.ended == "all stages serve again, generation 2"
        engine.find_pids()


async def test_the_command_line_goes_on() -> None:
    profile = small(TINY, stages=2, model={"skip_tokenizer": False, "max_model_len": 512})
    words = ["submit", "Once upon a time", "--max-tokens", "150", "--temperature", "0", "--ignore-eos"]
    with Served(profile) as engine:
        async with engine.operator() as op:
            process = engine.start_cli(*words)
            await op.until(lambda picture: picture.requests and picture.requests[0].output_tokens > 3, "it writes")
            await kill(op)
            ran = await op.end_of(process)
            assert ran.code == 0, ran
            assert ran.out == (await op.cli(*words)).out != ""


async def test_without_a_journal_all_are_reported_lost(folder: Path) -> None:
    with Served(small(folder, stages=2, model={"max_model_len": 2048}), "--set", "journal=off") as engine:
        async with engine.operator() as op:
            names = await op.submit_all(PROMPTS, max_tokens=1500)
            await op.written(names[0], 4)
            await kill(op)
            lost = {event.request for event in await op.heard() if event.kind == "request.lost"}
            assert lost == set(names)
            part = await op.link.fetch(names[0], offset=2)
            assert part.finished and part.finish_reason == "lost"
            assert (await op.submit_all([PROMPTS[0]], max_tokens=5)) != []
            one_end(engine)
            secrets = (engine.engine.run_dir / "core.journal").read_bytes()
            assert b"Submit" not in secrets and str(PROMPTS[0])[1:20].encode() not in secrets


async def test_a_request_that_ends_three_cores_is_lost_and_the_engine_goes_on(folder: Path) -> None:
    slow = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
    with Served(small(folder, stages=2, model={"max_model_len": 2048}, scheduler=slow), step_s=2 * LASTING_S) as engine:
        async with engine.operator() as op:
            (poison,) = await op.submit_all([list(range(3, 103)) * 19], max_tokens=9)
            for ends in range(1, 4):
                await op.request(poison, lambda one: one.computed_tokens and not one.output_tokens, "is at its prompt")
                if ends == 3:
                    (other,) = await op.submit_all([PROMPTS[0]], max_tokens=5)
                await kill(op)
            lost = [event for event in await op.heard() if event.kind == "request.lost"]
            assert [event.request for event in lost] == [poison]
            assert "ended 3 times while it ran, without a token between" in lost[0].text
            part = await op.link.fetch(poison)
            assert part.finished and part.finish_reason == "lost"
            assert len(await op.tokens(other)) == 5
            one_end(engine)


@pytest.mark.usefixtures("forked_llm")
def test_an_offline_session_goes_on(folder: Path, expected: list[list[int]]) -> None:
    with LLM(small(folder, stages=2, model={"max_model_len": 2048}, name="offline")) as llm:
        engine = llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
        names = engine.add_many([{"prompt_token_ids": prompt} for prompt in PROMPTS], [params] * 5)
        done: dict[str, list[int]] = {}
        killed = False
        while len(done) < 5:
            outputs = engine.step()
            done |= {output.request_id: output.outputs[0].token_ids for output in outputs if output.finished}
            if outputs and not killed:
                killed = True
                os.kill(child(engine.supervisor_pid, "ppengine.core"), signal.SIGKILL)
        assert [done[name] for name in names] == expected


@pytest.mark.usefixtures("forked_llm")
def test_texts_of_a_program_go_on_to_their_stop_texts(tokenizer: Any) -> None:
    """The program keeps text and tokens: the core sends all again, and it drops those that it has."""
    prompts = ["The king said", "Once upon a time", "To pause the engine,"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    tokens = reference.greedy_each(TINY, ids, STEPS)
    texts = [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
    stops = [text[len(text) // 2 :][:9] for text in texts]
    params = [
        SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, stop=[stop], prompt_logprobs=0)
        for stop in stops
    ]  # fmt: skip
    with LLM(small(TINY, stages=2, model={"skip_tokenizer": False}, name="offline-texts")) as llm:
        engine = llm.llm_engine
        names = engine.add_many(prompts, params)
        while not engine.step():
            pass
        os.kill(child(engine.supervisor_pid, "ppengine.core"), signal.SIGKILL)
        done: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step(finished_only=True)}
    for name, text, stop in zip(names, texts, stops, strict=True):
        (sample,) = done[name].outputs
        assert (sample.text, sample.finish_reason, sample.stop_reason) == (text[: text.index(stop)], "stop", stop)
        kept = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert text.startswith(kept) and stop in kept and done[name].prompt_logprobs is not None


def child(parent: int, module: str) -> int:
    """Return the child of a process that runs `module`."""
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split():
                return pid
    raise AssertionError(f"no child of {parent} runs {module}")
