"""Processes that the kernel kills for memory: each is named with its limit, and work goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engines import wait_until
from exhausted import FEW, PROMPT, forkserver, out_of_files, renderer, serve, starved
from operators import BACK_S, Operator
from ppengine.common import procfs
from ppengine.protocol.control import Refused
from ppengine.protocol.discovery import ended_engines
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit
from serving import Served

WORDS = "killed by SIGKILL: the out-of-memory killer, at the limit of 16.0 KiB of its cgroup (/sys/fs/cgroup/"
TEMPLATE = (
    "{% set text = messages[0]['content'] %}"
    "{% for a in range(99999 if text == 'grow' else 1) %}{% set room = text * 9000000 %}{% endfor %}{{ text }}"
)
"""Each chat needs new pages, more than an allocator keeps; the chat `grow` does until the end of its process."""


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    made = make_checkpoint(
        checkpoint_root / "oom", "opt", dtype="float64", layers=4, max_position_embeddings=2048, tokenizer=True
    )
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    with serve(folder, chats=True) as served:
        yield served


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def other_renderer(engine: Served, old: int) -> int | None:
    """Return the process of chat templates that has followed another one."""
    found = procfs.children([engine.pids["texts"]])
    return next((pid for pid, (_, module) in found.items() if module == "ppengine.templates" and pid != old), None)


async def heard(op: Operator, kind: str, words: str) -> str:
    """Return the text of the event with these words."""
    until = time.monotonic() + 60.0
    while True:
        for event in await op.heard():
            if event.kind == kind and words in event.text:
                return event.text
        assert time.monotonic() < until, [(event.kind, event.text) for event in op.events]
        await op.now()


@pytest.mark.parametrize("role", ["agent", "core", "stage1"])
async def test_a_process_killed_for_memory_is_named_with_its_limit(engine: Served, role: str) -> None:
    kind = {"stage1": "stage.lost"}.get(role, f"{role}.ended")
    async with engine.operator() as op:
        # A request of a stopped stage or core waits, and a stopped agent costs it nothing.
        early = role != "agent" and await op.submit(PROMPT, max_tokens=FEW)
        pid, begun = engine.pids[role], time.monotonic()
        with starved(pid):
            name = early or await op.submit(PROMPT, max_tokens=FEW)
            text = await heard(op, kind, WORDS)
        print(f"\n{role} killed for memory: named after {time.monotonic() - begun:.1f} s: {text}")
        if role != "agent":
            await heard(op, "verdict.cleared", "was killed by SIGKILL: the out-of-memory killer, at the limit of")
        assert gone(pid) and "MiB resident a moment before" in text
        await op.until(lambda picture: picture.engine.state == "serving" and not picture.verdicts, "well", BACK_S)
        engine.find_pids()
        assert engine.pids[role] != pid
        assert len((await op.output(name))[0]) == FEW


async def test_a_gateway_killed_for_memory_is_named_by_the_next_one(engine: Served) -> None:
    async with engine.operator() as op:
        name, pid = await op.submit(PROMPT, max_tokens=2 * FEW), engine.pids["gateway"]
        with starved(pid):
            wait_until(lambda: gone(pid), "the gateway is killed")
        wait_until(lambda: WORDS in (engine.engine.errors.read_text()), "the supervisor names it")
    wait_until(lambda: engine.cli("status").code == 0, "the next one serves")
    engine.find_pids()
    async with engine.operator() as op:
        assert len((await op.output(name))[0]) == 2 * FEW


async def test_a_fork_server_killed_for_memory_is_named_and_replaced(engine: Served) -> None:
    async with engine.operator() as op:
        old = forkserver(engine)
        with starved(old):
            name = await op.submit(PROMPT, max_tokens=FEW)
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            await heard(op, "forkserver.ended", WORDS)
        await op.until(lambda picture: picture.engine.state == "serving", "it serves again", BACK_S)
        engine.find_pids()
        assert forkserver(engine) != old
        assert len((await op.output(name))[0]) == FEW


async def test_chats_go_on_without_descriptors_or_memory_of_their_process(engine: Served) -> None:
    chat = Submit(prompt="hello", chat=True, sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8))

    async def tokens() -> list[int]:
        end = await op.do(chat)
        return await op.tokens(end.request or "")

    async with engine.operator() as op:
        expected, old = await tokens(), renderer(engine)
        with out_of_files(old):
            assert await tokens() == expected and renderer(engine) == old
        with starved(old):
            assert await tokens() == expected and gone(old)
    assert f"the process of chat templates has ended: {WORDS}" in (engine.engine.run_dir / "texts.log").read_text()


async def test_a_chat_that_is_killed_for_memory_is_refused_alone(engine: Served) -> None:
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
    good, bad = [Submit(prompt=text, chat=True, sampling=greedy) for text in ("hello", "grow")]
    async with engine.operator() as op:
        core, name = engine.pids["core"], await op.submit(PROMPT, max_tokens=FEW)
        expected = await op.tokens((await op.do(good)).request or "")
        end, old = asyncio.create_task(op.link.command(bad, timeout=60)), renderer(engine)
        await asyncio.sleep(0.1)
        with starved(old):
            text = await heard(op, "templates.ended", f"(pid {old}) has ended, {WORDS}")
        assert text.endswith("another one renders its chat")
        with starved(wait_until(lambda: other_renderer(engine, old), "another process has the chat")):
            refused = await end
        assert isinstance(refused, Refused), refused
        assert refused.text.startswith(f"chat template: its process has ended: {WORDS}"), refused.text
        await heard(op, "templates.ended", "its chat is refused")
        assert await op.tokens((await op.do(good)).request or "") == expected, "another process renders the next chat"
        assert len((await op.output(name))[0]) == FEW
    engine.find_pids()
    assert engine.pids["core"] == core


def test_a_supervisor_killed_for_memory_is_named_in_the_end_of_its_engine(engine: Served) -> None:
    """The last test of this engine."""
    supervisor = engine.engine.process.pid
    with starved(supervisor):
        assert engine.engine.wait() == -signal.SIGKILL
        # The gateway reads the limit of the cgroup when it leaves.
        wait_until(engine.engine.nothing_left, "all leaves with the supervisor")
    engine.code = -signal.SIGKILL
    (ended,) = [one for one in ended_engines() if one.record.id == engine.engine.run_dir.name]
    assert ended.end.reason.startswith(f"its supervisor (pid {supervisor}) was {WORDS}")


async def test_a_fork_server_killed_on_an_idle_engine_is_there_before_a_stage_needs_it(folder: Path) -> None:
    with serve(folder) as engine:
        async with engine.operator() as op:
            old = forkserver(engine)
            os.kill(old, signal.SIGKILL)
            assert "killed by SIGKILL" in await heard(op, "forkserver.ended", f"pid {old}")
            wait_until(lambda: forkserver(engine) != old, "another one is there")
            wait_until(lambda: Path(f"/proc/{forkserver(engine)}/maps").read_text().count("torch"), "it loads", 30.0)
            new = forkserver(engine)
            os.kill(engine.pids["stage1"], signal.SIGKILL)
            await op.until(lambda picture: picture.engine.state == "degraded", "the stage is lost")
            await op.until(lambda picture: picture.engine.state == "serving", "it serves again", BACK_S)
            engine.find_pids()
            assert forkserver(engine) == new
