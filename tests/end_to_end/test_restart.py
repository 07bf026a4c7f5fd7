"""A stage is lost or told to restart: it comes back, every request goes on, and the tokens are the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from ppengine import LLM, SamplingParams
from ppengine.protocol.control import Outcome, Pause, Preempt, Release, RestartStage, Resume, SetMemory, SwapOut
from ppengine.protocol.snapshot import Snapshot
from serving import Operator, Served

from profiles import small

STAGES, STEPS, NAMED_S, BACK_S = 3, 150, 1.0, 60.0
PROMPTS = reference.prompts(8, 100, low=20, high=60, seed=33)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "restart", "opt", dtype="float64", layers=6, max_position_embeddings=2048)


@pytest.fixture(scope="module", params=[False, True], ids=["", "ahead"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Four places for eight requests: some wait."""
    scheduler = {"max_num_seqs": 4, "schedule_ahead": request.param}
    with Served(small(folder, stages=STAGES, model={"max_model_len": 2048}, scheduler=scheduler)) as served:
        yield served


@pytest.fixture
def fresh(folder: Path) -> Iterator[Served]:
    """An engine of the test's own: deaths count for ten minutes."""
    with Served(small(folder, stages=STAGES, model={"max_model_len": 2048}, scheduler={"max_num_seqs": 4})) as served:
        yield served


def roots(picture: Snapshot) -> list[tuple[int | None, str]]:
    return [(verdict.stage, verdict.cause) for verdict in picture.verdicts if verdict.root]


def stage_state(picture: Snapshot, stage: int) -> str:
    return picture.stages[stage].state


async def load(op: Operator) -> list[str]:
    """Eight greedy requests: the first held on the host, the second swapped, some running, some waiting."""
    names = await op.submit_all(PROMPTS, max_tokens=STEPS)
    for name in names[:2]:
        await op.request(name, lambda request: request.output_tokens > 3, "writes")
    await op.do(SwapOut(request=names[0]))
    await op.do(SwapOut(request=names[1], hold=False))
    return names


async def whole(op: Operator, names: list[str], folder: Path) -> None:
    """Release the held one, read all to the end and compare with the reference."""
    await op.do(Release(request=names[0]))
    for name, prompt in zip(names, PROMPTS, strict=True):
        assert await op.tokens(name) == reference.greedy(folder, prompt, STEPS), name


async def back(op: Operator, engine: Served) -> Snapshot:
    """Wait until the engine serves again without a verdict; its processes have other pids then."""
    picture = await op.until(
        lambda picture: picture.engine.state == "serving" and not picture.verdicts, "it serves again", BACK_S
    )
    engine.pids = engine.engine.find_processes(3 + STAGES)
    return picture


