"""Prompts whose prefix has left the device come from the host cache, with the same tokens; swaps and a killed stage.

Prompts that begin alike and come together compute or load their prefix once, also beside an abort or a killed stage.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from operators import BACK_S, Operator
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import Abort, Release, Resume, SwapOut
from serving import Served

from profiles import small

pytestmark = pytest.mark.long
STEPS, BLOCK, HOST_BLOCKS = 100, 16, 2000
PROMPTS = reference.prompts(3, 100, low=100, high=120, seed=3)
LOADED = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
"""Tokens that the host can have: whole blocks, and one token is left to compute."""
TOGETHER, BUDGET, OUTPUTS = 8, 128, 16
COMMON = 480
"""Tokens of a common prefix: more than the two steps that can be in flight have."""


def family(seed: int) -> list[list[int]]:
    """Return four prompts with a common prefix that no other seed has."""
    (prefix,) = reference.prompts(1, 100, low=COMMON, high=COMMON, seed=seed)
    return [prefix + rest for rest in reference.prompts(4, 100, low=12, high=20, seed=seed)]


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "tiers", "llama", dtype="float64", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    block_bytes = 2 * 2 * BLOCK * 2 * 16 * 8
    memory = {"device_mib": 8, "swap_space_gib": HOST_BLOCKS * block_bytes / 2**30}
    # Two blocks in a step: a load takes some steps, and can be stopped on its way.
    tiers = {"host": True, "in_mib": 2 * block_bytes / 2**20}
    sections = {"model": {"max_model_len": 1024}, "scheduler": {"max_num_batched_tokens": BUDGET}}
    with Served(small(folder, memory=memory, tiers=tiers, console={"publish_hz": 50.0}, **sections)) as served:
        yield served


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return [reference.greedy(folder, prompt, STEPS) for prompt in PROMPTS]


async def copied(op: Operator) -> Snapshot:
    """Wait until the engine is idle and all blocks are on the host."""
    seen = -1

    def rests(now: Snapshot) -> bool:
        nonlocal seen
        before, seen = seen, now.tiers.out_bytes_total if now.tiers else -1
        return now.tiers is not None and seen == before and not now.requests_total and not now.tiers.slots_moving

    return await op.until(rests, "nothing is left to copy")


async def on_the_host_alone(op: Operator, seed: int) -> None:
    """Compute `PROMPTS`, then as many others as the device holds: it has no block of the first any more."""
    await op.all_tokens(await op.submit_all(PROMPTS, max_tokens=1))
    picture = await copied(op)
    mapped = picture.stages[0].kv_blocks.mapped
    assert mapped is not None
    count = mapped * BLOCK // 190 + 8  # Their last blocks are not full, and not kept.
    await op.all_tokens(await op.submit_all(reference.prompts(count, 100, low=200, high=200, seed=seed), max_tokens=1))
    picture = await copied(op)
    assert picture.tiers is not None
    assert picture.tiers.evicted_total == 0, "the host has room for all of this"


async def test_an_evicted_prefix_comes_from_the_host(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        await on_the_host_alone(op, seed=1)
        before = (await op.now()).tiers
        names = await op.submit_all(PROMPTS, max_tokens=STEPS)
        assert await op.all_tokens(names) == expected
        for name, prompt, loaded in zip(names, PROMPTS, LOADED, strict=True):
            sources = (await op.detail(name)).sources
            assert sources is not None
            assert (sources.device, sources.host, sources.computed) == (0, loaded, len(prompt) - loaded)
        after = (await op.idle()).tiers
        assert before is not None
        assert after is not None
        assert after.host_hit_tokens_total - before.host_hit_tokens_total == sum(LOADED)
        assert after.in_bytes_total - before.in_bytes_total == sum(LOADED) // BLOCK * after.slot_bytes


async def test_prompts_that_come_together_load_their_prefix_once(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        await on_the_host_alone(op, seed=6)
        before = (await op.pause()).tiers
        names = await op.submit_all([PROMPTS[0]] * TOGETHER, max_tokens=STEPS)
        await op.do(Resume())
        assert await op.all_tokens(names) == [expected[0]] * TOGETHER
        after = (await op.idle()).tiers
        assert before is not None
        assert after is not None
        assert after.in_bytes_total - before.in_bytes_total == LOADED[0] // BLOCK * after.slot_bytes
        assert after.host_hit_tokens_total - before.host_hit_tokens_total == TOGETHER * LOADED[0]


async def prefilling(op: Operator, name: str) -> None:
    """Wait until a stopped stage holds all steps that can be in flight, all of one prompt."""
    held = await op.request(name, lambda request: len(request.in_flight) == 2, "has two steps in flight")
    assert (held.computed_tokens, held.output_tokens) == (2 * BUDGET, 0)


async def test_an_abort_amid_the_prefill_of_a_common_prefix(engine: Served, folder: Path) -> None:
    prompts = family(4)
    async with engine.operator() as op:
        async with op.crowd(prompts, max_tokens=OUTPUTS) as names:
            await prefilling(op, names[0])
            aborted = await op.begin(Abort(request=names[0]))
        await aborted.applied()
        tokens, _, reason = await op.output(names[0])
        assert (tokens, reason) == ([], "abort")
        for name, prompt in zip(names[1:], prompts[1:], strict=True):
            assert await op.tokens(name) == reference.greedy(folder, prompt, OUTPUTS)
        sources = [(await op.detail(name)).sources for name in names[1:]]
        assert [found.device for found in sources if found] == [2 * BUDGET, COMMON, COMMON]
        await op.idle()


async def test_a_swap_beside_it(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        (swapped,) = await op.halfway(PROMPTS[:1], max_tokens=STEPS)
        await op.do(SwapOut(request=swapped))
        await op.do(Resume())
        picture = await op.request(swapped, lambda request: request.state == "held", "is held")
        assert picture.swap_blocks
        others = await op.submit_all(PROMPTS[1:], max_tokens=STEPS)
        assert await op.all_tokens(others) == expected[1:]
        await op.do(Release(request=swapped))
        assert await op.tokens(swapped) == expected[0]
        await op.idle()


async def test_a_stage_is_killed_while_a_request_loads(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        await on_the_host_alone(op, seed=2)
        with engine.stopped("stage1"):
            name = await op.submit(PROMPTS[0], max_tokens=STEPS)
            request = await op.request(name, lambda request: request.state == "loading", "loads")
            assert request.why is not None
            assert request.why.code == "loading"
            os.kill(engine.pids["stage1"], signal.SIGKILL)
        assert (await op.output(name, timeout=BACK_S))[0] == expected[0]
        sources = (await op.detail(name)).sources
        assert sources is not None
        assert (sources.host, sources.computed) == (0, len(PROMPTS[0])), "the slots were forgotten"
        await op.until(lambda now: now.engine.state == "serving" and not now.verdicts, "nothing is wrong", BACK_S)
        engine.find_pids()
        await op.idle()


async def test_a_stage_is_killed_amid_the_prefill_of_a_common_prefix(engine: Served, folder: Path) -> None:
    prompts = family(5)
    async with engine.operator() as op:
        async with op.crowd(prompts, max_tokens=OUTPUTS) as names:
            await prefilling(op, names[0])
            os.kill(engine.pids["stage1"], signal.SIGKILL)
        for name, prompt in zip(names, prompts, strict=True):
            assert (await op.output(name, timeout=BACK_S))[0] == reference.greedy(folder, prompt, OUTPUTS)
        sources = [(await op.detail(name)).sources for name in names]
        assert [found.device for found in sources if found] == [0, COMMON, COMMON, COMMON]
        await op.until(lambda now: now.engine.state == "serving" and not now.verdicts, "nothing is wrong", BACK_S)
        engine.find_pids()
        await op.idle()
