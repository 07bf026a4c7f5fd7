"""Stages that do not come up: the requests end as lost by name at the limit, and the engine serves when one comes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from exhausted import LIMIT_S, PROMPT, TOKENS, no_room_for_rings, serve, submit, unreachable
from operators import Operator
from ppengine.core.signs_of_life import ANSWER_S
from serving import audited


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "stuck", "opt", dtype="float64", layers=4, max_position_embeddings=2048)


async def lost(op: Operator, names: list[str], why: str, timeout: float) -> None:
    """Wait until requests have ended, as lost for a reason, and a new one is refused for it."""
    ended = {}
    begun = time.monotonic()
    while set(ended) != set(names):
        assert time.monotonic() < begun + timeout, f"only {ended} has ended"
        for event in await op.heard():
            if event.kind == "request.finished" and event.finished is not None:
                ended[event.finished.id] = event.finished
        await op.now()
    assert {one.reason for one in ended.values()} == {"lost"}
    assert all(why in one.loss for one in ended.values()), ended
    ran = await op.cli("follow", names[0])
    assert ran.code == 1 and why in ran.error
    assert why in await op.refused(submit(), "FAILED")


async def serves(op: Operator) -> None:
    """Wait until the engine serves again, and send it a request."""
    lifted = time.monotonic()
    await op.until(lambda picture: picture.engine.state == "serving", "it serves again", 60.0)
    print(f"lifted to serving {time.monotonic() - lifted:.1f} s")
    op.engine.find_pids()
    late = await op.submit(PROMPT, max_tokens=20)
    await op.output(late)
    assert all(lines[0] == "received" and len(lines) > 1 for lines in audited(op.engine).values())


async def test_a_stage_that_cannot_reach_the_core(folder: Path) -> None:
    with serve(folder, LIMIT_S) as engine:
        async with engine.operator() as op:
            name = await op.submit(PROMPT, max_tokens=TOKENS)
            with unreachable(engine, "steps"):
                killed = time.monotonic()
                os.kill(engine.pids["stage1"], signal.SIGKILL)
                why = f"its process did not reach the core within {ANSWER_S:g} s"
                await lost(op, [name], why, 40.0)
                print(
                    f"\nstage cannot reach the core: kill to the end of the request {time.monotonic() - killed:.1f} s"
                )
                assert (await op.now()).engine.state == "degraded"
            await serves(op)


async def test_a_stage_that_cannot_start_beside_a_core_that_follows_another(folder: Path) -> None:
    with serve(folder, LIMIT_S) as engine:
        async with engine.operator() as op:
            names = await op.submit_all([PROMPT, PROMPT], max_tokens=TOKENS)
            await op.written(names[0], 4)
            with no_room_for_rings(engine):
                os.kill(engine.pids["core"], signal.SIGSTOP)
                killed = time.monotonic()
                os.kill(engine.pids["stage1"], signal.SIGKILL)
                os.kill(engine.pids["core"], signal.SIGKILL)
                await op.until(lambda picture: picture.engine.state == "degraded", "it shows", 20.0, core=False)
                await lost(op, names, "No space left on device", 40.0)
                print(f"\nno stage beside the next core: kill to the end of the requests "
                      f"{time.monotonic() - killed:.1f} s")  # fmt: skip
                assert (await op.now()).engine.state == "degraded"
            await serves(op)
