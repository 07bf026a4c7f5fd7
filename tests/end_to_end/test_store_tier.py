"""Chunks in files: an engine that was restarted loads them, with the tokens that it would compute."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from operators import BACK_S, Operator
from ppengine.common.config import Profile
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.tiers import TiersInfo
from serving import Served

from profiles import small

pytestmark = pytest.mark.long
STEPS, CHUNK = 12, 256
PROMPTS = reference.prompts(2, 100, low=2 * CHUNK + 40, high=2 * CHUNK + 60, seed=5)
FIRST = reference.prompts(1, 100, low=CHUNK + 40, high=CHUNK + 60, seed=6)[0]
"""A prompt of one chunk."""
HITS = 2 * CHUNK
"""Tokens of each prompt that backends have."""


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "stores", "llama", dtype="float64", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return [reference.greedy(folder, prompt, STEPS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


def profile(folder: Path, files: Path, **memory: int) -> Profile:
    # Fetches are never declined in time: what they cost is not what these tests are about.
    tiers = {
        "host": True, "find_ms": 30_000, "fetch_ms": 60_000,
        "backends": {"disk": {"kind": "files", "url": str(files), "quota_gib": 1.0, "write": "always"}},
    }  # fmt: skip
    memory = {"device_mib": 8, "swap_space_gib": 0.05, **memory}
    # Steps are short and slow, so that computing is predicted to take longer than a fetch.
    scheduler = {"max_num_batched_tokens": 64}
    return small(folder, memory=memory, model={"max_model_len": 1024}, tiers=tiers, scheduler=scheduler)


@pytest.fixture(scope="module")
def engine(folder: Path, files: Path) -> Iterator[Served]:
    with Served(profile(folder, files), step_s=0.01) as served:
        yield served


async def tiers(op: Operator, condition: Callable[[TiersInfo], object], what: str) -> TiersInfo:
    """Wait until the tiers are as wanted."""
    picture = await op.until(lambda now: now.tiers is not None and condition(now.tiers), what, BACK_S)
    assert picture.tiers is not None
    return picture.tiers


async def ready(op: Operator) -> TiersInfo:
    """Wait until chunks can be read and written."""
    return await tiers(op, lambda now: now.ready and now.backends[0].state == "open", "stores and files are there")


async def measured(op: Operator, prompt: list[int] = FIRST) -> None:
    """Compute a prompt whose chunk is there: files are read beside it, and both times are known then."""
    await ready(op)
    await op.tokens(await op.submit(prompt, max_tokens=1))
    now = await tiers(op, lambda now: now.backends[0].read_bytes_total, "files were read")
    assert not now.backends[0].hit_tokens_total, "no request has waited for files whose rate is not known"


async def written(op: Operator) -> None:
    """Wait until chunks are written and the stores are idle."""
    await tiers(
        op,
        lambda now: now.backends[0].state == "open" and not any(store.jobs for store in now.stores)
        and now.backends[0].written_bytes_total > 0,
        "the chunks are written",
    )  # fmt: skip


async def kept(op: Operator, files: Path, chunks: int) -> None:
    """Wait until `chunks` chunks have their markers."""
    await op.until(lambda _: len(list(files.glob("marker/*/*"))) >= chunks, f"{chunks} chunks are kept", BACK_S)


def hits(picture: Snapshot) -> int:
    """Return the tokens that starts loaded from the files."""
    return 0 if picture.tiers is None else sum(one.hit_tokens_total for one in picture.tiers.backends)


async def test_a_restarted_engine_loads_chunks_from_files(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        await ready(op)
        await op.tokens(await op.submit(FIRST, max_tokens=1))
        assert await op.all_tokens(await op.submit_all(PROMPTS, max_tokens=STEPS)) == expected
        await written(op)
    engine.restart()
    async with engine.operator() as op:
        await measured(op)
        names = await op.submit_all(PROMPTS, max_tokens=STEPS)
        assert await op.all_tokens(names) == expected
        for name in names:
            sources = (await op.detail(name)).sources
            assert sources is not None
            assert sources.backends == {"disk": HITS}
        assert hits(await op.now()) == 2 * HITS


async def test_a_store_is_killed_while_it_loads(engine: Served, expected: list[list[int]]) -> None:
    for stage in (0, 1, 0):
        engine.restart()
        async with engine.operator() as op:
            await measured(op)
            os.kill(engine.pids[f"store{stage}"], signal.SIGSTOP)
            names = await op.submit_all(PROMPTS, max_tokens=STEPS)
            await tiers(op, lambda now: now.finding + now.fetching, "requests wait for a store")
            os.kill(engine.pids[f"store{stage}"], signal.SIGKILL)
            assert await op.all_tokens(names) == expected
            now = await ready(op)
            assert not now.finding and not now.fetching and not now.slots_quarantined
        engine.find_pids()


async def test_a_stage_is_killed_while_its_slots_are_filled(engine: Served, expected: list[list[int]]) -> None:
    engine.restart()
    async with engine.operator() as op:
        await measured(op)
        os.kill(engine.pids["store1"], signal.SIGSTOP)
        names = await op.submit_all(PROMPTS, max_tokens=STEPS)
        await tiers(op, lambda now: now.fetching, "a request is fetching")
        os.kill(engine.pids["stage1"], signal.SIGKILL)
        assert await op.all_tokens(names) == expected
        await tiers(op, lambda now: now.slots_quarantined, "its store may still write")
        os.kill(engine.pids["store1"], signal.SIGCONT)
        await tiers(op, lambda now: not now.slots_moving and not any(one.jobs for one in now.stores), "it has answered")
    engine.find_pids()


async def test_flipped_bytes_are_never_loaded(engine: Served, files: Path, expected: list[list[int]]) -> None:
    engine.restart()
    shards = [path for path in files.rglob("*") if path.is_file() and path.stat().st_size > 100_000]
    assert len(shards) == 2 * (2 * len(PROMPTS) + 1)
    async with engine.operator() as op:
        await measured(op)
    for number, path in enumerate(sorted(shards)):
        with path.open("r+b") as file:
            file.seek(1000 + 7919 * number)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))
    async with engine.operator() as op:
        assert await op.all_tokens(await op.submit_all(PROMPTS, max_tokens=STEPS)) == expected
        now = await tiers(op, lambda now: now.backends[0].corrupt_total, "the flips are counted")
        assert now.backends[0].hit_tokens_total == 0
        assert now.failed_fetches_total == len(PROMPTS)
        assert any(event.kind == "store.corrupt" for event in await op.heard())


async def test_chunks_of_another_block_size_are_never_found(
    engine: Served, folder: Path, files: Path, expected: list[list[int]]
) -> None:
    async with engine.operator() as op:
        await ready(op)
        await op.all_tokens(await op.submit_all(PROMPTS, max_tokens=1))
        await kept(op, files, 2 * len(PROMPTS))
    with Served(profile(folder, files, block_size=32)) as other:
        async with other.operator() as op:
            await ready(op)
            names = await op.submit_all(PROMPTS, max_tokens=STEPS)
            assert await op.all_tokens(names) == expected
            for name in names:
                assert "no chunk is there" in " ".join((await op.detail(name)).history), "they were looked for"
            assert hits(await op.now()) == 0


async def test_each_of_two_engines_loads_what_the_other_one_has_written(
    folder: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    starts = [FIRST, reference.prompts(1, 100, low=len(FIRST), high=len(FIRST), seed=8)[0]]
    others = reference.prompts(2, 100, low=HITS + 40, high=HITS + 60, seed=7)
    answers = [reference.greedy(folder, prompt, STEPS) for prompt in others]
    ours = profile(folder, tmp_path)

    async def loads(op: Operator, prompts: list[list[int]], tokens: list[list[int]]) -> None:
        # One by one: with others in front, a fetch may be predicted to take longer than computing.
        for prompt, answer in zip(prompts, tokens, strict=True):
            name = await op.submit(prompt, max_tokens=STEPS)
            assert await op.tokens(name) == answer
            assert (sources := (await op.detail(name)).sources) is not None
            assert sources.backends == {"disk": HITS}

    with Served(ours, step_s=0.01) as first, Served(ours, step_s=0.01) as second:
        async with first.operator() as one, second.operator() as two:
            for number, (op, prompt) in enumerate(zip((one, two), starts, strict=True), 1):
                await ready(op)
                await op.tokens(await op.submit(prompt, max_tokens=1))
                await kept(op, tmp_path, number)
            await measured(one, starts[1])
            await measured(two, starts[0])
            assert await one.all_tokens(await one.submit_all(PROMPTS, max_tokens=STEPS)) == expected
            await kept(one, tmp_path, 2 + 2 * len(PROMPTS))
            await loads(two, PROMPTS, expected)
            assert await two.all_tokens(await two.submit_all(others, max_tokens=STEPS)) == answers
            await kept(two, tmp_path, 2 + 2 * len(PROMPTS) + 2 * len(others))
            await loads(one, others, answers)
        second.restart()
        async with second.operator() as two:
            await measured(two)
            await loads(two, [*PROMPTS, *others], [*expected, *answers])
