"""Faults put into real stages from outside, idle and under load: named in time, at the right stage, with the line."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from cgroups import moved
from checkpoints import make_checkpoint
from engines import wait_until
from injected import Injector
from operators import Operator
from ppengine.drills.tracer import Tracer
from ppengine.protocol.snapshot import Snapshot, Verdict
from ppengine.protocol.verbs import Abort, SetMemory
from serving import LASTING_S, Ran, Served

from profiles import small

pytestmark = pytest.mark.long
STAGES = 3
PROMPT = reference.prompts(1, 100, low=30, high=30, seed=5)[0]
HANG_S, DEATH_S, STACKS_S = 2.0, 1.0, 5.0
HELD_S = 15.0
"""At most; long enough to start a command or two on a busy machine."""
BUSY_S = 2.0
"""Allowed on top of each: the machine that runs the tests may be busy, and looking takes turns."""


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(
        checkpoint_root / "diagnosis", "opt", dtype="float64", layers=6, max_position_embeddings=2048
    )


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Injector:
    return Injector(tmp_path_factory.mktemp("injected"))


@pytest.fixture(scope="module")
def engine(folder: Path, injector: Injector) -> Iterator[Served]:
    """One engine for all faults: a stage that does not recover by itself is restarted (`Operator.repair`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", injector.path)
        served = Served(small(folder, stages=STAGES, model={"max_model_len": 2048}), step_s=LASTING_S)
    with served:
        yield served


def the_root(picture: Snapshot) -> Verdict | None:
    roots = [verdict for verdict in picture.verdicts if verdict.root]
    assert len(roots) < 2, roots
    return roots[0] if roots else None


async def named(op: Operator, since: float, stage: int, cause: str, limit: float) -> Verdict:
    """Wait for a first verdict, which must be the right one, in time; all others are sufferers.

    `Served.queued` is not the engine's own time.
    """
    before = op.engine.queued()
    picture = await op.until(lambda picture: the_root(picture) is not None, f"stage {stage} is {cause}")
    # By the engine's own clock: what the link and this test add is not what is judged.
    took, root = picture.sampled_at - since, the_root(picture)
    queued = op.engine.queued() - before
    assert root is not None
    print(f"stage {stage} {cause}: named after {took:.2f} s, {queued:.2f} s in queues for a CPU: {root.summary}")
    assert (root.stage, root.cause) == (stage, cause), root
    assert took - queued < limit + BUSY_S
    assert {verdict.cause for verdict in picture.verdicts if not verdict.root} <= {"starved", "blocked"}
    return root


async def loaded(op: Operator, count: int = 3) -> list[str]:
    names = await op.submit_all([PROMPT] * count, max_tokens=1900)
    await op.request(names[0], lambda request: request.output_tokens > 3, "writes")
    return names


async def quiet(op: Operator, names: list[str]) -> None:
    await op.until(lambda picture: not picture.verdicts, "the verdict is cleared", 60)
    for name in names:
        await op.do(Abort(request=name))


@pytest.mark.parametrize(
    ("word", "stage", "cause"),
    [("pause_in_python", 0, "self_stuck"), ("spin", 1, "self_stuck"), ("keep_the_gil", 2, "gil_held")],
)
async def test_a_hang_is_named_with_its_line_and_cleared(
    engine: Served, injector: Injector, word: str, stage: int, cause: str
) -> None:
    """The rules say the same of every stage, as the diagnosis' own tests show; here each kind meets another one."""
    async with engine.operator() as op:
        await op.until(lambda picture: not picture.verdicts, "nothing is wrong yet")
        names = await loaded(op)
        since = time.time()
        injector.tell(engine.pids[f"stage{stage}"], word, HELD_S)
        await named(op, since, stage, cause, HANG_S)

        def has_line(picture: Snapshot) -> bool:
            root = the_root(picture)
            return root is not None and any(f"{word} " in fact and ".py:" in fact for fact in root.evidence)

        await op.until(has_line, "the line of code is told")
        assert time.time() - since < STACKS_S + BUSY_S
        ran = await asyncio.to_thread(engine.cli, "explain")
        assert ran.code == 10
        assert ran.out.startswith(f"STAGE {stage} {cause} ")
        assert f"{word} " in ran.out.splitlines()[0]
        assert "waits:" in ran.out
        told = await asyncio.to_thread(engine.cli, "explain", "--json")
        assert told.json["waits"]
        injector.release(engine.pids[f"stage{stage}"])
        await quiet(op, names)


async def test_a_core_that_hangs_is_named_with_its_line(engine: Served, injector: Injector) -> None:
    async with engine.operator() as op:
        await op.until(lambda picture: not picture.verdicts, "nothing is wrong yet")
        names = await loaded(op)
        since, pid = time.time(), engine.pids["core"]
        injector.tell(pid, "pause_in_python", HELD_S)

        def has_line(picture: Snapshot) -> bool:
            root = the_root(picture)
            return root is not None and "pause_in_python " in root.summary

        picture = await op.until(has_line, "the line of code is told", core=False)
        root, took = the_root(picture), time.time() - since
        assert root is not None
        print(f"core: line told after {took:.2f} s: {root.summary}")
        assert took < STACKS_S + BUSY_S
        assert (root.stage, root.cause, root.suggest) == (None, "core", "ppconsole stacks --core")
        ran = await asyncio.to_thread(engine.cli, "stacks", "--core")
        assert ran.code == 0 and ran.out.startswith(f"pids: core {pid}\n")
        assert "core: MainThread" in ran.out and "pause_in_python " in ran.out
        assert not re.search(r"^stages? \d", ran.out, re.MULTILINE)
        injector.release(pid)
        await quiet(op, names)


@pytest.mark.parametrize("idle", [False, True])
async def test_a_debugger_is_named_and_its_stacks_are_not(engine: Served, idle: bool) -> None:
    """A tracer that stops a stage is told; py-spy of our own, which does the same for a moment, is not."""
    async with engine.operator() as op:
        await op.until(lambda picture: not picture.verdicts, "nothing is wrong yet")
        names = [] if idle else await loaded(op)
        before = len(await op.heard())
        for _ in range(3):
            assert (await asyncio.to_thread(engine.cli, "stacks")).code == 0
        assert not [event for event in (await op.heard())[before:] if event.kind == "verdict.raised"]
        since = time.time()
        tracer = Tracer(engine.pids["stage1"])
        try:
            root = await named(op, since, 1, "stopped", HANG_S)
        finally:
            tracer.detach()
        assert f"(pid {os.getpid()}), state t" in root.summary
        assert f"pid {engine.pids['stage1']}: process state t" in root.evidence[0]
        await quiet(op, names)


async def test_a_main_loop_that_hangs_while_idle_is_named_before_any_request(
    engine: Served, injector: Injector
) -> None:
    async with engine.operator() as op:
        await op.until(lambda picture: not picture.verdicts, "nothing is wrong yet")
        since = time.time()
        injector.tell(engine.pids["stage1"], "pause_in_python", HELD_S)
        root = await named(op, since, 1, "self_stuck", HANG_S)
        assert "while idle" in root.summary
        injector.release(engine.pids["stage1"])
        await quiet(op, [])


async def test_a_change_of_memory_that_hangs_beside_the_steps_is_named_and_holds_nobody_up(
    engine: Served, injector: Injector
) -> None:
    async with engine.operator() as op:
        picture = await op.until(lambda picture: not picture.verdicts, "nothing is wrong yet")
        names = await loaded(op)
        injector.tell(engine.pids["stage1"], "map_beside", HELD_S)
        since = time.time()
        begun = await op.begin(SetMemory(utilization=picture.engine.memory_utilization / 2))
        root = await named(op, since, 1, "self_stuck", HANG_S)
        assert "stuck in map" in root.summary and "in a thread of its own" in root.summary
        written = (await op.now()).requests[0].output_tokens
        await op.request(names[0], lambda request: request.output_tokens > written + 3, "goes on")
        assert not begun.end.done()
        injector.release(engine.pids["stage1"])
        await begun.applied()
        await quiet(op, names)


async def test_receives_that_are_not_posted(engine: Served, injector: Injector) -> None:
    async with engine.operator() as op:
        names = await loaded(op)
        since = time.time()
        injector.tell(engine.pids["stage1"], "forget_to_receive", HELD_S)
        await named(op, since, 1, "self_stuck", HANG_S)
        injector.release(engine.pids["stage1"])
        await quiet(op, names)


@pytest.mark.parametrize(
    ("word", "stage", "cause", "limit"),
    [
        ("skip_a_send", 1, "mismatch", HANG_S), ("send_less", 0, "mismatch", HANG_S),
        ("lose_on_the_wire", 1, "link", HANG_S), ("lose_a_step", 2, "link", HANG_S),
        ("lose_an_answer", 0, "link", HANG_S), ("raise_an_error", 1, "crashed", DEATH_S),
        ("run_out_of_memory", 2, "out_of_memory", DEATH_S), ("abort", 0, "crashed", DEATH_S),
    ],
)  # fmt: skip
async def test_what_breaks_for_good(
    engine: Served, injector: Injector, word: str, stage: int, cause: str, limit: float
) -> None:
    async with engine.operator() as op:
        await loaded(op)
        since = time.time()
        injector.tell(engine.pids[f"stage{stage}"], word, 60.0)
        await named(op, since, stage, cause, limit)
        await op.repair(stage)


@pytest.mark.parametrize(
    ("number", "load", "cause"),
    [(signal.SIGSEGV, True, "crashed"), (signal.SIGSEGV, False, "crashed"), (signal.SIGKILL, True, "dead")],
)
async def test_what_kills(engine: Served, number: signal.Signals, load: bool, cause: str) -> None:
    async with engine.operator() as op:
        if load:
            await loaded(op)
        since = time.time()
        os.kill(engine.pids["stage1"], number)
        root = await named(op, since, 1, cause, DEATH_S)
        if number == signal.SIGKILL:
            await op.until(lambda p: "no cgroup OOM" in str(p.verdicts), "it was not the out-of-memory killer")
        assert root.root
        await op.repair(1)


async def test_the_out_of_memory_killer_is_told_from_a_kill(engine: Served, injector: Injector) -> None:
    pid = engine.pids["stage1"]
    async with engine.operator() as op:
        await loaded(op)
        with moved(pid, "memory", memory=256 << 20) as folder:
            await op.looked_at(1)  # The new cgroup's counts are known before they change.
            injector.tell(pid, "eat_memory")
            picture = await op.until(lambda p: any(v.cause == "killed_oom" for v in p.verdicts), "killed for memory")
            root = the_root(picture)
            assert root is not None
            assert root.stage == 1
            # The supervisor counts before it reports the end, the agent at its next look: the first one is said.
            counted = [fact for fact in root.evidence if "out-of-memory killer" in fact or "oom_kill +1" in fact]
            assert counted and "no cgroup OOM" not in root.evidence
            assert folder.is_dir()
        await op.repair(1)


async def test_a_quota_makes_a_straggler_and_is_its_evidence(engine: Served) -> None:
    async with engine.operator() as op:
        names = await loaded(op, 8)
        await op.written(names[0], 300)  # What a step takes here is learned.
        since = time.time()
        with moved(engine.pids["stage1"], "cpu", cpu=3):
            picture = await op.until(lambda p: the_root(p) is not None, "a straggler", 40)
            root = the_root(picture)
            assert root is not None
            print(f"straggler named after {time.time() - since:.1f} s: {root.summary}, {root.evidence}")
            assert (root.stage, root.cause) == (1, "straggler")
            assert any("cpu quota" in fact and "% of the time" in fact for fact in root.evidence)
        await quiet(op, names)


def test_stacks_are_grouped_and_say_how_they_were_taken(engine: Served) -> None:
    def grouped() -> Ran | None:
        """Return the stacks once all control threads wait at the same line, as they do nearly always."""
        ran = engine.cli("stacks")
        assert ran.code == 0
        return ran if "stages 0, 1, 2: control" in ran.out.splitlines() else None

    ran = wait_until(grouped, "one group has the control threads of all stages")
    assert re.fullmatch(r"pids: stage 0 \d+, stage 1 \d+, stage 2 \d+, core \d+", ran.out.splitlines()[0])
    assert "core: MainThread" in ran.out
    only = engine.cli("stacks", "--stage", "1")
    assert only.code == 0 and "core" not in only.out.splitlines()[0]
    assert engine.cli("stacks", "--stage", "1", "--core").code == 2
    detail = engine.cli("stacks", "--json").json
    assert detail["ability"]
    assert {thread["name"] for thread in detail["stages"][1]["threads"]} >= {"MainThread", "control"}
    found = engine.cli("doctor", "--json").json
    assert [finding["text"] for finding in found if finding["what"] == "stacks"] == [
        f"{engine.config.id}: {detail['ability']}"
    ]


def test_a_stopped_gateway_is_explained_by_its_host(engine: Served) -> None:
    """No console can attach; the processes, the rings and their reader in the engine's Python are there."""
    with engine.stopped("gateway"):
        ran = engine.cli("explain")
        assert ran.code == 10, ran.err
        assert f"the gateway (pid {engine.pids['gateway']}) is stopped by a signal (state T)" in ran.out
        assert all(f"stage {stage}: in " in ran.out for stage in range(STAGES)), ran.out
        found = engine.cli("explain", "--json").json
        roles = [(process["role"], process["stage"]) for process in found["processes"]]
        assert roles.count(("core", None)) == 1 and [stage for role, stage in roles if role == "stage"] == [0, 1, 2]
        ran = engine.cli("doctor")
        assert ran.code == 1 and "is stopped by a signal (state T); not attached within" in ran.out
    assert engine.cli("explain").code == 0
