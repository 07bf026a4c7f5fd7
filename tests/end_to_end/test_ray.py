"""Tensor ranks as Ray actors: the same tokens, actors that are restarted, and nothing left at the end of the engine.

Ray starts a dozen processes before the first stage: one engine, two stages of two ranks, serves all tests.
Others that Ray runs: of `test_nodes`, and the one of `test_executor_ray` that ends by itself.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import disturbed
import pytest
import reference
from checkpoints import make_checkpoint
from engines import wait_until
from operators import BACK_S
from ppengine.common import procfs
from ppengine.common.child_process import session
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import RestartStage
from serving import Served

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(300)]
STAGES, RANKS, STEPS, ENDS_S = 2, 2, 80, 60.0
RAY = {"executor": "ray", "tensor": RANKS}
PROMPTS = reference.prompts(8, 100, low=20, high=60, seed=33)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "ray", "qwen2", dtype="float64", layers=4)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    """An engine that its last test ends."""
    served = Served(disturbed.profile(folder, STAGES, 1, 32, scheduler={"schedule_ahead": True}, parallel=RAY))
    try:
        yield served
    finally:
        served.remove()


def roots(picture: Snapshot) -> list[tuple[int | None, int | None, str]]:
    return [(verdict.stage, verdict.rank, verdict.cause) for verdict in picture.verdicts if verdict.root]


def head_of(engine: Served) -> int:
    """Return the control store of the engine's own Ray."""
    driver = next(pid for pid, (_, module) in procfs.children([engine.engine.process.pid]).items() if "ray" in module)
    (found,) = [pid for pid in session(driver) if procfs.program(pid) == "gcs_server"]
    return found


async def test_through_all_that_may_befall_a_request(engine: Served, folder: Path) -> None:
    await disturbed.check(engine, folder)


async def test_an_actor_that_is_killed_or_stopped_is_restarted(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        await op.clean(disturbed.FULL)
        names = await op.submit_all(PROMPTS, max_tokens=STEPS)
        await op.written(names[0], 8)
        pids = {Place(stage.index, stage.tensor_rank): stage.pid for stage in (await op.now()).stages}
        assert len(set(pids.values())) == STAGES * RANKS, "each rank is an actor of its own"
        os.kill(pids[Place(1, 1)], signal.SIGKILL)
        await op.until(lambda picture: (1, 1, "dead") in roots(picture), "the dead actor is named")
        picture = await op.until(
            lambda picture: picture.engine.state == "serving" and not picture.verdicts, "it serves again", BACK_S
        )
        again = {Place(stage.index, stage.tensor_rank): stage.pid for stage in picture.stages}
        changed = {place for place, pid in again.items() if pid != pids[place]}
        assert changed == {Place(1, 1)}, "actors that were not lost stay, the other rank of the stage too"
        os.kill(pids[Place(0, 0)], signal.SIGSTOP)
        await op.until(lambda picture: roots(picture) == [(0, 0, "stopped")], "the stopped actor is named")
        end = await (await op.begin(RestartStage(stage=0))).applied()
        assert "all stages are back" in end.text
        assert (await op.now()).stages[0].pid not in again.values()
        for prompt, tokens in zip(PROMPTS, await op.all_tokens(names), strict=True):
            assert tokens == await reference.greedy_aside(folder, prompt, STEPS, draft=tokens)
        await op.idle()


async def test_a_head_that_is_lost_is_named_and_stages_go_on_until_the_supervisor_is_killed(
    engine: Served, folder: Path
) -> None:
    """The last test of this engine."""
    async with engine.operator() as op:
        os.kill(head_of(engine), signal.SIGKILL)
        silent = await op.until(lambda picture: [one for one in picture.verdicts if one.root], "the head is named")
        (verdict,) = [one for one in silent.verdicts if one.root]
        assert (verdict.stage, verdict.cause) == (None, "link")
        assert re.fullmatch(r"Ray's head at 127\.0\.0\.1:\d+ has not answered since \d\d:\d\d:\d\d", verdict.summary)
        names = await op.submit_all(PROMPTS[:2], max_tokens=STEPS)
        expected = [await reference.greedy_aside(folder, prompt, STEPS) for prompt in PROMPTS[:2]]
        assert await op.all_tokens(names) == expected
    engine.engine.process.kill()
    engine.engine.wait()
    wait_until(engine.engine.nothing_left, "all leaves with the supervisor", ENDS_S)
