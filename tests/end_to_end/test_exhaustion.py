"""Limits of the host that are met while an engine serves: descriptors, folders, disks."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from ppengine.common import procfs
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Snapshot, Verdict
from ppengine.protocol.verbs import Submit
from serving import Served

from profiles import small

PROMPT, TOKENS, LIMIT_S = list(range(3, 40)), 2000, 4.0


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "exhaust", "opt", dtype="float64", layers=4, max_position_embeddings=2048)


@pytest.fixture
def engine(folder: Path) -> Iterator[Served]:
    with serve(folder) as served:
        yield served


def serve(folder: Path, limit_s: float = 60.0) -> Served:
    """Start an engine whose requests end `limit_s` seconds after a stage could not be restarted."""
    return Served(small(folder, stages=2, model={"max_model_len": 2048}, parallel={"restart_limit_s": limit_s}))


@contextlib.contextmanager
def out_of_files(pid: int) -> Iterator[int]:
    """Leave a process no descriptor beside those that it has; yields the limit."""
    used = {int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir()}
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = min(set(range(len(used) + 1)) - used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def forkserver(engine: Served) -> int:
    """Return the pid of the fork server."""
    found = procfs.children([engine.engine.process.pid])
    return next(pid for pid, (_, module) in found.items() if module.endswith("forkserver"))


def has(cause: str, words: str = "") -> object:
    """Return the condition that a root verdict has a cause, and words in its summary."""

    def shown(picture: Snapshot) -> list[Verdict]:
        return [one for one in picture.verdicts if one.root and one.cause == cause and words in one.summary]

    return shown


def submit(**fields: object) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return Submit(prompt_token_ids=PROMPT, sampling=params, **fields)  # type: ignore[arg-type]


async def test_a_fork_server_without_descriptors_is_replaced(engine: Served) -> None:
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=TOKENS)
        old = forkserver(engine)
        with out_of_files(old):
            begun = time.monotonic()
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            await op.until(lambda picture: picture.engine.state == "degraded", "the stage is lost")
            await op.until(lambda picture: picture.engine.state == "serving", "it serves again", 60.0)
            print(f"\nfork server without descriptors: kill to serving {time.monotonic() - begun:.1f} s")
        assert forkserver(engine) != old
        assert "descriptor" in (engine.engine.run_dir / "forkserver.log").read_text()
        engine.find_pids()
        await op.output(name)


async def test_a_supervisor_without_descriptors_costs_requests_only_after_the_limit(folder: Path) -> None:
    with serve(folder, LIMIT_S) as engine:
        await without_descriptors(engine)


async def without_descriptors(engine: Served) -> None:
    async with engine.operator() as op:
        with out_of_files(engine.engine.process.pid) as limit:
            begun = time.monotonic()
            found = await op.until(has("out_of_files", "the supervisor"), "the supervisor is named")  # type: ignore[arg-type]
            print(f"\nsupervisor without descriptors: named after {time.monotonic() - begun:.1f} s")
            assert f"of {limit:,} descriptors, RLIMIT_NOFILE" in found.verdicts[0].summary
            assert found.engine.state == "serving", "requests go on"
            name = await op.submit(PROMPT, max_tokens=TOKENS)
            killed = time.monotonic()
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            await op.until(lambda picture: " failed, the next one is " in picture.engine.message, "tries are shown")
            await op.until(lambda picture: not picture.requests_total, "the request has ended", 30.0)
            print(f"supervisor without descriptors: kill to the end of the request {time.monotonic() - killed:.1f} s")
            (end,) = [one.finished for one in await op.heard() if one.kind == "request.finished"]
            assert end is not None and (end.id, end.reason) == (name, "lost")
            assert "stage 1 did not come up within 4 s" in end.loss and "Too many open files" in end.loss
            ran = await op.cli("follow", name)
            assert ran.code == 1 and "Too many open files" in ran.error
            assert "Too many open files" in await op.refused(submit(), "FAILED")
            picture = await op.now()
            assert picture.engine.state == "degraded" and has("out_of_files", "stage 1")(picture)  # type: ignore[operator]
        lifted = time.monotonic()
        await op.until(lambda picture: picture.engine.state == "serving", "it serves again", 40.0)
        print(f"supervisor without descriptors: lifted to serving {time.monotonic() - lifted:.1f} s")
        await op.until(lambda picture: not picture.verdicts, "nothing is left of it")
        engine.find_pids()
        late = await op.submit(PROMPT, max_tokens=20)
        await op.output(late)
