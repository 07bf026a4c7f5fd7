"""Live checks on engines that serve: switched under load with the same tokens, silent on health, loud on a fault."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
import torch
from checkpoints import make_checkpoint
from engines import wait_until
from ppengine.common.child_process import session
from ppengine.protocol.inspection import LedgerDetail
from ppengine.protocol.snapshot import Event
from ppengine.protocol.verbs import SetCheck
from safetensors.torch import load_file, save_file
from serving import Operator, Served

from profiles import small

STAGES, LAYERS, STEPS = 3, 6, 150
PROMPTS = reference.prompts(4, 100, low=20, high=40, seed=33)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(
        checkpoint_root / "checks", "opt", dtype="float64", layers=LAYERS, max_position_embeddings=2048
    )


@pytest.fixture(scope="module")
def on_disk(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkpoint: the engine reads it, and tests change its weights and put them back."""
    return Path(shutil.copytree(folder, tmp_path_factory.mktemp("checks") / "on_disk"))


@pytest.fixture(scope="module")
def engine(on_disk: Path) -> Iterator[Served]:
    with Served(small(on_disk, stages=STAGES, scheduler={"schedule_ahead": True})) as served:
        yield served


@contextlib.contextmanager
def changed(folder: Path, weight: str, change: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Change the one weight whose name ends in `weight`. Files are replaced: stages may have the old one mapped."""
    file, new, kept = (folder / name for name in ("model.safetensors", "new", "kept"))
    tensors = load_file(file)
    (name,) = [key for key in tensors if key.endswith(weight)]
    change(tensors[name])
    save_file(tensors, new, metadata={"format": "pt"})
    file.rename(kept)
    new.rename(file)
    try:
        yield
    finally:
        kept.replace(file)


def finding_events(op: Operator) -> list[Event]:
    """Return the findings that were reported as events."""
    return [event for event in op.events if event.kind.startswith("check.")]


async def finding(op: Operator, cause: str) -> Event:
    """Return the first finding of a cause once it is reported."""
    async with asyncio.timeout(20):
        while True:
            for event in finding_events(op):
                if event.kind == f"check.{cause}":
                    return event
            await asyncio.sleep(0.05)


async def drawn_anew(op: Operator) -> LedgerDetail:
    """Return the ledgers as every stage has drawn them since this call; what it found until then it reported before."""
    since = time.monotonic()
    async with asyncio.timeout(20):
        while True:
            detail = await op.link.inspect("ledger")
            assert isinstance(detail, LedgerDetail)
            ages = [ledger.age_s for ledger in detail.stages]
            if len(ages) == STAGES and max(ages) < time.monotonic() - since:
                await op.heard()
                return detail
            await asyncio.sleep(0.05)


async def test_switched_on_and_off_under_load_with_the_same_tokens(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        names = await op.submit_all(PROMPTS, max_tokens=STEPS)
        await op.request(names[0], lambda request: request.output_tokens > 3, "writes")
        for check in ("ledger", "finite", "strict"):
            end = await op.do(SetCheck(check=check))
            assert end.step is not None
            assert end.text == f"in all stages from step {end.step} on"
            await op.until(lambda picture, name=check: getattr(picture.engine.checks, name), f"{check} is shown")
        for check in ("ledger", "finite", "strict"):
            await op.do(SetCheck(check=check, mode="off"))
        for name, prompt in zip(names, PROMPTS, strict=True):
            tokens = await op.tokens(name)
            assert tokens == await reference.greedy_aside(folder, prompt, STEPS, draft=tokens)
        for check in ("ledger", "finite", "strict"):
            await op.do(SetCheck(check=check))
        names = await op.submit_all(PROMPTS, max_tokens=40)
        for name, prompt in zip(names, PROMPTS, strict=True):
            tokens = await op.tokens(name)
            assert tokens == await reference.greedy_aside(folder, prompt, 40, draft=tokens)
        detail = await drawn_anew(op)
        assert [ledger.stage for ledger in detail.stages] == list(range(STAGES))
        names = [{stream.name for stream in ledger.streams} for ledger in detail.stages]
        assert names == [{"send>1", "tokens<2"}, {"recv<0", "send>2"}, {"recv<1", "send>0"}]
        for ledger in detail.stages:
            assert all(handoff.count for handoff in ledger.handoffs)
            ends = {end for handoff in ledger.handoffs for end in (handoff.producer, handoff.consumer)}
            assert {"thread main", f"stage {(ledger.stage + 1) % STAGES}"} <= ends, ends
            assert ledger.buffers
            assert ledger.findings == []
        assert finding_events(op) == []
        assert op.picture.engine.checks.findings == 0
        for check in ("ledger", "finite", "strict"):
            await op.do(SetCheck(check=check, mode="off"))


def test_from_the_command_line(engine: Served) -> None:
    planned = engine.cli("check", "finite", "on", "--dry-run")
    assert planned.code == 0
    assert planned.out.startswith("check planned: from the next step on every stage checks its outputs")
    assert "checks:" not in engine.cli("status").out
    assert engine.cli("check", "finite", "on", "--reason", "a look").code == 0
    wait_until(lambda: "checks: finite; 0 findings" in engine.cli("status").out, "status shows it")
    shown = engine.cli("status", "--json").json["engine"]["checks"]
    assert (shown["finite"], shown["ledger"], shown["strict"]) == (True, False, False)
    assert engine.cli("check", "finite", "off").code == 0
    wrong = engine.cli("check", "finite", "on", "--share", "0.5")
    assert wrong.code == 2
    assert "check finite on has no share" in wrong.error


@pytest.mark.parametrize(
    ("weight", "stage", "part"),
    [("layers.3.fc2.weight", 1, "layer 3 MLP"), ("layers.5.self_attn.v_proj.weight", 2, "layer 5 attention")],
)
async def test_a_poisoned_layer_is_named(engine: Served, on_disk: Path, weight: str, stage: int, part: str) -> None:
    """A NaN in a weight that a restarted stage reads: the engine serves, and names the part once the check is on."""
    async with engine.operator() as op:
        with changed(on_disk, weight, lambda tensor: tensor[2, 3].fill_(torch.nan)):
            await op.repair(stage)
        await op.do(SetCheck(check="finite"))
        request = await op.submit(PROMPTS[0], max_tokens=10)
        event = await finding(op, "non_finite")
        assert event.stage == stage
        assert event.text.startswith(f"stage {stage}: {part} gives NaN in m")
        assert event.text.endswith(f", request {request}")
        await op.tokens(request)
        picture = await op.until(lambda picture: picture.engine.checks.findings, "it is counted")
        assert picture.engine.checks.findings == 1, "the stages behind it only pass it on"
        await op.do(SetCheck(check="finite", mode="off"))
        await op.until(lambda picture: not picture.engine.checks.findings, "off forgets it")
        await op.repair(stage)


async def test_the_reference_agrees_and_ends_with_its_switch(engine: Served) -> None:
    async with engine.operator() as op:
        await op.do(SetCheck(check="shadow", share=1.0))
        # It compares one request at a time, and the engine is faster.
        while (picture := await op.now()).engine.checks.shadow_compared <= 20:
            await op.all_tokens(await op.submit_all(PROMPTS, max_tokens=60))
        assert picture.engine.checks.shadow_state == "ready"
        assert finding_events(op) == []
        (shadow,) = children_named("ppengine.shadow", engine.pids["core"])
        await op.do(SetCheck(check="shadow", mode="off"))
        wait_until(lambda: not session(shadow), "the reference has ended")
        assert op.picture.engine.state == "serving"


async def test_a_pipeline_that_differs_from_its_checkpoint_is_found(
    engine: Served, folder: Path, on_disk: Path, tmp_path: Path
) -> None:
    """The weights on disk change after the stages have read them: what the reference gives is another text."""
    async with engine.operator() as op:
        with changed(on_disk, "layers.1.fc2.weight", torch.Tensor.neg_):
            other = Path(shutil.copytree(on_disk, tmp_path / "other"))
            await op.do(SetCheck(check="shadow", share=1.0))
            request = await op.submit(PROMPTS[1], max_tokens=30)
            event = await finding(op, "mismatch")
        theirs = await reference.greedy_aside(other, PROMPTS[1], 30)
        ours = await op.tokens(request)
        at = next(index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        position = len(PROMPTS[1]) + at
        assert event.text == (
            f"request {request}: token {ours[at]} at position {position}, the reference gives {theirs[at]}"
        )
        assert ours == await reference.greedy_aside(folder, PROMPTS[1], 30)
        await op.do(SetCheck(check="shadow", mode="off"))


def children_named(module: str, parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
            words = (path / "cmdline").read_bytes().decode().replace("\0", " ").split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent and module in words:
            found.append(int(path.name))
    return found
