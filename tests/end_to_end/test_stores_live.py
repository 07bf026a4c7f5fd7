"""Backends that are added, paused, drained, cleared and removed, and a core and stores that die, while requests run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import rclone_server
import reference
from checkpoints import make_checkpoint
from operators import BACK_S, Operator, core_time
from ppengine.common.config import Profile
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.store_verbs import (
    StoreAdd,
    StoreClear,
    StoreDrain,
    StorePause,
    StoreRemove,
    StoreResume,
    StoreTest,
)
from ppengine.protocol.tiers import BackendInfo, TiersInfo
from serving import Served
from valkey_server import WHY_SKIPPED, Server, server_binary

from profiles import small

pytestmark = pytest.mark.long
STEPS, CHUNK, AT_ONCE = 8, 256, 3
PROMPTS = reference.prompts(14, 100, low=2 * CHUNK + 10, high=2 * CHUNK + 30, seed=9)
"""Some 460 blocks: device and host have 302 together, so that each turn of all prompts reads backends."""


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "live", "llama", dtype="float64", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return [reference.greedy(folder, prompt, STEPS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live-chunks")


def profile(
    folder: Path, files: Path, *, dtype: str = "float64", partition: list[int] | None = None, name: str = "test"
) -> Profile:
    """Return an engine whose device and host keep a part of the prompts, so that backends are read all the time."""
    tiers = {
        "host": True, "find_ms": 10_000, "fetch_ms": 20_000,
        "backends": {"disk": {"kind": "files", "url": str(files), "quota_gib": 1.0, "write": "always"}},
    }  # fmt: skip
    return small(
        folder, name=name, tiers=tiers, parallel={"partition": partition},
        model={"max_model_len": 1024, "dtype": dtype}, memory={"device_mib": 2, "swap_space_gib": 0.0009},
        # Steps are short and slow, so that computing is predicted to take longer than a fetch.
        scheduler={"max_num_batched_tokens": 64},
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(folder: Path, files: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", rclone_server.KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", rclone_server.SECRET)
        with Served(profile(folder, files), step_s=0.002) as served:
            yield served


class Load:
    """Prompts in turn, some at once, each judged when it ends."""

    def __init__(self, op: Operator, expected: list[list[int]]) -> None:
        self.ended = 0
        self._op, self._expected, self._next = op, expected, 0

    async def run(self) -> None:
        """Submit until cancelled. Raises AssertionError for a wrong token and for a request that failed."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            number, self._next = self._next % len(PROMPTS), self._next + 1
            tokens = await self._op.tokens(await self._op.submit(PROMPTS[number], max_tokens=STEPS))
            assert tokens == self._expected[number]
            self.ended += 1

    async def go_on(self) -> None:
        """Wait until each prompt has ended once more."""
        until = self.ended + len(PROMPTS) + AT_ONCE
        while self.ended < until:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def loaded(engine: Served, expected: list[list[int]]) -> AsyncIterator[tuple[Operator, Load]]:
    """Yield an operator and a load that another one submits; a wrong or failed request fails the test."""
    async with engine.operator() as op, engine.operator() as client:
        await tiers(op, lambda now: now.ready and disk(now).state == "open", "the stores are there")
        load = Load(client, expected)
        running = asyncio.ensure_future(load.run())
        work = asyncio.current_task()
        assert work is not None
        running.add_done_callback(lambda done: None if done.cancelled() else work.cancel())
        try:
            yield op, load
        except asyncio.CancelledError:
            if running.done() and not running.cancelled():
                running.result()
            raise
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        await op.clean(0.9)


async def tiers(op: Operator, condition: Callable[[TiersInfo], object], what: str) -> TiersInfo:
    """Wait until the tiers are as wanted."""
    try:
        picture = await op.until(lambda now: now.tiers is not None and condition(now.tiers), what, BACK_S)
    except AssertionError as error:
        error.add_note(msgspec.json.encode((op.picture.tiers, op.picture.verdicts)).decode())
        raise
    assert picture.tiers is not None
    return picture.tiers


def backend(now: TiersInfo, name: str) -> BackendInfo:
    """Return one backend; fail if it is not there."""
    return next(each for each in now.backends if each.name == name)


def disk(now: TiersInfo) -> BackendInfo:
    return backend(now, "disk")


async def newer_figures(op: Operator) -> None:
    """Wait until all stores have sent figures of what has happened until now."""
    since = (await op.now()).sampled_at

    def sent(picture: Snapshot) -> bool:
        ages = [store.age_ms for store in picture.tiers.stores] if picture.tiers is not None else [None]
        return all(age is not None and core_time(picture) - age / 1e3 > since for age in ages)

    await op.until(sent, "newer figures of all stores", BACK_S)


async def hits_more(op: Operator, name: str = "disk") -> None:
    """Wait until starts have loaded more tokens from a backend."""
    begun = backend((await op.now()).tiers or TiersInfo(), name).hit_tokens_total
    await tiers(op, lambda now: backend(now, name).hit_tokens_total > begun, f"prompts come from {name}")


