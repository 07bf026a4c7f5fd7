"""Memory utilization changed under running requests: the plan is what happens, memory goes back, no token is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import reference
from checkpoints import make_checkpoint
from operators import CATCHES, Operator
from pilots import Rig, console
from ppengine.protocol.control import Outcome
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import Pause, Resume, SetMemory
from serving import Served

from profiles import small

FULL, HALF = 0.9, 0.45
REQUESTS, STEPS = 16, 40
RELEASED_S = 2.0


class Case(NamedTuple):
    """An engine whose pool 16 requests fill to nine tenths and more, and what they write undisturbed."""

    engine: Served
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def case(checkpoint_root: Path) -> Iterator[Case]:
    folder = make_checkpoint(checkpoint_root / "long", "llama", dtype="float64", layers=4, max_position_embeddings=1024)
    memory = {"device_mib": 8, "utilization": FULL, "swap_space_gib": 0.002}
    profile = small(folder, model={"max_model_len": 1024}, memory=memory, console={"publish_hz": 50.0})
    with Served(profile) as engine:
        length = asyncio.run(longest(engine))
        prompts = reference.prompts(REQUESTS, 100, low=length, high=length)
        yield Case(engine, prompts, asyncio.run(undisturbed(engine, prompts)))


async def longest(engine: Served) -> int:
    """Return the length of sixteen prompts that fill the pool, however much room the profile run has left for it."""
    async with engine.operator() as op:
        await op.until(lambda picture: picture.stages[0].kv_blocks.mapped, "the blocks are told")
        return mapped(op.picture) * 96 // 100 // REQUESTS * 16 - STEPS


async def undisturbed(engine: Served, prompts: list[list[int]]) -> list[list[int]]:
    async with engine.operator() as op:
        tokens = await op.all_tokens(await op.submit_all(prompts, max_tokens=STEPS))
        await op.idle()
        return tokens


def filled(picture: Snapshot) -> bool:
    blocks = picture.stages[0].kv_blocks
    assert blocks.used is not None
    assert blocks.mapped is not None
    everyone = picture.queues.running == REQUESTS and all(request.output_tokens for request in picture.requests)
    return everyone and blocks.used >= 0.9 * blocks.mapped


async def fill(op: Operator, case: Case) -> tuple[list[str], Snapshot]:
    """Return the sixteen when they hold at least nine tenths of the blocks; the engine is paused and keeps them there.

    They are queued again when one was through before the engine could be paused.
    """
    for _ in range(CATCHES):
        # With their prompts in the prefix cache, all begin at once and end together.
        await op.all_tokens(await op.submit_all(case.prompts, max_tokens=1))
        await op.do(Pause(mode="keep"))
        names = await op.submit_all(case.prompts, max_tokens=STEPS)
        picture = await op.step()
        while picture.requests_total == REQUESTS:
            if filled(picture):
                return names, picture
            picture = await op.step()
        await op.do(Resume())
        await op.all_tokens(names)
    raise AssertionError(f"{CATCHES} times, sixteen requests were never seen to fill the pool")


@contextlib.asynccontextmanager
async def in_flight(op: Operator, case: Case) -> AsyncIterator[None]:
    """Let a paused engine go on as far as a stopped stage lets it: steps of its requests are in flight."""
    with case.engine.stopped("stage1"):
        await op.do(Resume())
        await op.until(lambda picture: any(request.in_flight for request in picture.requests), "steps are in flight")
        yield


def mapped(picture: Snapshot) -> int:
    (count,) = {stage.kv_blocks.mapped for stage in picture.stages}
    assert count is not None
    return count


async def settled(op: Operator, blocks: int) -> Snapshot:
    return await op.until(lambda picture: mapped(picture) == blocks, f"{blocks} blocks are mapped")


def test_undisturbed_run_is_transformers(case: Case, checkpoint_root: Path) -> None:
    tokens = case.tokens[0]
    assert tokens == reference.greedy(checkpoint_root / "long", case.prompts[0], STEPS, draft=tokens)


async def test_halving_from_the_console_does_what_the_plan_says(case: Case) -> None:
    engine = case.engine
    async with console(engine, slow=True) as rig:
        op = rig.op
        names, full = await fill(op, case)
        before = mapped(full)
        async with in_flight(op, case):
            plan = await planned(rig)
            after = int(plan.figures["blocks_after"])
            ranges = [engine.kv_range(stage) for stage in range(2)]
            surrendered, rss = [part.resident_from(after) for part in ranges], [part.rss() for part in ranges]
            assert min(surrendered) >= 0.8 * (before - after) * ranges[0].block_bytes, "most of it was in use"
            await rig.pilot.press("right", "enter")
            await rig.until(lambda: "deferred" in rig.board("dialog-body"), "it waits for the steps in flight")
        await rig.until(lambda: rig.outcomes, "the end of it")
        done = rig.outcomes[-1]
        (applied,) = [event for event in await op.heard() if event.op == done.op and event.kind == "op.applied"]
        while any(part.rss() > old - 0.8 * gone for part, old, gone in zip(ranges, rss, surrendered, strict=True)):
            assert time.time() < applied.wall + RELEASED_S, "Rss falls within 2 s of `applied`"
        assert [part.resident_from(after) for part in ranges] == [0, 0]

        assert done.figures == {name: plan.figures[name] for name in done.figures}
        assert {"blocks_before", "blocks_after", "move", "swap", "swap_requests", "recompute"} <= set(done.figures)
        assert any(f"{before} > {after} blocks, moved " in note for note in rig.notes), rig.notes
        picture = await settled(op, after)
        assert (picture.engine.memory_utilization, picture.engine.memory_revision) == (HALF, done.revision)
        victims = plan.figures["swap_requests"] + plan.figures["recompute_requests"]
        assert picture.preemptions_total - full.preemptions_total >= victims
        assert await op.all_tokens(names) == case.tokens
        await op.idle()
        await grows_again(op, case, before, after)


async def planned(rig: Rig) -> Outcome:
    """Ask for half of the memory by the console's keys; return the plan that its dialog shows."""
    await rig.pilot.press("m", *str(HALF))
    await rig.until(lambda: "recompute" in rig.board("memory-plan"), "the plan while typing")
    plan = (await rig.ask("enter"))._answer
    assert isinstance(plan, Outcome)
    shown = rig.board("dialog-body")
    for line in plan.plan:
        assert line in shown
    for name, count in plan.figures.items():
        assert f"{count:g}" in shown or not count, name
    assert plan.figures["move"] > 0
    assert plan.figures["swap_requests"] > 0, "the host pool has room for some"
    assert plan.figures["recompute_requests"] > 0, "and not for all"
    return plan


