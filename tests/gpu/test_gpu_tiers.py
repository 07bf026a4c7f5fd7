"""KV tiers on GPUs: a prefix that has left the card comes from host memory and from files, and no token differs."""

from __future__ import annotations

import sys
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
from ppengine.protocol.control import Outcome  # noqa: E402
from ppengine.protocol.snapshot import Snapshot  # noqa: E402
from ppengine.protocol.verbs import SetMemory  # noqa: E402
from serving import Served  # noqa: E402

pytestmark = [needs_gpu, pytest.mark.timeout(240)]
BLOCK, STEPS, LENGTH = 16, 64, 2048
SHORT = 1e-3
"""By how much a chosen token may be less likely than the best one, in natural logarithms; the models are of float32."""
FIRST, *PROMPTS = reference.prompts(5, 100, low=1000, high=1100, seed=3)
"""The first one is computed twice: files are measured beside it."""
HOST_GIB = {"host": 1.0, "files": 0.01}
"""Swap space of all places: with files it is too small for all that is computed."""
DEVICE = "cuda"
RANKED = {"num_key_value_heads": 4, "head_dim": 32}
"""Fields of the model for ranks. A page of 2 MiB has 512 of its blocks, so a small cache is full after some dozens of
prompts. Without ranks such chunks would be computed faster than they are fetched.
"""


def profile(folder: Path, where: str, chunks: Path, stages: int, tensor: int) -> dict[str, Any]:
    # With files the steps are small: prompts are then computed more slowly than they are fetched.
    tokens = 512 if where == "host" else 128
    backends = {"disk": {"kind": "files", "url": str(chunks), "write": "always"}} if where == "files" else {}
    return {
        "name": "tiers",
        "model": {"path": str(folder), "dtype": "float32", "max_model_len": LENGTH, "skip_tokenizer": True},
        "parallel": {"pipeline": stages, "tensor": tensor, "device": DEVICE},
        "memory": {"device_mib": 6000, "swap_space_gib": HOST_GIB[where] / stages / tensor, "utilization": 0.9},
        "scheduler": {
            "max_num_seqs": 16,
            "max_num_batched_tokens": tokens,
            "schedule_ahead": True,
        },
        "console": {"publish_hz": 20.0},
        "tiers": {"host": True, "backends": backends, "find_ms": 5000, "fetch_ms": 20000},
    }


async def rest(op: Operator) -> Snapshot:
    """Wait until the engine is idle and nothing is copied or written any more."""
    seen: list[tuple[float, ...]] = []

    def rests(now: Snapshot) -> bool:
        tiers = now.tiers
        if tiers is None or now.requests_total or tiers.slots_moving:
            return False
        seen.append((now.sampled_at, tiers.out_bytes_total, *(one.written_bytes_total for one in tiers.backends)))
        return len(seen) > 20 and len({each[1:] for each in seen[-20:]}) == 1

    return await op.until(rests, "nothing is left to copy", 60)


async def small(op: Operator) -> int:
    """Make the cache about as small as it can be; return its blocks. A percent more has thousands of them."""
    for percent in range(4, 40):
        if count := await blocks(op, percent / 100):
            break
    assert count, "no share of the memory will do"
    for share in range(10 * percent - 9, 10 * percent):
        if fewer := await blocks(op, share / 1000):
            return fewer
    return count


async def blocks(op: Operator, utilization: float) -> int:
    """Change the memory utilization; return the blocks, 0 if it is refused."""
    end = await op.ask(SetMemory(utilization=utilization))
    return int(end.figures["blocks_after"]) if isinstance(end, Outcome) and end.state == "applied" else 0


@pytest.mark.parametrize(("stages", "tensor"), [(1, 1), (2, 1), (1, 2)], ids=["lone", "stages", "ranks"])
@pytest.mark.parametrize("where", ["host", "files"])
async def test_a_prefix_that_has_left_the_card_comes_back(where: str, stages: int, tensor: int, tmp_path: Path) -> None:
    fields = RANKED if tensor > 1 else {}
    folder = make_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=LENGTH, **fields)
    with Served(profile(folder, where, tmp_path / "chunks", stages, tensor)) as engine:
        async with engine.operator() as op:
            blocks = await small(op)
            await op.all_tokens(await op.submit_all([FIRST, *PROMPTS], max_tokens=1))
            tiers = (await rest(op)).tiers
            assert tiers is not None
            count = (blocks + (tiers.slots if where == "files" else 0)) * BLOCK // 500 + 4
            others = reference.prompts(count, 100, low=1000, high=1000, seed=stages)
            await op.all_tokens(await op.submit_all(others, max_tokens=1))
            await rest(op)
            if where == "files":
                await op.all_tokens(await op.submit_all([FIRST], max_tokens=1))
                await rest(op)
            names = await op.submit_all(PROMPTS, max_tokens=STEPS)
            tokens = await op.all_tokens(names)
            came = 0
            for name, prompt, output in zip(names, PROMPTS, tokens, strict=True):
                sources = (await op.detail(name)).sources
                assert sources is not None
                came += sources.host if where == "host" else sum(sources.backends.values())
                judge = reference.log_probabilities(folder, prompt, output)
                short = judge.max(dim=-1).values - judge.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
                assert float(short.max()) < SHORT, f"at output {int(short.argmax())}: short by {float(short.max())}"
            assert came > sum(map(len, PROMPTS)) / 2, "most tokens come from there"
            await op.idle()
