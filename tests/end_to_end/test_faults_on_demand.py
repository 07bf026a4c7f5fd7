"""Faults on demand in a real engine: they strike where they should, are cleared, and no token is lost by it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from engines import wait_until
from ppengine.drills.registry import kinds
from ppengine.protocol.control import Outcome
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import ClearFaults, Fault, Preempt, SetCheck
from serving import LASTING_S, Operator, Served, process_state

from profiles import small

STEPS, MORE = 600, 50
"""Tokens: more than a fast engine writes before a fault is on, and how many after a fault are compared."""
PROMPT = reference.prompts(1, 100, low=30, high=30, seed=21)[0]


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "broken", "opt", dtype="float64", layers=4, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    profile = small(
        folder, model={"max_model_len": 1024}, scheduler={"schedule_ahead": True}, parallel={"restart": "never"}
    )
    with Served(profile, "--allow-faults", step_s=LASTING_S) as served:
        yield served


async def writes(op: Operator, steps: int = STEPS) -> str:
    name = await op.submit(PROMPT, max_tokens=steps)
    await op.request(name, lambda request: request.output_tokens > 3, "writes")
    return name


async def goes_on(op: Operator, name: str, folder: Path) -> None:
    """Check that a request has written the right tokens, `MORE` of them from now on; then end it."""
    so_far = len((await op.detail(name)).output_token_ids)
    tokens = await op.written(name, so_far + MORE)
    assert len(tokens) >= min(so_far + MORE, STEPS)
    assert tokens == await reference.greedy_aside(folder, PROMPT, len(tokens), draft=tokens)
    await op.abort(name)


HANGS = [
    ("sleep-before-send", 0), ("sleep-before-receive", 1), ("sleep-in-forward", 0), ("python-loop", 1),
    ("pipe-read", 0), ("internal-deadlock", 0), ("send-thread-stuck", 1), ("send-thread-gone", 0), ("drop-send", 0),
    ("drop-token-return", 1), ("drop-ack", 1), ("socket-unread", 0), ("link-stall", 0), ("sigstop", 1), ("traced", 0),
    ("core-stop", None),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stage"), HANGS, ids=[kind for kind, _ in HANGS])
async def test_hang_strikes_and_is_cleared(engine: Served, folder: Path, kind: str, stage: int | None) -> None:
    async with engine.operator() as op:
        name = await writes(op)
        assert kind in (await op.do(Fault(kind=kind, stage=stage))).text
        if kind == "core-stop":
            wait_until(lambda: process_state(engine.pids["core"]) == "T", "the core is stopped")
        else:
            await op.stuck(name)
        assert kind in (await op.do(ClearFaults())).text
        await goes_on(op, name, folder)
        assert (await op.do(ClearFaults())).text == "no fault is on"


async def test_swap_that_never_ends(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        name = await writes(op)
        await op.do(Fault(kind="swap-hang", stage=1))
        await op.begin(Preempt(request=name, mode="swap"))

        def swapping(picture: Snapshot) -> bool:
            return picture.stages[1].op is not None and picture.stages[1].op.startswith("swap_out")

        await op.until(swapping, "stage 1 is in a swap")
        await op.do(ClearFaults())
        await goes_on(op, name, folder)


async def test_slow_stage_is_slow_until_cleared(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        name = await writes(op)
        await op.do(Fault(kind="slow-sleep", stage=1))
        await op.until(lambda picture: (picture.stages[1].step_ms.p99 or 0) > 5.0, "its steps take longer")
        await op.do(ClearFaults())
        await goes_on(op, name, folder)


async def test_faults_of_the_core_are_begun_by_a_thread_of_its_own(engine: Served) -> None:
    async with engine.operator() as op:
        end = await op.ask(Fault(kind="lookup-in-step"))
        assert isinstance(end, Outcome)
        assert (end.state, end.text.partition(",")[0]) == ("failed", "lookup-in-step needs a backend of KV tiers")


INCIDENTS = [
    ("stale-seqstart", "stream_order", "metadata reads seqstart without waiting for compute, which writes it"),
    ("global-stream", "stream_owner", "thread step loop launches on stream kv-load, which thread kv-connector owns"),
    ("foreign-device", "stream_owner", "stream kv-load of cuda:0 is used with thread step loop of cuda:2"),
]


@pytest.mark.parametrize(("kind", "cause", "words"), INCIDENTS, ids=[kind for kind, _, _ in INCIDENTS])
async def test_a_known_incident_is_told_by_the_ledger(
    engine: Served, folder: Path, kind: str, cause: str, words: str
) -> None:
    async with engine.operator() as op:
        refused = await op.ask(Fault(kind=kind, stage=1))
        assert isinstance(refused, Outcome) and refused.state == "failed"
        assert "ppconsole check ledger on" in refused.text
        await op.do(SetCheck(check="ledger"))
        name = await writes(op)
        await op.do(Fault(kind=kind, stage=1))
        picture = await op.until(lambda picture: bool(picture.verdicts), "the ledger tells")
        (verdict,) = picture.verdicts
        assert (verdict.stage, verdict.cause) == (1, cause)
        told = [verdict.summary, *verdict.evidence]
        assert any(words in line for line in told), told
        assert any("drills/incident_programs.py:" in line for line in told)
        await goes_on(op, name, folder)
        assert (await op.do(ClearFaults())).text == f"cleared {kind} at stage 1"
        await op.do(SetCheck(check="ledger", mode="off"))
        await op.until(lambda picture: not picture.verdicts, "what it has found goes with it")


def test_from_the_command_line(engine: Served) -> None:
    listed = engine.cli("fault", "--list")
    assert listed.code == 0
    for name in kinds():
        assert f"\n{name}  [" in f"\n{listed.out}"
    assert listed.out.endswith("on: none\n")
    planned = engine.cli("fault", "sigkill", "--stage", "1", "--dry-run")
    assert planned.code == 0
    assert "The stage gets SIGKILL" in planned.out
    wrong = engine.cli("fault", "sigkil", "--stage", "1")
    assert wrong.code == 2
    assert "did you mean sigkill" in wrong.err
    assert engine.cli("fault", "sigkill", "--stage", "2").code == 2
    done = engine.cli("fault", "slow-subscriber", "--json")
    assert done.code == 0
    assert done.json["state"] == "applied"
    assert "on: slow-subscriber at gateway" in engine.cli("fault", "--list").out
    cleared = engine.cli("fault", "--clear")
    assert cleared.code == 0
    assert "cleared slow-subscriber" in cleared.out


@pytest.mark.parametrize(("kind", "code"), [("sigsegv", -signal.SIGSEGV), ("sys-exit", 3)])
async def test_death_by_a_fault(engine: Served, kind: str, code: int) -> None:
    async with engine.operator() as op:
        await writes(op, 900)
        await op.do(Fault(kind=kind, stage=1))
        picture = await op.until(lambda picture: picture.engine.state == "degraded", "the engine is degraded")
        assert "stage 1 is lost" in picture.engine.message
        await op.until(lambda picture: picture.stages[1].state == "dead", "stage 1 is dead")
        said = "SIGSEGV" if code < 0 else f"exit code {code}"
        await op.until(lambda picture: said in picture.engine.message, f"it is known how: {said}")
        assert (await op.do(ClearFaults())).text == f"{kind} at stage 1 has ended its process"
        await op.repair(1)


async def test_the_core_is_killed_and_the_requests_go_on(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        name = await writes(op)
        await op.do(Fault(kind="core-kill"))
        told = await op.until(lambda picture: picture.verdicts, "it is a verdict", core=False)
        (verdict,) = told.verdicts
        assert (verdict.stage, verdict.cause) == (None, "core")
        # The gateway may see that it is gone a moment before the supervisor says how.
        await op.until(
            lambda _: any("killed by SIGKILL" in one.text for one in op.events), "it is known how", core=False
        )
        await op.until(lambda picture: picture.engine.state == "serving", "the next one serves")
        engine.find_pids()
        await goes_on(op, name, folder)