async def grows_again(op: Operator, case: Case, before: int, after: int) -> None:
    """Give the memory back by the command line: requests use what came back."""
    restored = (await op.cli("set-memory", str(FULL), "--json")).json
    assert (restored["state"], restored["figures"]["blocks_after"]) == ("applied", before)
    await settled(op, before)
    names, picture = await fill(op, case)
    used = picture.stages[0].kv_blocks.used
    assert used is not None
    assert used > after
    assert all(case.engine.kv_range(stage).resident_from(after) > 0 for stage in range(2))
    await op.do(Resume())
    assert await op.all_tokens(names) == case.tokens
    await op.idle()


async def test_opposite_change_supersedes(case: Case) -> None:
    async with case.engine.operator() as op:
        names, full = await fill(op, case)
        async with in_flight(op, case):
            # Steps that are in flight keep their blocks: the shrink cannot end before the stage goes on.
            first = await op.begin(SetMemory(utilization=HALF))
            await op.until(lambda picture: picture.engine.state == "resizing", "the shrink is under way")
            second = await op.begin(SetMemory(utilization=FULL))
            end = await first.superseded()
            assert f"utilization {FULL:g}" in end.text
        end = await second.applied()
        assert end.figures["blocks_after"] == mapped(full)
        picture = await op.until(lambda picture: picture.engine.state == "serving", "it serves")
        assert mapped(picture) == mapped(full)
        assert picture.engine.memory_utilization == FULL
        assert await op.all_tokens(names) == case.tokens
        await op.idle()


async def test_open_confirm_conflicts_with_another_change(case: Case) -> None:
    engine = case.engine
    async with engine.operator("alice") as alice, engine.operator("eve") as eve:
        seen = await alice.do(SetMemory(utilization=0.5), dry_run=True)
        changed = await eve.do(SetMemory(utilization=0.6))
        text = await alice.refused(SetMemory(utilization=0.5), "CONFLICT", if_rev=seen.revision)
        assert f"revision {changed.revision} (utilization 0.6)" in text
        assert f"you saw {seen.revision}" in text
        refused = await alice.cli("set-memory", "0.5", "--if-rev", str(seen.revision))
        assert refused.code == 6
        assert text in refused.error
        restored = await eve.do(SetMemory(utilization=FULL))
        await settled(eve, int(restored.figures["blocks_after"]))


async def test_random_resizes_under_load(case: Case) -> None:
    source = random.Random(7)
    async with case.engine.operator() as op:
        before = mapped(op.picture)
        names, _ = await fill(op, case)
        await op.do(Resume())
        victims, changes = 0.0, 0
        while changes < 20 or (victims <= REQUESTS and changes < 200):
            changes += 1
            if (await op.now()).requests_total < REQUESTS // 2:
                names += await op.submit_all(case.prompts, max_tokens=STEPS)
            end = await op.do(SetMemory(utilization=source.uniform(0.4, 1.0)))
            picture = await settled(op, int(end.figures["blocks_after"]))
            blocks = picture.stages[0].kv_blocks
            assert None not in (blocks.used, blocks.cached, blocks.free)
            assert blocks.used + blocks.cached + blocks.free == mapped(picture) - 1  # type: ignore[operator]
            victims += end.figures["swap_requests"] + end.figures["recompute_requests"]
        assert victims > REQUESTS, "it was changed under load"
        assert await op.all_tokens(names) == case.tokens * (len(names) // REQUESTS)
        await op.do(SetMemory(utilization=FULL))
        await settled(op, before)
        await op.idle()


async def test_pause_keeps_a_full_pool(case: Case) -> None:
    """Growing needs no step of a request: it is applied while the engine is paused."""
    async with case.engine.operator() as op:
        names, full = await fill(op, case)
        grown = await op.do(SetMemory(utilization=1.0))
        assert grown.figures["blocks_after"] > mapped(full)
        assert not grown.figures["swap_requests"]
        await op.do(Resume())
        assert await op.all_tokens(names) == case.tokens
        await op.do(SetMemory(utilization=FULL))
        await settled(op, mapped(full))
        await op.idle()
