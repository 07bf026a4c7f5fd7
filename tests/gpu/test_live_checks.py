"""Ledger and strict order on engines that serve on GPUs: switched under load with right tokens, silent on health."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest
from real import needs_gpu, pipelines

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "engine"), str(HERE.parent / "end_to_end")]
pytest.importorskip("zmq", reason="needs the engine's packages")
pytest.importorskip("transformers", reason="the judge")

import reference  # noqa: E402
import torch  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from ppengine.protocol.inspection import LedgerDetail  # noqa: E402
from ppengine.protocol.verbs import SetCheck, SetMemory  # noqa: E402
from serving import Served  # noqa: E402
from test_live import LENGTH, TOLERANCE, disturb, profile  # noqa: E402

pytestmark = needs_gpu
REQUESTS, STEPS = 16, 300


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by_device", [True, False])
@pytest.mark.parametrize("stages", pipelines)
async def test_the_checks_come_and_go_under_load(stages: int, by_device: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "opt", "opt", max_position_embeddings=LENGTH)
    prompts = reference.prompts(REQUESTS, 100, low=20, high=200, seed=stages)
    wanted = profile(folder, stages)
    wanted["parallel"]["peer_to_peer"] = by_device
    said: Counter[str] = Counter()
    with Served(wanted) as engine:
        async with engine.operator() as op:
            names = await op.submit_all(prompts, max_tokens=STEPS)
            disturbing = asyncio.create_task(disturb(op, names, said))
            for check, mode in (("ledger", "on"), ("strict", "on"), ("strict", "off"), ("ledger", "off")) * 2:
                end = await op.do(SetCheck(check=check, mode=mode))  # type: ignore[arg-type]
                assert end.text.endswith("without graphs meanwhile") == (check == "strict" and mode == "on")
                await asyncio.sleep(1.0)
            await op.do(SetCheck(check="ledger"))
            tokens = [(await op.output(name, timeout=240))[0] for name in names]
            disturbing.cancel()
            await op.ask(SetMemory(utilization=0.9))
            await asyncio.sleep(1.5)
            detail = await op.link.inspect("ledger")
    assert isinstance(detail, LedgerDetail) and len(detail.stages) == stages
    found = [finding for ledger in detail.stages for finding in ledger.findings]
    assert found == [] and not [event for event in op.events if event.kind.startswith("check.")]
    for ledger in detail.stages:
        assert {"compute", "upload", "kv fill", "swap out", "swap in"} <= {one.name for one in ledger.streams}
        assert all(one.device.startswith("cuda:") for one in ledger.streams if one.name == "compute")
        assert "KV blocks" in {one.name for one in ledger.buffers}
    for prompt, output in zip(prompts, tokens, strict=True):
        judge = reference.log_probabilities(folder, prompt, output)
        short = judge.max(dim=-1).values - judge.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert float(short.max()) < TOLERANCE, f"at output {int(short.argmax())}: short by {float(short.max())}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_reference_finds_nothing_wrong_with_what_a_gpu_rounds(dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "opt", "opt", gain=0.5, max_position_embeddings=LENGTH)
    wanted = profile(folder, 2)
    wanted["model"]["dtype"] = dtype
    with Served(wanted) as engine:
        async with engine.operator() as op:
            await op.do(SetCheck(check="shadow", share=1.0))
            names = await op.submit_all(reference.prompts(4, 100, low=20, high=60, seed=5), max_tokens=STEPS)
            for name in names:
                await op.output(name, timeout=120)
            picture = await op.until(lambda one: one.engine.checks.shadow_compared > STEPS, "tokens are compared")
    assert picture.engine.checks.findings == 0
    assert not [event for event in op.events if event.kind.startswith("check.")]
