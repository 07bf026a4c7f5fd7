"""Limits of the host that are met while an engine serves: descriptors, folders, disks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engines import wait_until
from exhausted import (
    FEW,
    LIMIT_S,
    PROMPT,
    TOKENS,
    OnSmallDisk,
    forkserver,
    has,
    no_room_for_rings,
    out_of_files,
    serve,
    submit,
)
from ppengine.protocol import kept_files
from ppengine.protocol.control import Refused
from ppengine.protocol.verbs import Priority
from serving import LASTING_S, Served, audited

from profiles import small

ON_FULL_DISK = 600
"""Tokens that take longer than a full disk is named and commands are refused."""


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "exhaust", "opt", dtype="float64", layers=4, max_position_embeddings=2048)


@pytest.fixture
def engine(folder: Path) -> Iterator[Served]:
    with serve(folder) as served:
        yield served


async def test_a_fork_server_without_descriptors_is_replaced(engine: Served) -> None:
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=FEW)
        old = forkserver(engine)
        with out_of_files(old):
            begun = time.monotonic()
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            await op.until(lambda picture: picture.engine.state == "degraded", "the stage is lost")
            await op.until(lambda picture: picture.engine.state == "serving", "it serves again", 60.0)
            print(f"\nfork server without descriptors: kill to serving {time.monotonic() - begun:.1f} s")
        assert forkserver(engine) != old
        engine.find_pids()
        await op.output(name)


async def test_a_supervisor_without_descriptors_costs_requests_only_after_the_limit(folder: Path) -> None:
    with serve(folder, LIMIT_S) as engine:
        await without_descriptors(engine)


async def without_descriptors(engine: Served) -> None:
    async with engine.operator() as op:
        with out_of_files(engine.engine.process.pid) as limit:
            begun = time.monotonic()
            found = await op.until(has("out_of_files", "the supervisor"), "the supervisor is named")
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
            assert picture.engine.state == "degraded" and has("out_of_files", "stage 1")(picture)
        lifted = time.monotonic()
        await op.until(lambda picture: picture.engine.state == "serving", "it serves again", 40.0)
        print(f"supervisor without descriptors: lifted to serving {time.monotonic() - lifted:.1f} s")
        await op.until(lambda picture: not picture.verdicts, "nothing is left of it")
        engine.find_pids()
        late = await op.submit(PROMPT, max_tokens=20)
        await op.output(late)


async def test_a_full_disk_refuses_commands_by_name_and_nothing_else(folder: Path) -> None:
    with OnSmallDisk(small(folder, stages=2, model={"max_model_len": 2048}), step_s=LASTING_S) as engine:
        async with engine.operator() as op:
            name = await op.submit(PROMPT, max_tokens=ON_FULL_DISK)
            begun = time.monotonic()
            with engine.full():
                picture = await op.until(has("disk_full", str(engine.engine.run_dir)), "the folder is named")
                print(f"\nfull disk: named after {time.monotonic() - begun:.1f} s")
                assert " 0 B free of 8,388,608 B" in picture.verdicts[0].evidence[0]
                tokens = picture.requests[0].output_tokens
                await op.until(lambda picture: picture.requests[0].output_tokens > tokens + 20, "steps go on")
                ends = [await op.ask(Priority(request=name, priority=1)) for _ in range(40)]
                refusals = [end for end in ends if isinstance(end, Refused)]
                assert ends[-len(refusals) :] == refusals, "those before had room in the last page of the log"
                assert {(end.code, end.text.partition(": ")[0]) for end in refusals} == {
                    ("FAILED", "the audit log cannot be written")
                }
                assert refusals[-1].text.endswith("/audit.jsonl); no command is carried out, except for stop")
                ran = await op.cli("explain")
                assert ran.code == 10 and "disk_full" in ran.out and "df " in ran.out
            freed = time.monotonic()
            await op.until(lambda picture: not picture.verdicts, "nothing is left of it")
            print(f"full disk: cleared after {time.monotonic() - freed:.1f} s")
            late = await op.submit(PROMPT, max_tokens=20)
            await op.output(late)
            assert len((await op.output(name))[0]) == ON_FULL_DISK
            seqs = [event.seq for event in await op.heard()]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs))), "no event is missing"
            recorded = audited(engine)
            assert all(outcomes[0] == "received" for outcomes in recorded.values())
            assert not {end.id for end in refusals} & set(recorded), "no line of a refused one"


async def test_an_engine_with_a_full_disk_can_be_stopped_and_its_audit_log_has_it(folder: Path) -> None:
    with OnSmallDisk(small(folder, stages=2)) as engine:
        copy = engine.engine.run_dir / "audit.jsonl"
        with engine.full():
            held = copy.open("rb")
            ran = engine.cli("stop")
            assert ran.code == 0, ran
            engine.ended(0, "stopped by command")
        with held:
            lines = [json.loads(line) for line in held.read().splitlines()]
        assert [(line["verb"], line["outcome"]) for line in lines][:1] == [("stop", "received")]


async def test_a_removed_run_folder_is_made_again_and_stages_can_be_restarted(engine: Served) -> None:
    run_dir = engine.engine.run_dir
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=FEW)
        before = audited(engine)
        begun = time.monotonic()
        shutil.rmtree(run_dir)
        (run_dir.parent / f"{engine.config.id}.json").unlink()
        os.kill(engine.pids["stage1"], signal.SIGKILL)
        await op.until(lambda picture: picture.engine.state == "degraded", "the stage is lost")
        await op.until(lambda picture: picture.engine.state == "serving", "it serves again", 60.0)
        print(f"\nrun folder removed, stage killed: kill to serving {time.monotonic() - begun:.1f} s")
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        engine.find_pids()
        assert len((await op.output(name))[0]) == FEW
        late = await op.submit(PROMPT, max_tokens=20)
        await op.output(late)
        recorded = audited(engine)
        assert {one: recorded[one] for one in before} == before and len(recorded) > len(before)
    await asyncio.to_thread(
        wait_until, lambda: engine.cli("status").code == 0, "consoles that come later find it", 10.0
    )
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=200)
        os.kill(engine.pids["core"], signal.SIGKILL)
        await op.until(lambda picture: picture.engine.state == "serving", "another core serves", 60.0)
        engine.find_pids()
        assert len((await op.output(name))[0]) == 200, "by its journal, in the folder that was made again"


async def test_a_process_without_descriptors_is_named_and_requests_go_on(engine: Served) -> None:
    async with engine.operator() as op:
        for role in ("stage1", "core", "agent", "gateway"):
            name = await op.submit(PROMPT, max_tokens=FEW)
            begun = time.monotonic()
            stage = 1 if role == "stage1" else None
            with out_of_files(engine.pids[role]) as limit:
                words = f"of {limit:,} descriptors, RLIMIT_NOFILE"
                found = await op.until(has("out_of_files", words), f"{role} is named")
                print(f"\n{role} without descriptors: named after {time.monotonic() - begun:.1f} s")
                (verdict,) = [one for one in found.verdicts if one.cause == "out_of_files"]
                assert verdict.stage == stage and ("stage 1" if stage else role) in verdict.summary
                assert str(engine.pids[role]) in verdict.suggest
                assert len((await op.output(name))[0]) == FEW
                ran = await op.cli("status")
                print(f"a console that attaches meanwhile: exit code {ran.code}")
            await op.until(lambda picture: not picture.verdicts, "nothing is left of it")
            old = dict(engine.pids)
            engine.find_pids()
            # A gateway that a console finds without descriptors may end, and is replaced.
            assert {one for one in old if engine.pids[one] != old[one]} <= {"gateway"}


async def test_a_stage_without_room_for_its_rings_is_tried_until_there_is_room(engine: Served) -> None:
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=FEW)
        with no_room_for_rings(engine):
            begun = time.monotonic()
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            found = await op.until(
                lambda picture: " failed, the next one is " in picture.engine.message, "it is tried", 40.0
            )
            assert "No space left on device" in found.engine.message
            found = await op.until(has("disk_full"), "the verdict has the reason")
            print(f"\nno room for rings: kill to the verdict {time.monotonic() - begun:.1f} s")
            assert any(one.stage == 1 for one in found.verdicts)
        lifted = time.monotonic()
        await op.until(lambda picture: picture.engine.state == "serving", "it serves again", 60.0)
        print(f"no room for rings: room to serving {time.monotonic() - lifted:.1f} s")
        assert len((await op.output(name))[0]) == FEW
        engine.find_pids()


async def test_a_full_disk_of_kept_files_alone_is_named_and_the_engine_serves(engine: Served) -> None:
    kept = kept_files.engine_folder(engine.config.id)
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "tmpfs", str(kept)]
    ran = subprocess.run(mount, capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(f"no disk can be mounted here: {ran.stderr.strip()}")
    try:
        with (kept / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        begun = time.monotonic()
        async with engine.operator() as op:
            found = await op.until(has("disk_full", "folder of kept files"), "the folder is named")
            print(f"\nfull disk of kept files: named after {time.monotonic() - begun:.1f} s")
            (verdict,) = [one for one in found.verdicts if one.cause == "disk_full"]
            size = os.statvfs(kept).f_blocks * os.statvfs(kept).f_frsize
            assert verdict.summary.startswith("no room in the folder of kept files, ")
            assert verdict.evidence[0] == f"{kept} (folder of kept files): 0 B free of {size:,} B"
            name = await op.submit(PROMPT, max_tokens=100)
            assert len((await op.output(name))[0]) == 100
            assert (await op.now()).engine.state == "serving"
            (kept / "filler").unlink()
            await op.until(lambda picture: not picture.verdicts, "nothing is left of it")
    finally:
        subprocess.run(["umount", "-l", str(kept)], check=True)