def stage_pids(supervisor: int, stage: int) -> list[int]:
    """Return the processes of one stage."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if parent == supervisor and "--stage" in words and words[words.index("--stage") + 1] == str(stage):
                found.append(int(path.name))
    return found


def lost(op: Operator) -> list[str]:
    return [event.text for event in op.events if event.kind == "stage.lost"]


@pytest.mark.parametrize("stage", range(STAGES))
async def test_a_killed_stage_comes_back_and_no_request_is_lost(engine: Served, folder: Path, stage: int) -> None:
    async with engine.operator() as op:
        await op.until(lambda picture: not picture.verdicts, "nothing is wrong yet")
        names = await load(op)
        streams = [asyncio.create_task(op.output(name, timeout=120)) for name in names]
        written = (await op.link.fetch(names[0])).token_ids
        old, since = engine.pids[f"stage{stage}"], time.monotonic()
        os.kill(old, signal.SIGKILL)
        await op.until(lambda picture: roots(picture) == [(stage, "dead")], "the dead stage is named")
        assert time.monotonic() - since < NAMED_S
        await op.until(lambda picture: picture.engine.state == "degraded", "the engine is degraded", NAMED_S)
        verdict = next(verdict for verdict in op.picture.verdicts if verdict.root)
        assert verdict.suggest.startswith(f"ppconsole restart-stage {stage} ")
        await op.until(lambda picture: stage_state(picture, stage) == "loading", "its row says that it loads")
        assert roots(op.picture) == [(stage, "dead")], "it stays dead until it serves"
        held = next(request for request in op.picture.requests if request.id == names[0])
        assert (held.state, held.swap_blocks, held.blocks) == ("held", 0, 0)
        picture = await back(op, engine)
        print(f"stage {stage} killed: serving again after {time.monotonic() - since:.2f} s")
        assert picture.stages[stage].pid == engine.pids[f"stage{stage}"] != old
        assert lost(op) == [f"stage {stage}: killed by SIGKILL"], "one fault and no cascade"
        assert [event.kind for event in op.events].count("verdict.raised") == 1 + len(
            [event for event in op.events if event.kind == "verdict.raised" and "starved" in event.text]
        )
        await whole(op, names, folder)
        tokens = [(await stream)[0] for stream in streams]
        assert tokens == [reference.greedy(folder, prompt, STEPS) for prompt in PROMPTS], "streams went on"
        assert tokens[0][: len(written)] == written
        await op.idle()


async def test_restart_stage_from_the_command_line(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        names = await load(op)
        planned = await op.do(RestartStage(stage=1), dry_run=True)
        assert planned.plan[0].startswith(f"stage 1 (pid {engine.pids['stage1']}) is ended and started anew")
        assert planned.figures["requests"] == 8
        assert op.picture.engine.state == "serving"
        states: set[str] = set()
        watch = asyncio.create_task(op.until(lambda picture: states.add(picture.engine.state), "never", 120))
        ran = await asyncio.to_thread(engine.cli, "restart-stage", "1", "--reason", "drill")
        watch.cancel()
        assert ran.code == 0, ran
        assert ran.out.startswith("restart-stage applied: stage 1 is pid ")
        assert "loading" in states
        assert "degraded" not in states, "it was asked for: no fault"
        old, picture = engine.pids["stage1"], await back(op, engine)
        assert picture.stages[1].pid != old
        assert not [event for event in op.events if event.kind in ("verdict.raised", "stage.lost", "stage.dead")]
        await whole(op, names, folder)
        assert await op.refused(RestartStage(stage=STAGES), "NOT_FOUND") == "no stage 3: this engine has 0 to 2"


async def test_a_stopped_stage_is_restarted_by_the_verb(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        names = await load(op)
        os.kill(engine.pids["stage2"], signal.SIGSTOP)
        await op.until(lambda picture: roots(picture) == [(2, "stopped")], "the stopped stage is named")
        end = await op.do(RestartStage(stage=2))
        assert "generation" in end.text
        await back(op, engine)
        await whole(op, names, folder)


async def test_a_stage_killed_while_memory_shrinks(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        names = await load(op)
        before = op.picture.engine.memory_utilization
        with engine.stopped("stage1"):
            await op.stuck(names[2])
            shrink = await op.begin(SetMemory(utilization=before * 0.6))
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            end = await shrink.end
        assert isinstance(end, Outcome)
        assert end.state == "applied", end
        picture = await back(op, engine)
        assert {stage.kv_blocks.mapped for stage in picture.stages} == {int(end.figures["blocks_after"])}
        await op.do(SetMemory(utilization=before))
        await whole(op, names, folder)
        await op.idle()


async def test_what_is_swapped_and_what_waits_at_the_kill_is_recomputed(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        names = await op.submit_all(PROMPTS, max_tokens=STEPS)
        await op.request(names[1], lambda request: request.output_tokens > 3, "writes")
        await op.do(Preempt(request=names[0], mode="swap", hold=True))
        # With admissions off, what is swapped out is not brought back at once.
        pause = await op.begin(Pause(mode="wait"))
        await op.do(SwapOut(request=names[1], hold=False))
        await op.request(names[1], lambda request: request.state == "swapped", "is swapped")
        seen = {request.state for request in op.picture.requests}
        assert seen >= {"held", "swapped", "waiting"}
        assert op.picture.stages[0].swap_blocks.used
        os.kill(engine.pids["stage1"], signal.SIGKILL)
        await op.until(lambda picture: roots(picture) == [(1, "dead")], "the dead stage is named")
        await op.until(lambda picture: picture.engine.state == "paused" and not picture.verdicts, "it is back", BACK_S)
        engine.pids = engine.engine.find_processes(3 + STAGES)
        assert op.picture.queues.held == 1
        assert op.picture.queues.waiting == len(PROMPTS) - 1
        assert op.picture.stages[0].swap_blocks.used == 0
        assert isinstance(await pause.end, Outcome)
        await op.do(Resume())
        await whole(op, names, folder)


def test_generate_goes_on_when_a_stage_is_killed(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    with LLM(small(folder, stages=2, model={"max_model_len": 2048})) as llm:
        (victim,) = stage_pids(llm.llm_engine.supervisor_pid, 1)
        killer = threading.Timer(0.3, os.kill, [victim, signal.SIGKILL])
        killer.start()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        killer.join()
        assert stage_pids(llm.llm_engine.supervisor_pid, 1) not in ([], [victim])
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [reference.greedy(folder, prompt, STEPS) for prompt in PROMPTS]


async def test_a_survivor_that_cannot_leave_is_restarted_too(fresh: Served, folder: Path) -> None:
    # Stage 1 may wait for stage 0, which is stopped: then it cannot leave in time either.
    engine = fresh
    async with engine.operator() as op:
        names = await load(op)
        old = dict(engine.pids)
        os.kill(engine.pids["stage0"], signal.SIGSTOP)
        os.kill(engine.pids["stage2"], signal.SIGKILL)
        await op.until(lambda picture: (2, "dead") in roots(picture), "the dead stage is named")
        await back(op, engine)
        assert engine.pids["stage0"] != old["stage0"]
        assert lost(op) == ["stage 2: killed by SIGKILL"]
        await whole(op, names, folder)


async def test_a_stage_that_dies_again_while_loading_stays_down_until_it_is_restarted(
    fresh: Served, folder: Path
) -> None:
    engine = fresh
    async with engine.operator() as op:
        names = await load(op)
        os.kill(engine.pids["stage1"], signal.SIGKILL)
        await op.until(lambda picture: stage_state(picture, 1) == "loading", "it loads")
        loading = engine.engine.find_processes(3 + STAGES)["stage1"]
        os.kill(loading, signal.SIGKILL)
        why = "stage 1 died again while loading: killed by SIGKILL; restart-stage 1 tries once more"
        await op.until(lambda picture: picture.engine.message == why, "it stays down and says why")
        assert op.picture.engine.state == "degraded"
        assert await op.refused(SetMemory(utilization=0.5), "FAILED") == f"the engine is degraded: {why}; " + (
            "restart-stage or stop"
        )
        ran = await asyncio.to_thread(engine.cli, "explain")
        assert (ran.code, "ppconsole restart-stage 1" in ran.out) == (10, True)
        assert await asyncio.to_thread(lambda: engine.cli("status").code) == 0
        ran = await asyncio.to_thread(engine.cli, "follow", names[2])
        assert (ran.code, why in ran.err) == (1, True)
        await op.do(RestartStage(stage=1))
        await back(op, engine)
        await whole(op, names, folder)