async def test_verbs_under_load(engine: Served, expected: list[list[int]]) -> None:
    async with loaded(engine, expected) as (op, load):
        await hits_more(op)
        await op.do(StoreAdd(backend="mem", kind="memory", quota_gib=0.1, write="always"))
        await tiers(op, lambda now: backend(now, "mem").written_bytes_total, "the new backend is written")
        await op.do(StoreTest(backend="disk"))
        await op.do(StorePause(backend="disk"))
        await tiers(op, lambda now: disk(now).state == "paused", "files are paused")
        await hits_more(op, "mem")  # Prompts whose chunks were read before have begun, too.
        paused = disk((await op.now()).tiers or TiersInfo())
        await hits_more(op, "mem")
        now = (await op.now()).tiers
        assert now is not None
        assert disk(now).hit_tokens_total == paused.hit_tokens_total, "a paused backend is not read"
        await op.do(StoreResume(backend="disk"))
        await op.do(StoreDrain(backend="mem"))
        engine.find_pids()
        os.kill(engine.pids["store1"], signal.SIGKILL)
        await tiers(op, lambda now: now.ready and disk(now).state == "open", "the store is back")
        said = [event for event in await op.heard() if event.kind.startswith("store")]
        assert [(event.kind, event.stage) for event in said] == [("store1.ended", 1)], "one line says all"
        assert f"(pid {engine.pids['store1']}) has ended, killed by SIGKILL; " in said[0].text
        await newer_figures(op)
        written = backend((await op.now()).tiers or TiersInfo(), "mem").written_bytes_total
        await load.go_on()
        await newer_figures(op)
        assert backend((await op.now()).tiers or TiersInfo(), "mem").written_bytes_total == written
        await op.do(StoreClear(backend="disk"))
        await hits_more(op)
        await op.do(StoreRemove(backend="mem"))
        await tiers(op, lambda now: [each.name for each in now.backends] == ["disk"], "one backend is left")
        await load.go_on()
        listed = await op.cli("store", "ls")
        assert listed.code == 0 and "disk" in listed.out and "mem" not in listed.out
    engine.find_pids()
    lines = [json.loads(line) for line in (engine.engine.run_dir / "audit.jsonl").read_text().splitlines()]
    ends = [line["verb"] for line in lines if line["outcome"] == "applied" and line["verb"].startswith("store-")]
    verbs = ["add", "test", "pause", "resume", "drain", "clear", "remove"]
    assert ends == [f"store-{verb}" for verb in verbs]


async def test_a_core_is_killed_while_stores_read_and_write(engine: Served, expected: list[list[int]]) -> None:
    async with loaded(engine, expected) as (op, load):
        await hits_more(op)
        os.kill(engine.pids["core"], signal.SIGKILL)
        await load.go_on()
        await tiers(op, lambda now: now.ready and disk(now).state == "open", "the stores have met the next core")
        await hits_more(op)
        await op.do(StorePause(backend="disk"))
        engine.find_pids()
        os.kill(engine.pids["core"], signal.SIGKILL)
        await load.go_on()
        await tiers(op, lambda now: now.ready and disk(now).state == "paused", "the pause outlives the core")
        await op.do(StoreResume(backend="disk"))
        await hits_more(op)
    async with engine.operator() as op:
        await tiers(op, lambda now: not now.slots_moving and not now.slots_quarantined, "no slot is left")
    engine.find_pids()


async def test_slots_rest_until_a_stopped_store_has_met_the_next_core(
    engine: Served, expected: list[list[int]]
) -> None:
    engine.find_pids()
    async with loaded(engine, expected) as (op, load):
        await op.do(StoreAdd(backend="mem", kind="memory", quota_gib=0.1, write="always"))
        await op.do(StoreDrain(backend="mem"))
        await op.do(StoreAdd(backend="gone", kind="memory", quota_gib=0.1))
        await op.do(StoreRemove(backend="gone"))
        await hits_more(op)
        os.kill(engine.pids["store1"], signal.SIGSTOP)
        await tiers(op, lambda now: now.fetching, "a request waits for the stopped store")
        os.kill(engine.pids["core"], signal.SIGKILL)
        resting = "the next core has taken all slots out of use"
        await tiers(op, lambda now: not now.ready and now.slots_moving == now.slots > 0, resting)
        await load.go_on()
        now = (await op.now()).tiers
        assert now is not None and not now.ready
        assert now.slots_moving == now.slots, "the stopped store may still write into them"
        os.kill(engine.pids["store1"], signal.SIGCONT)
        now = await tiers(op, lambda now: now.ready and disk(now).state == "open", "the stopped store is there")
        assert [(each.name, each.state) for each in now.backends] == [("disk", "open"), ("mem", "draining")]
        await hits_more(op)
        await op.do(StoreRemove(backend="mem"))
    async with engine.operator() as op:
        await tiers(op, lambda now: not now.slots_moving and not now.slots_quarantined, "no slot is left")
    engine.find_pids()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    binary = server_binary()
    if binary is None:
        pytest.skip(WHY_SKIPPED)
    server = Server(binary, tmp_path)
    yield server
    server.stop()


