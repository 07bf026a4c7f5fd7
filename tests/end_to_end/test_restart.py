"""A stage is lost or restarted on request: it comes back, every request goes on, and the tokens are the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from engines import wait_until
from operators import BACK_S, Operator
from ppengine import LLM, SamplingParams
from ppengine.drills.tcp_sockets import between
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import Release, RestartStage, Resume, SetMemory, SwapOut
from serving import Served, stage_pids

from profiles import small

# One worker has them all: what transformers gives for these prompts takes it 5 s.
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("test_restart.py")]
STAGES, STEPS = 3, 100
PROMPTS = reference.prompts(8, 100, low=20, high=60, seed=33)
HELD, SWAPPED, RUNNING = range(3)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "restart", "opt", dtype="float64", layers=6, max_position_embeddings=2048)


def serve(folder: Path, *, ahead: bool) -> Served:
    """Four places for eight requests: some wait. A stage that dies a fourth time stays down.

    Steps take 5 ms longer: on a busy machine requests would end before a test has paused them.
    """
    scheduler = {"max_num_seqs": 4, "schedule_ahead": ahead}
    return Served(small(folder, stages=STAGES, model={"max_model_len": 2048}, scheduler=scheduler), step_s=0.005)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    with serve(folder, ahead=False) as served:
        yield served


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Iterator[Served]:
    """An engine with steps ahead. Tests of `core` and `stage` show of every loss that both end the same way."""
    with serve(folder, ahead=True) as served:
        yield served


def roots(picture: Snapshot) -> list[tuple[int | None, str]]:
    return [(verdict.stage, verdict.cause) for verdict in picture.verdicts if verdict.root]


def texts_of(op: Operator, kind: str) -> list[str]:
    return [event.text for event in op.events if event.kind == kind]


async def mixed(op: Operator) -> list[str]:
    """Queue eight greedy requests and pause: one is held on the host, one swapped out, some run, four or five wait."""
    await op.until(lambda picture: picture.engine.state == "serving" and not picture.verdicts, "nothing is wrong yet")
    names = await op.submit_all(PROMPTS, max_tokens=STEPS)
    for name in names[:3]:
        await op.written(name, 4)
    await op.pause()
    await op.do(SwapOut(request=names[HELD]))
    await op.do(SwapOut(request=names[SWAPPED], hold=False))
    states = {request.id: request.state for request in (await op.now()).requests}
    assert [states.get(name) for name in names[:3]] == ["held", "swapped", "running"]
    assert op.picture.queues.waiting in (4, 5), "the fourth may not have begun before the pause"
    return names


@contextlib.asynccontextmanager
async def in_flight(op: Operator, names: list[str]) -> AsyncIterator[None]:
    """Let them go on, and hold them with steps in flight: stage 1 is stopped meanwhile."""
    with op.engine.stopped("stage1"):
        await op.do(Resume())
        await op.stuck(names[RUNNING])
        yield


async def back(op: Operator, state: str = "serving") -> Snapshot:
    """Wait until the engine is in `state` without a verdict; its processes have other pids then."""
    picture = await op.until(
        lambda picture: picture.engine.state == state and not picture.verdicts, f"it is {state} again", BACK_S
    )
    op.engine.find_pids()
    return picture


async def whole(op: Operator, names: list[str], expected: list[list[int]]) -> None:
    """Release the held one, read all to the end, and compare."""
    await op.do(Release(request=names[HELD]))
    assert await op.all_tokens(names) == expected
    await op.idle()


async def test_a_killed_stage_comes_back_and_no_request_is_lost(engine: Served, expected: list[list[int]]) -> None:
    await loses(engine, expected, 1)


@pytest.mark.parametrize("stage", [0, STAGES - 1])
async def test_the_same_with_steps_ahead(ahead: Served, expected: list[list[int]], stage: int) -> None:
    await loses(ahead, expected, stage)


async def loses(engine: Served, expected: list[list[int]], stage: int) -> None:
    """Kill a stage under load; check all that is said until it serves again, and what the requests have written."""

    def follows(now: Snapshot) -> bool:
        return any(v.suggest.startswith(f"ppconsole logs --stage {stage} (pid ") for v in now.verdicts)

    def loading(now: Snapshot) -> bool:
        return now.stages[stage].state == "loading" and (stage, "dead") in roots(now)

    async with engine.operator() as op:
        names = await mixed(op)
        streams = [asyncio.create_task(op.output(name, timeout=180)) for name in names]
        written = (await op.link.fetch(names[HELD])).token_ids
        old = engine.pids[f"stage{stage}"]
        # A load of 0.2 s may fall between two pictures. So its successor is held in it, and no sample says that it is.
        with contextlib.ExitStack() as held_back:
            async with in_flight(op, names):
                held_back.enter_context(engine.stopped("agent"))
                since = time.monotonic()
                os.kill(old, signal.SIGKILL)
            # All of it is reported within two seconds, in any order: each is waited for from here on.
            followed = asyncio.create_task(op.until(follows, "its successor is reported"))
            loads = asyncio.create_task(op.until(loading, "its row says that it loads, and is dead until it serves"))
            started = await asyncio.to_thread(successor, engine, old, stage)
            os.kill(started, signal.SIGSTOP)
            held_back.callback(os.kill, started, signal.SIGCONT)
            await op.until(lambda picture: (stage, "dead") in roots(picture), "the dead stage is named")
            print(f"stage {stage} killed: named after {time.monotonic() - since:.2f} s")
            picture = await loads
            assert picture.engine.state == "degraded"
        await followed
        held = await op.request(names[HELD], lambda request: not request.swap_blocks, "has lost its host copy")
        assert (held.state, held.blocks) == ("held", 0)
        picture = await back(op)
        print(f"stage {stage} killed: serving again after {time.monotonic() - since:.2f} s")
        assert picture.stages[stage].pid == engine.pids[f"stage{stage}"] != old
        await op.heard()
        assert texts_of(op, "stage.lost") == [f"stage {stage}: killed by SIGKILL"], "one fault and no cascade"
        assert [text for text in texts_of(op, "verdict.raised") if "dead" in text] == [
            f"dead: stage {stage} was killed by SIGKILL"
        ]
        await whole(op, names, expected)
        tokens = [(await stream)[0] for stream in streams]
        assert tokens == expected, "streams went on where they were"
        assert tokens[HELD][: len(written)] == written


async def test_what_is_swapped_at_the_kill_is_recomputed_and_the_pause_stays(
    engine: Served, expected: list[list[int]]
) -> None:
    async with engine.operator() as op:
        names = await mixed(op)
        assert (await op.now()).stages[0].swap_blocks.used
        os.kill(engine.pids["stage1"], signal.SIGKILL)
        await op.until(lambda picture: roots(picture) == [(1, "dead")], "the dead stage is named")
        picture = await back(op, "paused")
        assert (picture.queues.held, picture.queues.waiting) == (1, len(PROMPTS) - 1)
        assert picture.stages[0].swap_blocks.used == 0
        await op.do(Resume())
        await whole(op, names, expected)


async def test_restart_stage_from_the_command_line(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        names = await mixed(op)
        planned = await op.do(RestartStage(stage=1), dry_run=True)
        assert planned.plan[0].startswith(f"stage 1 (pid {engine.pids['stage1']}) is ended and restarted")
        assert planned.figures["requests"] == 8
        states: set[str] = set()
        watch = asyncio.create_task(op.until(lambda picture: states.add(picture.engine.state), "never", 120))
        command = engine.start_cli("restart-stage", "1", "--reason", "drill")
        await op.do(Resume())
        ran = await op.end_of(command)
        watch.cancel()
        assert ran.code == 0, ran
        assert ran.out.startswith("restart-stage applied: stage 1 is pid ")
        # Pictures that come together show the last one alone, so a quick restart may hide "loading".
        assert states <= {"serving", "loading"}, "it was asked for: no fault"
        old, picture = engine.pids["stage1"], await back(op)
        assert picture.stages[1].pid not in (None, old)
        await op.heard()
        assert not [text for kind in ("verdict.raised", "stage.lost", "stage.dead") for text in texts_of(op, kind)]
        assert await op.refused(RestartStage(stage=STAGES), "NOT_FOUND") == "no stage 3: this engine has 0 to 2"
        await whole(op, names, expected)


async def test_a_stopped_stage_is_restarted_by_the_verb(ahead: Served, expected: list[list[int]]) -> None:
    engine = ahead
    async with engine.operator() as op:
        names = await mixed(op)
        await op.do(Resume())
        os.kill(engine.pids["stage2"], signal.SIGSTOP)
        await op.until(lambda picture: roots(picture) == [(2, "stopped")], "the stopped stage is named")
        end = await (await op.begin(RestartStage(stage=2))).applied()
        assert "all stages are back" in end.text
        await back(op)
        await whole(op, names, expected)


async def test_a_stage_killed_while_memory_shrinks(ahead: Served, expected: list[list[int]]) -> None:
    engine = ahead
    async with engine.operator() as op:
        names = await mixed(op)
        before = op.picture.engine.memory_utilization
        async with in_flight(op, names):
            shrink = await op.begin(SetMemory(utilization=before * 0.6))
            os.kill(engine.pids["stage1"], signal.SIGKILL)
        end = await shrink.applied()
        picture = await back(op)
        assert {stage.kv_blocks.mapped for stage in picture.stages} == {int(end.figures["blocks_after"])}
        await op.do(SetMemory(utilization=before))
        await whole(op, names, expected)


async def test_a_wire_that_closes_is_healed_without_a_new_process(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        names = await mixed(op)
        old = dict(engine.pids)
        (connection,) = between(old["stage0"], old["stage1"])
        await op.do(Resume())
        await op.written(names[RUNNING], 8)
        since = time.monotonic()
        connection.shut_down()
        picture = await op.until(lambda picture: bool(roots(picture)), "the wire is named", core=False)
        ((stage, cause),) = roots(picture)
        assert (stage in (0, 1), cause) == (True, "link"), "whoever noticed it first"
        await op.until(lambda picture: picture.engine.state == "serving", "it serves again")
        print(f"wire closed: serving again after {time.monotonic() - since:.2f} s")
        picture = await back(op)
        assert engine.pids == old, "no process was restarted"
        assert picture.stages[1].pid == old["stage1"]
        await op.heard()
        assert len(texts_of(op, "wire.lost")) == 1
        assert texts_of(op, "stage.lost") == texts_of(op, "stage.restart") == []
        await whole(op, names, expected)


async def test_a_survivor_that_cannot_leave_is_restarted_too(engine: Served, expected: list[list[int]]) -> None:
    """Stage 1 may wait for stage 0, which is stopped: then it cannot leave in time either."""
    async with engine.operator() as op:
        names = await mixed(op)
        await op.do(Resume())
        old = dict(engine.pids)
        os.kill(engine.pids["stage0"], signal.SIGSTOP)
        os.kill(engine.pids["stage2"], signal.SIGKILL)
        await op.until(lambda picture: (2, "dead") in roots(picture), "the dead stage is named")
        await back(op)
        assert engine.pids["stage0"] != old["stage0"]
        await op.heard()
        assert texts_of(op, "stage.lost") == ["stage 2: killed by SIGKILL"]
        await whole(op, names, expected)


@pytest.mark.parametrize("seconds", [0.0, 0.5])
async def test_a_survivor_that_leaves_late_holds_nobody_up(
    engine: Served, expected: list[list[int]], seconds: float
) -> None:
    """Stage 1 leaves as soon as the core has given it up. The supervisor ends it when it meets the others, or later."""
    supervisor, folder = engine.engine.process.pid, engine.engine.run_dir
    async with engine.operator() as op:
        names = await mixed(op)
        await op.do(Resume())
        old, log = dict(engine.pids), folder / "stage1.log"
        size = log.stat().st_size

        def meets() -> bool:
            """Return whether it listens, or was called, since it was given up."""
            said = log.read_text()[size:]
            return "leaving generation" in said and ("edge from stage 0" in said or any(folder.glob("g*-e0.edge")))

        with engine.stopped("stage1"):
            begun = await op.begin(RestartStage(stage=2))
            await asyncio.to_thread(successor, engine, old["stage2"], 2)
            os.kill(supervisor, signal.SIGSTOP)
            late = "stage 1 did not leave the old generation within 2 s: restarted too"
            await op.until(lambda _: late in texts_of(op, "stage.restart"), "it is given up")
        await asyncio.to_thread(wait_until, meets, "it meets the others")
        await asyncio.sleep(seconds)  # Later it has reported that, and the core has answered it.
        os.kill(supervisor, signal.SIGCONT)
        await begun.applied()
        await back(op)
        assert engine.pids["stage0"] == old["stage0"] and engine.pids["stage1"] != old["stage1"]
        await whole(op, names, expected)
        await op.heard()
        assert texts_of(op, "wire.lost") == texts_of(op, "stage.lost") == [], "no other stage was connected with it"


def successor(engine: Served, old: int, stage: int = 1) -> int:
    """Return the process that takes the place of one of a stage, as soon as it is there."""
    deadline = time.monotonic() + BACK_S
    while not (found := [pid for pid in stage_pids(engine.engine.process.pid, stage) if pid != old]):
        assert time.monotonic() < deadline, "no process takes its place"
    return found[0]


async def test_a_stage_that_dies_again_while_loading_is_tried_again(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        names = await mixed(op)
        await op.do(Resume())
        old = engine.pids["stage1"]
        os.kill(old, signal.SIGKILL)
        # A picture that it loads comes too late on a fast machine: it may have met the others by then.
        os.kill(await asyncio.to_thread(successor, engine, old), signal.SIGKILL)
        why = "stage 1 is lost: killed by SIGKILL; 1 try failed, the next one is "
        picture = await op.until(lambda picture: picture.engine.message.startswith(why), "it says why")
        assert picture.engine.state == "degraded"
        await back(op)
        await whole(op, names, expected)


async def test_stop_while_a_stage_loads_leaves_nothing(ahead: Served) -> None:
    """The last test of this engine."""
    engine = ahead
    async with engine.operator() as op:
        await op.submit_all(PROMPTS, max_tokens=STEPS)
        killed = engine.pids["stage1"]
        os.kill(killed, signal.SIGKILL)
        # A load of 0.2 s may fall between two snapshots; the stop then comes just behind it.
        await op.until(
            lambda now: now.stages[1].state == "loading" or now.stages[1].pid not in (None, killed), "it loads"
        )
    engine.stop()


@pytest.mark.usefixtures("forked_llm")
def test_generate_goes_on_when_a_stage_is_killed(folder: Path, expected: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    with LLM(small(folder, stages=2, model={"max_model_len": 2048}, scheduler={"max_num_seqs": 2})) as llm:
        (victim,) = stage_pids(llm.llm_engine.supervisor_pid, 1)
        killer = threading.Timer(0.3, os.kill, [victim, signal.SIGKILL])
        killer.start()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        killer.join()
        assert stage_pids(llm.llm_engine.supervisor_pid, 1) not in ([], [victim])
    assert [output.outputs[0].token_ids for output in outputs] == expected
