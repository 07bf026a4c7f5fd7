"""Processes stopped and killed by signals: named in time, with the right text, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from engines import wait_until
from ppengine import LLM, SamplingParams
from ppengine.offline.launch import EngineError
from ppengine.protocol.control import Abort, Continue, Outcome, Refused, SetMemory, Submit
from ppengine.protocol.snapshot import Snapshot, Verdict
from serving import Operator, Served, process_state

from profiles import small

STOPPED_S, KILLED_S = 2.0, 1.0
STAGES, STEPS = 3, 200
PROMPT = reference.prompts(1, 100, low=30, high=30, seed=21)[0]
LAST = STAGES - 1


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "faults", "opt", dtype="float64", layers=6, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    with Served(small(folder, stages=STAGES, model={"max_model_len": 2048})) as served:
        yield served


@pytest.fixture
def lost_engine(folder: Path) -> Iterator[Served]:
    """An engine that loses a stage and stays without it."""
    with Served(small(folder, stages=STAGES, model={"max_model_len": 2048}, parallel={"restart": "never"})) as served:
        yield served


def roots(picture: Snapshot) -> list[Verdict]:
    return [verdict for verdict in picture.verdicts if verdict.root]


def named(stage: int | None, cause: str) -> Callable[[Snapshot], bool]:
    """Return whether a picture names that stage and no other."""
    return lambda picture: [(verdict.stage, verdict.cause) for verdict in roots(picture)] == [(stage, cause)]


async def found(op: Operator, since: float, stage: int | None, cause: str, limit: float) -> Verdict:
    """Wait for the verdict and check that it came in time."""
    picture = await op.until(named(stage, cause), f"stage {stage} is {cause}")
    took = time.monotonic() - since
    print(f"stage {stage} {cause}: named after {took:.2f} s")
    assert took < limit
    return roots(picture)[0]


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
@pytest.mark.parametrize("stage", [0, LAST])
async def test_stopped_stage_is_named_and_cleared(engine: Served, folder: Path, stage: int, load: bool) -> None:
    async with engine.operator() as op:
        await op.until(lambda picture: not picture.verdicts, "nothing is wrong yet")
        names = []
        if load:
            names = await op.submit_all([PROMPT] * 4, max_tokens=STEPS)
            await op.request(names[0], lambda request: request.output_tokens > 3, "writes")
        with engine.stopped(f"stage{stage}") as since:
            verdict = await found(op, since, stage, "stopped", STOPPED_S)
            text = f"stage {stage} is stopped by a signal (pid {engine.pids[f'stage{stage}']}, state T)"
            assert verdict.summary.startswith(text)
            assert f"ppconsole continue {stage}" in verdict.suggest
            ran = engine.cli("explain")
            assert ran.code == 10
            assert text in ran.out
            told = engine.cli("explain", "--json").json
            assert told["fault"] is True
            assert [(v["stage"], v["cause"]) for v in told["verdicts"] if v["root"]] == [(stage, "stopped")]
            if load and stage == 0:
                # Who waits for it only suffers: it is told apart from the root.
                await op.until(lambda picture: len(picture.verdicts) > 1, "who suffers is named too")
                assert {verdict.cause for verdict in op.picture.verdicts if not verdict.root} <= {"starved", "blocked"}
            if stage == LAST:
                assert (await op.do(Continue(stage=stage))).text.startswith(f"sent SIGCONT to stage {stage}")
            else:
                os.kill(engine.pids["stage0"], signal.SIGCONT)
            await op.until(lambda picture: not picture.verdicts, "the verdict is cleared", STOPPED_S)
        ran = engine.cli("explain")
        assert (ran.code, ran.out[:8]) == (0, "no fault")
        for name in names:
            assert await op.tokens(name) == reference.greedy(folder, PROMPT, STEPS)


def test_continue_from_the_command_line(engine: Served) -> None:
    with engine.stopped("stage1"):
        wait_until(lambda: engine.cli("explain").code == 10, "explain names it")
        assert engine.cli("continue", "1").code == 0
        wait_until(lambda: engine.cli("explain").code == 0, "explain is content")
        assert process_state(engine.pids["stage1"]) != "T"


async def test_stopped_core_is_the_driver(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=STEPS)
        with engine.stopped("core") as since:
            verdict = await found(op, since, None, "driver", STOPPED_S)
            assert f"the engine core (pid {engine.pids['core']}) is stopped by a signal" in verdict.summary
            assert f"kill -CONT {engine.pids['core']}" in verdict.suggest
            assert engine.cli("explain").code == 10
        await op.until(lambda picture: not picture.verdicts, "the verdict is cleared", STOPPED_S)
        assert await op.tokens(name) == reference.greedy(folder, PROMPT, STEPS)


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
async def test_killed_stage_is_named(lost_engine: Served, load: bool) -> None:
    engine, stage = lost_engine, 1 if load else LAST
    async with engine.operator() as op:
        name = ""
        if load:
            name = await op.submit(PROMPT, max_tokens=1900)
            await op.request(name, lambda request: request.output_tokens > 3, "writes")
        since = time.monotonic()
        os.kill(engine.pids[f"stage{stage}"], signal.SIGKILL)
        await found(op, since, stage, "dead", KILLED_S)
        words = f"stage {stage} was killed by SIGKILL"
        await op.until(lambda picture: roots(picture)[0].summary == words, "it is known how", KILLED_S)
        assert time.monotonic() - since < KILLED_S
        await op.until(lambda picture: picture.engine.state == "degraded", "the engine is degraded", KILLED_S)
        ran = engine.cli("explain")
        assert ran.code == 10
        assert f"stage {stage} was killed by SIGKILL" in ran.out
        lost = f"stage {stage} is lost: killed by SIGKILL"
        await op.until(lambda picture: picture.engine.message == lost, "the core knows how")
        assert named(stage, "dead")(op.picture), "one fault and no cascade"

        text = f"the engine is degraded: {op.picture.engine.message}"
        for verb in (Submit(prompt_token_ids=PROMPT), SetMemory(utilization=0.5)):
            assert (await op.refused(verb, "FAILED")).startswith(text)
        if load:
            assert (await op.refused(Abort(request=name), "FAILED")).startswith(text)
            ran = engine.cli("follow", name, "--json")
            assert ran.code == 1
            assert f"stage {stage} is lost" in ran.error
            assert json.loads(ran.out.splitlines()[0])["token_ids"], "what was written is there"
        ran = engine.cli("stop", "--json")
        assert ran.code == 0, ran
        assert engine.engine.wait(15) == 0


async def test_operation_under_way_ends_with_the_stage(lost_engine: Served) -> None:
    engine = lost_engine
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=1900)
        await op.request(name, lambda request: request.output_tokens > 3, "writes")
        with engine.stopped("stage1"):
            await op.stuck(name)
            abort = await op.begin(Abort(request=name))
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            end = await abort.end
        assert isinstance(end, Outcome)
        assert end.state == "failed"
        assert re.match("stage 1 is lost: .*; how far it came is not known", end.text)
        refused = await op.ask(Abort(request=name))
        assert isinstance(refused, Refused)
    engine.stop()


def test_generate_raises_when_a_stage_is_killed(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT}] * 4
    with LLM(small(folder, stages=2, model={"max_model_len": 2048}, parallel={"restart": "never"})) as llm:
        (victim,) = stage_pids(llm.llm_engine.supervisor_pid, 1)
        killer = threading.Timer(0.5, os.kill, [victim, signal.SIGKILL])
        killer.start()
        since = time.monotonic()
        with pytest.raises(EngineError, match="stage 1 is lost: "):
            llm.generate(prompts, params, use_tqdm=False)
        print(f"generate raised {time.monotonic() - since - 0.5:.2f} s after the kill")
        assert time.monotonic() - since < 5
        killer.join()
        with pytest.raises(EngineError, match="the engine is degraded: stage 1 is lost: "):
            llm.generate(prompts, params, use_tqdm=False)


def stage_pids(supervisor: int, stage: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == supervisor and b"--stage" in words and words[words.index(b"--stage") + 1] == b"%d" % stage:
            found.append(int(path.name))
    return found
