"""`serve --restart`: a supervisor that is killed under load, and with it all processes of its engine."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import reference
from checkpoints import make_checkpoint
from engines import alive, wait_until
from ppengine.protocol.discovery import EngineRecord, ended_engines, list_engines
from ppengine.supervisor.process_deaths import MOST
from streaming import stream

from profiles import small

STREAMS, STEPS = 8, 250
PROMPTS = reference.prompts(3, 100, low=20, high=60, seed=11)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "kept", "opt", dtype="float64", layers=4, max_position_embeddings=2048)


class Kept:
    """`ppconsole serve --restart` as a process."""

    def __init__(self, runtime: Path, folder: Path) -> None:
        import yaml

        profile = runtime / "profile.yaml"
        profile.write_text(yaml.safe_dump(msgspec.to_builtins(small(folder, stages=2, model={"max_model_len": 2048}))))
        self.errors = runtime / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ppconsole", "serve", str(profile), "--restart"],
                stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            )  # fmt: skip
        self.served(1)

    def served(self, times: int) -> None:
        """Wait until the engine has begun to serve for the `times`-th time."""
        try:
            wait_until(lambda: self.errors.read_text().count(": serving") >= times, f"served {times} times", 100.0)
        except AssertionError as error:
            raise AssertionError(f"{error}; it wrote:\n{self.errors.read_text()[-3000:]}") from None

    @property
    def record(self) -> EngineRecord:
        (record,) = list_engines()
        return record


@pytest.fixture
def kept(runtime: Path, folder: Path) -> Iterator[Kept]:
    engine = Kept(runtime, folder)
    yield engine
    engine.process.kill()
    engine.process.wait()


@pytest.mark.long
async def test_requests_go_on_to_the_same_tokens(kept: Kept, folder: Path) -> None:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(STREAMS)]
    streams = [asyncio.create_task(stream(lambda: kept.record, prompt, STEPS, back_s=60.0)) for prompt in prompts]
    first = kept.record
    await asyncio.sleep(0.7)
    os.kill(first.pid, signal.SIGKILL)
    await asyncio.to_thread(kept.served, 2)
    second = kept.record
    assert (second.id, second.epoch) == (first.id, first.epoch) and second.pid != first.pid
    assert first.id not in [one.record.id for one in ended_engines()], "the engine goes on, so it has not ended"
    for prompt, tokens in zip(prompts, await asyncio.gather(*streams), strict=True):
        assert tokens == reference.greedy(folder, prompt, STEPS, draft=tokens)
    said = (Path(second.run_dir) / "gateway.log").read_text()
    assert f"the supervisor (pid {first.pid}) was killed by SIGKILL: all processes of the engine ended with it" in said
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(30) == 0, kept.errors.read_text()
    assert list_engines() == [] and not Path(second.run_dir).exists() and not alive(second.pid)


def successor(before: EngineRecord) -> EngineRecord | None:
    """Return the record of the engine once it has another supervisor."""
    return next((one for one in list_engines() if one.id == before.id and one.pid != before.pid), None)


@pytest.mark.long
def test_an_end_that_comes_again_and_again_ends_the_engine(kept: Kept) -> None:
    """The first and the last of them is killed when it serves, and those between while they load."""
    last = kept.record
    for number in range(1, MOST):
        os.kill(last.pid, signal.SIGKILL)
        last = wait_until(functools.partial(successor, last), f"the supervisor after {number} ends", 30.0)
    kept.served(2)
    os.kill(last.pid, signal.SIGKILL)
    assert kept.process.wait(30) == 1
    reason = f"the supervisor of {last.id} was killed by SIGKILL, and it is the end number {MOST} in 10 minutes"
    assert kept.errors.read_text().splitlines()[-1] == f"error: {reason}"
    assert list_engines() == [] and not Path(last.run_dir).exists()
    (end,) = [one.end for one in ended_engines() if one.record.id == last.id]
    assert end.reason == reason and not end.clean