async def test_a_valkey_server_dies_under_load(engine: Served, expected: list[list[int]], server: Server) -> None:
    async with loaded(engine, expected) as (op, load):
        await op.do(StoreAdd(backend="cache", kind="valkey", url=server.url, quota_gib=0.1, write="always"))
        await op.do(StorePause(backend="disk"))
        await hits_more(op, "cache")
        server.kill()
        await tiers(op, lambda now: backend(now, "cache").breaker != "closed", "the backend fails")
        await load.go_on()
        server.start()
        await tiers(op, lambda now: backend(now, "cache").breaker == "closed", "the server is back")
        await hits_more(op, "cache")
        await op.do(StoreResume(backend="disk"))
        await op.do(StoreRemove(backend="cache"))
        now = await tiers(op, lambda now: len(now.backends) == 1, "one backend is left")
        assert disk(now).state == "open" and not disk(now).corrupt_total


async def test_an_s3_server_dies_under_load(engine: Served, expected: list[list[int]], tmp_path: Path) -> None:
    if (binary := rclone_server.rclone_binary()) is None:
        pytest.skip(rclone_server.WHY_SKIPPED)
    server = rclone_server.RcloneServer(binary, tmp_path)
    url = f"s3://bucket/kv/tests?endpoint={server.endpoint}"
    try:
        async with loaded(engine, expected) as (op, load):
            await op.do(StoreAdd(backend="bucket", kind="s3", url=url, quota_gib=0.1, write="always"))
            await op.do(StoreTest(backend="bucket"))
            await op.do(StorePause(backend="disk"))
            await hits_more(op, "bucket")
            server.kill()
            await tiers(op, lambda now: backend(now, "bucket").breaker != "closed", "the backend fails")
            await load.go_on()
            server.start()
            await tiers(op, lambda now: backend(now, "bucket").breaker == "closed", "the server is back")
            await hits_more(op, "bucket")
            await op.do(StoreClear(backend="bucket"))
            await op.do(StoreResume(backend="disk"))
            await op.do(StoreRemove(backend="bucket"))
            now = await tiers(op, lambda now: len(now.backends) == 1, "one backend is left")
            assert disk(now).state == "open" and not disk(now).corrupt_total
    finally:
        server.kill()


async def test_two_engines_over_the_same_files(
    engine: Served, folder: Path, files: Path, expected: list[list[int]]
) -> None:
    with Served(profile(folder, files, name="other"), step_s=0.002) as other:
        async with loaded(engine, expected) as (op, load):
            async with loaded(other, expected) as (beside, its_load):
                await hits_more(op)
                await hits_more(beside)
                await op.do(StoreClear(backend="disk"))
                await hits_more(beside)
                await its_load.go_on()
            other.restart()
            async with loaded(other, expected) as (beside, its_load):
                await its_load.go_on()
                now = (await beside.now()).tiers
                # It reads none before a trial has measured the backend, and has written none of these itself.
                assert now is not None and (disk(now).hit_tokens_total or disk(now).declined_total)
                await hits_more(beside)
                now = (await beside.now()).tiers
                assert now is not None and not disk(now).corrupt_total
            await load.go_on()
            now = (await op.now()).tiers
            assert now is not None and not disk(now).corrupt_total


@pytest.mark.parametrize("change", ["weights", "dtype", "partition"])
async def test_another_engine_finds_nothing(
    engine: Served, folder: Path, files: Path, expected: list[list[int]], checkpoint_root: Path, change: str
) -> None:
    assert any(path.is_file() for path in files.rglob("*")), "there are chunks to be found"
    if change == "weights":
        twin = checkpoint_root / "live-twin"
        folder = make_checkpoint(twin, "llama", dtype="float64", max_position_embeddings=1024, gain=0.5)
    dtype, partition = ("float32" if change == "dtype" else "float64"), ([1, 3] if change == "partition" else None)
    with Served(profile(folder, files, dtype=dtype, partition=partition)) as other:
        async with other.operator() as op:
            await tiers(op, lambda now: now.ready and disk(now).state == "open", "the stores are there")
            name = await op.submit(PROMPTS[0], max_tokens=STEPS)
            tokens = await op.tokens(name)
            if change != "dtype":  # float32 may choose another token.
                assert tokens == reference.greedy(folder, PROMPTS[0], STEPS)
            now = (await op.now()).tiers
            assert now is not None and not disk(now).hit_tokens_total and not disk(now).corrupt_total
            assert "no chunk is there" in " ".join((await op.detail(name)).history)
