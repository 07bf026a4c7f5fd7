"""Another process on the card of a live engine: it is in the figures, in the plan that it makes fail, and in a verdict.

Needs a card that no other process uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real import needs_gpu

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "engine"), str(HERE.parent / "end_to_end")]
pytest.importorskip("zmq", reason="needs the engine's packages")

import reference  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from ppengine.protocol.control import Outcome, Refused  # noqa: E402
from ppengine.protocol.gpu import GpuProcess  # noqa: E402
from ppengine.protocol.snapshot import Snapshot  # noqa: E402
from ppengine.protocol.verbs import SetMemory  # noqa: E402
from serving import Served  # noqa: E402

pytestmark = [needs_gpu, pytest.mark.timeout(300)]
LENGTH, TOTAL_MIB = 2048, 6000
LITTLE, MUCH = 0.3, 0.8
NEWS_S = 2.5
"""Seconds until figures of the card are in a plan: NVML is read once a second."""

NEIGHBOUR = """
import sys, time, torch
torch.cuda.init()
free, total = torch.cuda.mem_get_info()
left, computes = float(sys.argv[1]), sys.argv[2] == "compute"
held = torch.empty(max(0, free - int(left * total)), dtype=torch.uint8, device="cuda") if left < 1 else None
factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) if computes else None
print("ready", flush=True)
while True:
    if computes:
        for _ in range(20):
            factor @ factor
        torch.cuda.synchronize()
    else:
        time.sleep(1)
"""


@contextlib.contextmanager
def neighbour(left: float, does: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that leaves `left` of the card's memory free (1: it takes none), and computes or sleeps."""
    command = [sys.executable, "-c", NEIGHBOUR, str(left), does]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def profile(folder: Path) -> dict[str, Any]:
    """Return two stages on one card."""
    return {
        "name": "neighbour",
        "model": {"path": str(folder), "dtype": "bfloat16", "max_model_len": LENGTH, "skip_tokenizer": True},
        "parallel": {"pipeline": 2, "device": "cuda"},
        "memory": {"device_mib": TOTAL_MIB, "swap_space_gib": 0.25, "utilization": LITTLE},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 512, "schedule_ahead": True},
    }


def listed(picture: Snapshot, stage: int = 0) -> list[GpuProcess]:
    gpu = picture.stages[stage].gpu
    return [] if gpu is None else gpu.processes or []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "llama", "llama", gain=0.5, max_position_embeddings=LENGTH)


async def test_a_grow_into_memory_that_another_process_holds_is_refused_and_names_it(folder: Path) -> None:
    with Served(profile(folder)) as engine:
        async with engine.operator() as op:
            await op.idle()
            await asyncio.sleep(NEWS_S)
            free = await op.ask(SetMemory(utilization=MUCH), dry_run=True)
            assert isinstance(free, Outcome) and any("their card has" in line for line in free.plan), free
            ours = {each.pid for each in listed(await op.now())}
            with neighbour(0.02, "sleep") as process:
                picture = await op.until(lambda picture: len(listed(picture)) > len(ours), "the neighbour is listed")
                print([(each.pid, each.name, each.bytes, each.sm) for each in listed(picture)])
                (held,) = (each for each in listed(picture) if each.pid not in ours)
                if ours >= {stage.pid for stage in picture.stages}:
                    assert held.pid == process.pid and held.name.startswith("python")
                await asyncio.sleep(NEWS_S)
                planned = await op.ask(SetMemory(utilization=MUCH), dry_run=True)
                refused = await op.ask(SetMemory(utilization=MUCH))
                for answer in (planned, refused):
                    assert isinstance(answer, Refused) and answer.code == "DOES_NOT_FIT", answer
                    assert answer.text.startswith("stages 0 and 1 need ") and "their card has" in answer.text
                    assert f"(pid {held.pid}) holds " in answer.text and "GiB; at most" in answer.text, answer.text
                print(planned)
                fits = float(refused.text.rpartition("; at most ")[2].removesuffix(" would fit"))
                assert LITTLE <= fits < MUCH
                await op.do(SetMemory(utilization=fits))
                await op.do(SetMemory(utilization=LITTLE))
            await asyncio.sleep(NEWS_S)
            await op.do(SetMemory(utilization=MUCH))
            await op.do(SetMemory(utilization=LITTLE))


async def test_a_neighbour_that_computes_is_named_with_the_stages_that_it_slows_down(folder: Path) -> None:
    prompts = reference.prompts(8, 100, low=20, high=60, seed=3)
    with Served(profile(folder)) as engine:
        async with engine.operator() as op:
            names = await op.submit_all(prompts, max_tokens=LENGTH - 100)
            # The pace of a stage is judged by its own past: some seconds of it are needed.
            began = time.monotonic()
            while time.monotonic() - began < 12:
                if not (await op.now()).requests_total:
                    names = await op.submit_all(prompts, max_tokens=LENGTH - 100)
            with neighbour(1, "compute") as process:
                began = time.monotonic()
                named = None
                while named is None and time.monotonic() - began < 40:
                    picture = await op.now()
                    if not picture.requests_total:
                        names = await op.submit_all(prompts, max_tokens=LENGTH - 100)
                    named = next((v for v in picture.verdicts if v.cause == "straggler"), None)
                print(f"after {time.monotonic() - began:.1f} s: {named}; {listed(picture)}")
                assert named is not None, "the neighbour slows the stages down"
                ours = {stage.pid for stage in picture.stages}
                visible = ours <= {each.pid for each in listed(picture)}
                assert "% of its card" in named.summary, "without its name it is a straggler like any other"
                assert not visible or f"(pid {process.pid}) uses" in named.summary
                assert any("of the card's SMs" in line for line in named.evidence)
            for name in names:
                await op.output(name, timeout=120)
            await op.until(lambda picture: not picture.verdicts, "all is well", timeout=60)
