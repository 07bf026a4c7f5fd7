"""Processes stopped and killed by signals: named in time, with the right text, and nobody waits for ever."""

from __future__ import annotations

import asyncio
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
from operators import Operator
from ppengine import LLM, SamplingParams
from ppengine.offline.launch import EngineError
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.snapshot import Snapshot, Verdict
from ppengine.protocol.verbs import Abort, ClearFaults, Continue, Fault, SetMemory, Submit
from serving import LASTING_S, Served, process_state, stage_pids

from profiles import small

pytestmark = pytest.mark.long
STOPPED_S, KILLED_S = 2.0, 1.0
TRIES = 3
HELD_S = 2.6
"""Longer than any of them may be silent, and shorter than a console waits before it takes the link for lost."""
STAGES, STEPS, LONG = 3, 50, 1900
PROMPT = reference.prompts(1, 100, low=30, high=30, seed=21)[0]
LAST = STAGES - 1


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "faults", "opt", dtype="float64", layers=6, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    with Served(small(folder, stages=STAGES, model={"max_model_len": 2048}), step_s=LASTING_S) as served:
        yield served


@pytest.fixture(scope="module")
def lost_engine(folder: Path) -> Iterator[Served]:
    """An engine that loses a stage and stays without it, until a test restarts it (`Operator.repair`)."""
    profile = small(folder, stages=STAGES, model={"max_model_len": 2048}, parallel={"restart": "never"})
    with Served(profile, step_s=LASTING_S) as served:
        yield served


def roots(picture: Snapshot) -> list[Verdict]:
    return [verdict for verdict in picture.verdicts if verdict.root]


def named(stage: int | None, cause: str) -> Callable[[Snapshot], bool]:
    """Return whether a picture names that stage and no other."""
    return lambda picture: [(verdict.stage, verdict.cause) for verdict in roots(picture)] == [(stage, cause)]


async def judged(op: Operator, condition: Callable[[Snapshot], bool], since: float, what: str) -> float:
    """Wait for verdicts; return the engine's seconds until it published them (`Served.queued` is not its own).

    `since` is wall-clock time.
    """
    before = op.engine.queued()
    picture = await op.until(condition, what, core=False)
    took, queued = picture.sampled_at - since, op.engine.queued() - before
    print(f"{what}: after {took:.2f} s, with {queued:.2f} s in queues for a CPU")
    return took - queued


async def content(op: Operator) -> None:
    await op.until(lambda picture: not picture.verdicts, "nothing is wrong")


async def holding_on(op: Operator, name: str, least: int, folder: Path) -> None:
    """Check that a request goes on, well past the `least` tokens that it had, with the right ones; then end it."""
    tokens = (await op.written(name, least + STEPS))[: least + STEPS]
    await op.abort(name)
    assert len(tokens) == least + STEPS
    assert tokens == await reference.greedy_aside(folder, PROMPT, len(tokens), draft=tokens)


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
@pytest.mark.parametrize("stage", [0, LAST])
async def test_stopped_stage_is_named_and_cleared(engine: Served, folder: Path, stage: int, load: bool) -> None:
    async with engine.operator() as op:
        await content(op)
        names = await op.submit_all([PROMPT] * 4 * load, max_tokens=LONG)
        for name in names:
            await op.written(name, 4)
        with engine.stopped(f"stage{stage}"):
            picture = await op.until(named(stage, "stopped"), f"stage {stage} is named")
            verdict = roots(picture)[0]
            text = f"stage {stage} is stopped by a signal (pid {engine.pids[f'stage{stage}']}, state T)"
            assert verdict.summary.startswith(text)
            assert f"ppconsole continue {stage}" in verdict.suggest
            held = [len((await op.detail(name)).output_token_ids) for name in names]
            ran = await op.cli("explain")
            assert ran.code == 10
            assert text in ran.out
            told = (await op.cli("explain", "--json")).json
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
            await content(op)
        ran = await op.cli("explain")
        assert (ran.code, ran.out[:8]) == (0, "no fault")
        for name, least in zip(names, held, strict=True):
            await holding_on(op, name, least, folder)
        await op.idle()


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
async def test_an_engine_that_was_held_as_a_whole_is_no_fault(engine: Served, load: bool) -> None:
    """As by a paused container or virtual machine. The gateway is the first to go on, and finds all reports old."""
    async with engine.operator() as op:
        await content(op)
        name = await op.submit(PROMPT, max_tokens=LONG) if load else ""
        written = len(await op.written(name, 20)) if load else 0
        told = len(op.events)
        held = [engine.pids[role] for role in ("gateway", "agent", "core", "stage0", "stage1", f"stage{LAST}")]
        try:
            for pid in held:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(HELD_S)
        finally:
            for pid in held:
                os.kill(pid, signal.SIGCONT)
        await op.until(lambda picture: picture.engine.state == "serving", "it reports again")
        if load:
            await op.written(name, written + 20)
        await asyncio.sleep(1.0)
        await op.heard()
        assert [event.text for event in op.events[told:] if event.kind == "verdict.raised"] == []
        if load:
            await op.abort(name)


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
@pytest.mark.parametrize("role", ["stage0", f"stage{LAST}", "core"])
async def test_stopped_process_is_named_and_cleared_in_time(engine: Served, role: str, load: bool) -> None:
    """The best of three tries: what else this machine does is not what is judged."""
    known = named(None, "core") if role == "core" else named(int(role[-1]), "stopped")
    async with engine.operator() as op:
        await content(op)
        name = await op.submit(PROMPT, max_tokens=LONG) if load else ""
        tries = []
        for _ in range(TRIES):
            with engine.stopped(role) as since:
                found = await judged(op, known, since, f"{role} is named")
            cleared = await judged(op, lambda picture: not picture.verdicts, time.time(), f"{role} is cleared")
            tries.append((found, cleared))
            if max(tries[-1]) < STOPPED_S:
                break
        assert min(max(one) for one in tries) < STOPPED_S, f"named and cleared in time, once in {tries}"
        if load:
            await op.abort(name)
        await op.idle()


