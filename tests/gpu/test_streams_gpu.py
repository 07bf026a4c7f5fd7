"""On a real card: the incidents in the words that fakes give, and progress that is read while a kernel never ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real import needs_gpu

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")
pytest.importorskip("msgspec", reason="needs the engine's packages")

from ppengine.agent.device_watch import DeviceWatch
from ppengine.common.device_page import DevicePage
from ppengine.drills.fake_streams import FakeRuntime
from ppengine.drills.incident_programs import INCIDENTS, Played
from ppengine.drills.spin_kernel import Spinner
from ppengine.protocol.reports import Finding
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.rehearsal import DeviceRuntime
from ppengine.stage.backends.cuda.stream_progress import DeviceProgress
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.runtime import Runtime

pytestmark = needs_gpu
RUNS = 3


def play(name: str, kind: type, *, fixed: bool = False, strict: bool = False) -> tuple[Played, list[Finding]]:
    ledger = Ledger(0)
    ledger.thread("main")
    ledger.switch(True)
    ledger.strict = strict
    runtime: Runtime = kind(ledger) if kind is FakeRuntime else kind(ledger, torch.device("cuda", 0))
    return INCIDENTS[name](runtime, fixed), ledger.findings()


def words(findings: list[Finding]) -> list[tuple[str, str, str]]:
    """Return cause, summary and remedy of each, whatever the devices are called."""
    fixes = [next((line for line in one.evidence if line.startswith("to fix")), "") for one in findings]
    return [(one.cause, one.summary, fix) for one, fix in zip(findings, fixes, strict=True)]


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_corruption_is_real_on_a_card_and_told_in_the_same_words(name: str) -> None:
    for _ in range(RUNS):
        played, findings = play(name, DeviceRuntime)
        faked, expected = play(name, FakeRuntime)
        print(f"\n{name}: got {played.error or played.got}, right is {played.expected}")
        assert played.corrupt, played
        assert played.error == faked.error
        if name == "foreign-device":
            assert findings[1].summary.startswith("stage 0: stream kv-load of cuda:")
            findings, expected = findings[:1], expected[:1]
        assert words(findings) == words(expected)
        assert any("drills/incident_programs.py:" in line for line in findings[0].evidence)


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_fix_mends_the_bytes_on_a_card(name: str) -> None:
    for _ in range(RUNS):
        played, findings = play(name, DeviceRuntime, fixed=True)
        assert not played.corrupt, played
        assert findings == []


@pytest.mark.parametrize("name", [name for name in INCIDENTS if name != "foreign-device"])
def test_strict_order_masks_it_on_a_card_and_it_is_told_all_the_same(name: str) -> None:
    played, findings = play(name, DeviceRuntime, strict=True)
    assert not played.corrupt, played
    assert findings


# --- progress -----------------------------------------------------------------------------------------------


class World:
    def __init__(self, path: Path) -> None:
        self.driver = Driver(0)
        self.progress = DeviceProgress(DevicePage(path), self.driver)
        self.compute, self.side = (Stream(name, self.driver.device) for name in ("compute", "swap out"))
        for stream in (self.compute, self.side):
            self.progress.follow(stream)
        self.watch = DeviceWatch(path, path.stat().st_ino)

    def look(self, stream: int) -> tuple[str | None, int | None, int | None, int | None]:
        one = self.watch.look(os.getpid())[stream]
        return one.op, one.pending, one.begun_step, one.done_step


@pytest.fixture
def world() -> Iterator[World]:
    path = Path(f"/dev/shm/ppconsole-test-{os.getpid()}.page")
    made = World(path)
    yield made
    torch.cuda.synchronize()
    made.driver.unpin(made.progress.page.address)
    path.unlink()


def test_a_kernel_that_never_ends_is_seen_begun_until_it_is_told_to_end(world: World) -> None:
    spinner = Spinner(world.driver.device)
    world.progress.step = 41
    with world.compute.working():
        spinner.launch(world.compute)
    world.progress.step = 42
    with world.compute.working():
        pass
    world.side.wait(world.compute.record("spun"))
    with world.side.working():
        pass
    time.sleep(0.3)
    assert world.look(0) == ("device m41", 2, 41, None)
    assert world.look(1) == (None, 1, None, None), "it waits, and has begun nothing"
    assert not world.compute.record("now").done()
    spinner.end()
    world.side.synchronize()
    world.compute.synchronize()
    assert world.look(0) == (None, 0, 42, 42)
    assert world.look(1) == (None, 0, 42, 42)


def test_what_it_costs(world: World) -> None:
    """Host time and time on the stream of one piece of work: both words."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record(world.compute.raw)
        since = time.perf_counter()
        for step in range(2000):
            world.progress.step = step
            with world.compute.working():
                pass
        host = (time.perf_counter() - since) / 2000 * 1e6
        end.record(world.compute.raw)
        world.compute.synchronize()
    device = begin.elapsed_time(end) / 2000 * 1e3
    print(f"\none piece of work: {host:.1f} us of the host, {device:.1f} us on the stream when the host keeps ahead")
    assert host < 50 and world.look(0)[3] == 1999
