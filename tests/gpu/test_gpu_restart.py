"""A stage on a GPU is killed or stopped while its neighbour's device waits for it: it comes back, no token differs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real import needs_gpu

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "engine"), str(HERE.parent / "end_to_end")]
pytest.importorskip("zmq", reason="needs the engine's packages")
pytest.importorskip("transformers", reason="the judge")

import reference  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from operators import Operator  # noqa: E402
from ppengine.protocol.verbs import RestartStage  # noqa: E402
from serving import Served  # noqa: E402

pytestmark = needs_gpu
STAGES, STEPS, LENGTH, BACK_S = 2, 1500, 2048, 90.0
TOLERANCE = 1e-3
"""As in test_live."""
PROMPTS = reference.prompts(6, 100, low=20, high=60, seed=33)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("restart") / "opt", "opt", max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    profile: dict[str, Any] = {
        "name": "gpu-restart",
        "model": {"path": str(folder), "dtype": "float32", "max_model_len": LENGTH, "skip_tokenizer": True},
        "parallel": {"pipeline": STAGES, "device": "cuda"},
        "memory": {"device_mib": 6000, "swap_space_gib": 0.05},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256, "schedule_ahead": True},
        "console": {"publish_hz": 20.0},
    }
    with Served(profile) as served:
        yield served


def carried(engine: Served, stage: int) -> list[str]:
    """Return what a stage's log says of its edges."""
    log = (engine.engine.run_dir / f"stage{stage}.log").read_text()
    return [line.partition("edge ")[2] for line in log.splitlines() if "edge " in line]


def words_mapped(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted(line.rpartition("/")[2] for line in lines if ".words" in line)


def assert_whole(engine: Served) -> None:
    """Each stage has the words of its two edges mapped and no older ones, and no other file of words is there."""
    for stage in range(STAGES):
        assert words_mapped(engine.pids[f"stage{stage}"]) == ["e0.words", "tokens.words"]
    assert sorted(path.name for path in engine.engine.ring_dir.glob("*.words")) == ["e0.words", "tokens.words"]


async def back(op: Operator) -> None:
    await op.until(lambda picture: picture.engine.state == "serving" and not picture.verdicts, "serving", BACK_S)
    assert op.engine is not None
    op.engine.pids = op.engine.engine.find_processes(3 + STAGES)


async def judge(op: Operator, folder: Path, names: list[str]) -> None:
    for name, prompt in zip(names, PROMPTS, strict=True):
        output = (await op.output(name, timeout=120))[0]
        assert len(output) == STEPS
        rows = reference.log_probabilities(folder, prompt, output)
        short = rows.max(dim=-1).values - rows.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert float(short.max()) < TOLERANCE, f"at output {int(short.argmax())}: short by {float(short.max())}"
    await op.idle()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", range(STAGES))
async def test_a_killed_stage_comes_back_and_its_neighbour_keeps_its_process(
    engine: Served, folder: Path, stage: int
) -> None:
    async with engine.operator() as op:
        await back(op)
        assert_whole(engine)
        names = await op.submit_all(PROMPTS, max_tokens=STEPS)
        for name in names:
            await op.written(name, 20)
        old, other = engine.pids[f"stage{stage}"], engine.pids[f"stage{1 - stage}"]
        os.kill(old, signal.SIGKILL)
        await op.until(
            lambda picture: (stage, "dead") in [(one.stage, one.cause) for one in picture.verdicts], "it is named"
        )
        await back(op)
        assert engine.pids[f"stage{stage}"] != old
        assert engine.pids[f"stage{1 - stage}"] == other, "the neighbour left its generation in time"
        assert_whole(engine)
        await judge(op, folder, names)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", range(STAGES))
async def test_a_stopped_stage_goes_on_or_is_restarted(engine: Served, folder: Path, stage: int) -> None:
    async with engine.operator() as op:
        await back(op)
        names = await op.submit_all(PROMPTS, max_tokens=STEPS)
        for name in names:
            await op.written(name, 20)
        old, other = engine.pids[f"stage{stage}"], engine.pids[f"stage{1 - stage}"]
        with engine.stopped(f"stage{stage}"):
            await op.until(
                lambda picture: (stage, "stopped") in [(one.stage, one.cause) for one in picture.verdicts], "named"
            )
        await back(op)
        assert engine.pids[f"stage{stage}"] == old, "it goes on"
        os.kill(old, signal.SIGSTOP)
        await op.until(
            lambda picture: (stage, "stopped") in [(one.stage, one.cause) for one in picture.verdicts], "named"
        )
        await (await op.begin(RestartStage(stage=stage))).applied()
        await back(op)
        assert engine.pids[f"stage{stage}"] != old and engine.pids[f"stage{1 - stage}"] == other
        assert_whole(engine)
        await judge(op, folder, names)


def test_messages_go_from_card_to_card(engine: Served) -> None:
    for stage in range(STAGES):
        lines = carried(engine, stage)
        assert lines and all(line.endswith("the device carries messages") for line in lines), lines
