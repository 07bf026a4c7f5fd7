"""A stage is cordoned: requests that have begun end, others wait, and the stage stays down until an operator acts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from operators import Operator
from ppengine.protocol.verbs import Cordon, RestartStage, Resume
from serving import Served

from profiles import small

STEPS = 60
PROMPTS = reference.prompts(4, 100, low=20, high=60, seed=44)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "cordon", "opt", dtype="float64", layers=2, max_position_embeddings=512)


@pytest.fixture
def engine(folder: Path) -> Iterator[Served]:
    with Served(small(folder, stages=2, model={"max_model_len": 512}, scheduler={"max_num_seqs": 2})) as served:
        yield served


async def test_a_cordon_from_the_command_line_to_its_end(engine: Served, folder: Path) -> None:
    expected = reference.greedy_each(folder, PROMPTS, STEPS)
    async with engine.operator() as op:
        begun = await op.halfway(PROMPTS[:2], max_tokens=STEPS)
        ran = await op.cli("cordon", "--stage", "1", "--dry-run")
        assert (ran.code, "start none of 0 others" in ran.out) == (0, True), ran
        assert (await op.now()).stages[1].cordon is None
        ran = await op.cli("cordon", "--stage", "1", "--reason", "a noisy fan")
        assert (ran.code, ran.out.startswith("cordon applied: finish 2 that have started")) == (0, True), ran
        new = await op.submit_all(PROMPTS[2:], max_tokens=STEPS)
        await op.do(Resume())
        assert await op.all_tokens(begun) == expected[:2], "what has begun goes on"
        waiting = await _waits(op, new)
        await _dies_and_stays_down(op, engine)
        await (await op.begin(RestartStage(stage=1))).applied()
        await op.until(lambda picture: picture.engine.state == "serving" and not picture.verdicts, "it serves", 60)
        engine.find_pids()
        assert await _waits(op, new) == waiting, "the cordon outlives the process of its stage"
        assert await op.refused(Cordon(stage=2), "NOT_FOUND") == "no stage 2: this engine has 0 to 1"
        ran = await op.cli("cordon", "--stage", "1", "--undo", "--json")
        assert (ran.code, ran.json["text"]) == (0, "start requests again, 2 wait")
        assert await op.all_tokens(new) == expected[2:]
        assert (await op.idle()).stages[1].cordon is None
        await op.heard()
    told = [event.text for event in op.events if event.kind == "op.applied" and event.text.startswith("cordon")]
    assert [text.partition(":")[0] for text in told] == ["cordon --stage 1", "cordon --stage 1 --undo"]
    assert told[0].endswith("(a noisy fan)")
    entries = [json.loads(line) for line in (engine.engine.run_dir / "audit.jsonl").read_text().splitlines()]
    done = [entry["args"] for entry in entries if entry["verb"] == "cordon" and entry["outcome"] == "applied"]
    assert done == [{"stage": 1, "undo": False}, {"stage": 1, "undo": True}]


async def _waits(op: Operator, names: list[str]) -> list[str]:
    """Return why each of `names` waits, as a console sees it that was not there when the cordon was placed."""
    async with op.engine.operator() as other:
        picture = await other.now()
    cordon = picture.stages[1].cordon
    assert cordon is not None
    assert (picture.engine.state, cordon.reason, picture.stages[0].cordon) == ("serving", "a noisy fan", None)
    rows = {request.id: request for request in picture.requests}
    assert [(rows[name].state, rows[name].output_tokens) for name in names] == [("waiting", 0)] * len(names)
    whys = [rows[name].why for name in names]
    texts = [why.text for why in whys if why is not None and why.code == "cordoned"]
    assert texts == [f"stage 1 is cordoned by {cordon.by}"] * len(names)
    ran = await op.cli("status")
    assert f"stage 1 is cordoned by {cordon.by}" in ran.out
    assert "idle,cordoned" in ran.out
    return texts


async def _dies_and_stays_down(op: Operator, engine: Served) -> None:
    """Kill stage 1; nothing starts it for longer than it takes to be told of its end."""
    os.kill(engine.pids["stage1"], signal.SIGKILL)
    kept = "stage 1 is lost: killed by SIGKILL; it is cordoned by "
    await op.until(lambda picture: picture.engine.message.startswith(kept), "it stays down and says why")
    await asyncio.sleep(1.5)
    picture = await op.now()
    assert (picture.engine.state, picture.stages[1].state) == ("degraded", "dead")
    assert [(verdict.stage, verdict.cause) for verdict in picture.verdicts if verdict.root] == [(1, "dead")]
