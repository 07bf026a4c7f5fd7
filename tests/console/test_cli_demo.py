"""`demo` on the real engine: it ends by itself, and leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import FakeGateway, count_queues, sample_snapshot
from ppconsole.cli import bundled_engine
from ppconsole.cli import demo as demo_module
from ppconsole.cli.demo import PROMPTS

pytest.importorskip("torch")

RINGS = Path("/dev/shm")


class Demo:
    """A demo of its own runtime folder, and what it leaves."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.chmod(0o700)
        self._folder = folder / "ppconsole"
        self.ids: set[str] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ppconsole", "demo", *arguments],
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def started(self) -> bool:
        """Whether the engine's record is there."""
        self.ids |= {path.stem for path in self._folder.glob("*.json")}
        return bool(self.ids)

    def left(self) -> list[str]:
        """Files of the engine, and processes that were started for it."""
        rings = [str(path) for name in self.ids for path in RINGS.glob(f"ppconsole-*-{name}")]
        return [str(path) for path in self._folder.iterdir()] + rings + list(map(str, self._processes()))

    def _processes(self) -> list[int]:
        mark = str(self._folder).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes()
            except OSError:
                continue  # it ended meanwhile
            if mark in command:
                found.append(int(path.parent.name))
        return found


def until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_headless_prints_texts_and_stages_and_leaves_nothing(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--headless")
    until(demo.started)
    out, err = demo.process.communicate(timeout=100)
    assert demo.process.returncode == 0, err
    lines = out.splitlines()
    for prompt in PROMPTS:
        text = next(line for line in lines if line.startswith(prompt))
        assert len(text) > len(prompt) + 20
    table = lines[lines.index("") + 1 :]
    assert table[0].split()[:3] == ["STG", "STATE", "MEMORY"]
    assert [row.split()[0] for row in table[1:3]] == ["0", "1"]
    assert "run 0" in table[3]
    assert err.rstrip().endswith("stopping the demo")
    assert demo.left() == []


def test_a_demo_that_is_not_up_in_time_gives_up(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--timeout", "0.2")
    out, err = demo.process.communicate(timeout=60)
    assert (demo.process.returncode, out) == (5, ""), err
    assert "the demo did not serve within 0.2 s" in err
    until(lambda: demo.left() == [])


# SIGTERM comes to the demo at work below: a signal costs a whole engine.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_demo_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    demo = Demo(tmp_path, "--headless", "--load")
    until(demo.started)
    demo.process.send_signal(number)
    _, err = demo.process.communicate(timeout=60)
    assert demo.process.returncode == (-9 if number == signal.SIGKILL else 130), err
    assert "Traceback" not in err
    until(lambda: demo.left() == [])


def test_a_loaded_demo_that_is_ended_at_work_leaves_nothing(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--headless", "--load")
    until(demo.started)
    assert demo.process.stdout is not None
    first = demo.process.stdout.readline()
    assert first.startswith(PROMPTS)
    demo.process.send_signal(signal.SIGTERM)
    _, err = demo.process.communicate(timeout=60)
    assert demo.process.returncode == 130, err
    assert "Traceback" not in err
    assert demo.left() == []


@pytest.mark.parametrize("as_json", [False, True])
async def test_the_picture_is_taken_once_all_requests_have_ended(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text may be read to its end before a snapshot shows that its request has ended."""
    monkeypatch.setattr(demo_module, "_FIGURES_S", 0.0)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with FakeGateway(snapshot=sample_snapshot(requests=[])) as fake:
        demo = asyncio.create_task(demo_module._headless(fake.record, False, as_json, 60.0))
        out = ""
        while out.count("\n") < len(PROMPTS):
            await asyncio.sleep(0.01)
            out += capsys.readouterr().out
        assert fake.snapshot.queues.running == len(PROMPTS)
        fake.snapshot.requests = fake.snapshot.requests[:1]
        count_queues(fake.snapshot)
        assert not (await asyncio.wait([demo], timeout=0.5))[0], "one request is still listed"
        fake.snapshot.requests = []
        count_queues(fake.snapshot)
        assert await demo == 0
        last = capsys.readouterr().out
    whole = "".join(fake.words[: demo_module.MAX_TOKENS])
    if as_json:
        texts = list(map(json.loads, out.splitlines()))
        assert {text["prompt"] for text in texts} == set(PROMPTS) and {text["text"] for text in texts} == {whole}
        snapshot = json.loads(last)["snapshot"]
        assert len(snapshot["stages"]) == 2 and snapshot["queues"]["running"] == 0
    else:
        assert sorted(out.splitlines()) == sorted(prompt + whole for prompt in PROMPTS)
        assert "run 0" in last


@pytest.mark.parametrize("option", ["--headless", "--json"])
def test_an_option_without_a_console_opens_none(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a terminal; and the engine is stopped behind it."""
    done: list[object] = []

    class Engine:
        def __init__(self, *_: object, **__: object) -> None:
            done.append("start")

        def stop(self) -> None:
            done.append("stop")

        def close(self) -> None:
            done.append("close")

    async def serving(*_: object) -> str:
        return "record"

    async def headless(record: str, load: bool, as_json: bool, _: float) -> int:
        done.append((record, load, as_json))
        return 0

    monkeypatch.setattr("ppconsole.cli.launch.EngineProcess", Engine)
    monkeypatch.setattr("ppconsole.cli.screen.has_terminal", lambda: True)
    monkeypatch.setattr(demo_module, "until_serving", serving)
    monkeypatch.setattr(demo_module, "_headless", headless)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert demo_module.demo_command.main([option], standalone_mode=False) == 0
    assert done == ["start", ("record", False, option == "--json"), "stop", "close"]


@pytest.mark.parametrize(("age_ms", "waits_s"), [(40.0, 0.3), (None, 1.0), (60_000.0, 1.0)])
async def test_the_picture_is_of_stages_as_they_were_seen_after_the_last_request(
    age_ms: float | None, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look from before shows them as they were; where none comes, what is known must do."""
    monkeypatch.setattr(demo_module, "_FIGURES_S", 0.3)
    monkeypatch.setattr(demo_module, "_UNSEEN_S", 1.0)
    snapshot = sample_snapshot(requests=[])
    for stage in snapshot.stages:
        stage.sample_age_ms = age_ms
    pictures, begun = demo_module._Newest(), time.monotonic()
    waiting = asyncio.create_task(pictures.behind({"r-1"}))
    while not waiting.done():
        pictures.take(snapshot)
        await asyncio.sleep(0.02)
        assert time.monotonic() - begun < 30
    assert await waiting is snapshot
    assert time.monotonic() - begun >= waits_s


async def test_the_wait_for_the_engine_is_no_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    class Started:
        """An engine process that has announced itself."""

        async def notices(self) -> asyncio.Queue[dict[str, Any] | None]:
            queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
            queue.put_nowait({"event": "started", "id": fake.id})
            return queue

    with FakeGateway() as fake:
        record = await bundled_engine.until_serving(Started(), 60.0)  # type: ignore[arg-type]
        assert record.id == fake.id
        assert [hello.passing for hello in fake.hellos] == [True]
