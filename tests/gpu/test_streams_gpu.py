"""On a real card: progress of streams that is read while a kernel never ends."""

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
from ppengine.drills.spin_kernel import Spinner
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.stream_progress import DeviceProgress
from ppengine.stage.backends.cuda.streams import Stream

pytestmark = needs_gpu


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