def test_continue_from_the_command_line(engine: Served) -> None:
    with engine.stopped("stage1"):
        wait_until(lambda: engine.cli("explain").code == 10, "explain names it")
        assert engine.cli("continue", "1").code == 0
        wait_until(lambda: engine.cli("explain").code == 0, "explain is content")
        assert process_state(engine.pids["stage1"]) != "T"


async def test_a_stopped_core_is_named(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=LONG)
        least = len(await op.written(name, 4))
        with engine.stopped("core"):
            picture = await op.until(named(None, "core"), "the core is named", core=False)
            verdict = roots(picture)[0]
            assert f"the engine core (pid {engine.pids['core']}) is stopped by a signal" in verdict.summary
            assert f"kill -CONT {engine.pids['core']}" in verdict.suggest
            assert (await op.cli("explain")).code == 10
        await content(op)
        await holding_on(op, name, least, folder)
        await op.idle()


async def kill_and_name(op: Operator, stage: int) -> float:
    """Kill a stage; return after how many seconds a picture said which one, how it ended, and that all is degraded."""
    words = f"stage {stage} was killed by SIGKILL"

    def all_of_it(picture: Snapshot) -> bool:
        known = named(stage, "dead")(picture) and roots(picture)[0].summary == words
        return known and picture.engine.state == "degraded"

    since = time.time()
    os.kill(op.engine.pids[f"stage{stage}"], signal.SIGKILL)
    return await judged(op, all_of_it, since, words)


@pytest.mark.parametrize("load", [False, True], ids=["idle", "load"])
async def test_killed_stage_is_named_in_time(lost_engine: Served, load: bool) -> None:
    """In time in the best of three tries."""
    engine, stage = lost_engine, 1 if load else LAST
    async with engine.operator() as op:
        tries: list[float] = []
        while not tries or (min(tries) >= KILLED_S and len(tries) < TRIES):
            if tries:
                await op.repair(stage)
            name = await op.submit(PROMPT, max_tokens=LONG) if load else ""
            if load:
                await op.written(name, 4)
            tries.append(await kill_and_name(op, stage))
        assert min(tries) < KILLED_S, f"named in time, once in {tries}"
        ran = await op.cli("explain")
        assert ran.code == 10
        assert f"stage {stage} was killed by SIGKILL" in ran.out
        lost = f"stage {stage} is lost: killed by SIGKILL"
        await op.until(lambda picture: picture.engine.message == lost, "the core knows how")
        found = [(verdict.stage, verdict.cause, verdict.summary, verdict.evidence) for verdict in roots(op.picture)]
        assert [one[:2] for one in found] == [(stage, "dead")], f"one fault and no cascade: {found}"

        text = f"the engine is degraded: {lost}"
        for verb in (Submit(prompt_token_ids=PROMPT), SetMemory(utilization=0.5)):
            assert (await op.refused(verb, "FAILED")).startswith(text)
        if load:
            assert (await op.refused(Abort(request=name), "FAILED")).startswith(text)
            ran = await op.cli("follow", name, "--json")
            assert ran.code == 1
            assert f"stage {stage} is lost" in ran.error
            assert json.loads(ran.out.splitlines()[0])["token_ids"], "what was written is there"
        await op.repair(stage)


async def test_operation_under_way_ends_with_the_stage(lost_engine: Served) -> None:
    engine = lost_engine
    async with engine.operator() as op:
        async with op.frozen(PROMPT, max_tokens=LONG) as name:
            abort = await op.begin(Abort(request=name))
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            end = await abort.end
        assert isinstance(end, Outcome)
        assert end.state == "failed"
        assert re.match("stage 1 is lost: .*; how far it came is not known", end.text)
        refused = await op.ask(Abort(request=name))
        assert isinstance(refused, Refused)
        await op.repair(1)


async def test_stop_ends_a_degraded_engine(lost_engine: Served) -> None:
    """The last test of this engine."""
    async with lost_engine.operator() as op:
        await kill_and_name(op, LAST)
        ran = await op.cli("stop", "--json")
        assert ran.code == 0, ran
        assert lost_engine.engine.process.poll() == 0, "another engine of that name can be started at once"
        lost_engine.ended(0, "stopped by command")


async def test_engine_without_the_option_cannot_be_broken(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        text = await op.refused(Fault(kind="sigkill", stage=0), "DENIED")
        assert text.endswith("ppconsole serve PROFILE --allow-faults")
        await op.refused(ClearFaults(), "DENIED")
        expected = await reference.greedy_aside(folder, PROMPT, 5)
        assert await op.tokens(await op.submit(PROMPT, max_tokens=5)) == expected
    ran = engine.cli("fault", "sigkill", "--stage", "0")
    assert ran.code == 4
    assert "--allow-faults" in ran.err
    assert engine.cli("fault", "--list").code == 4
    assert not (engine.engine.run_dir / "faults").exists()


@pytest.mark.usefixtures("forked_llm")
def test_generate_raises_when_a_stage_is_killed(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
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
