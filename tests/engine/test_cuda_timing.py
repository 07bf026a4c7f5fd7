"""What the device did for a step, on events that a device without hurry fills in, and in the ring once it is done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ppengine.common.ring import Kind, Record, RingReader, RingWriter
from ppengine.protocol.steps import Retired
from ppengine.stage.backends.cuda.device_timing import DeviceTimer, TimedWork
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.pending_step import Pending

MS = 1_000_000


class Device:
    """A stream of kernels and events; its clock goes on by what a kernel takes, once it is told to work."""

    def __init__(self) -> None:
        self.clock_ms = 5.0
        self.queue: deque[Any] = deque()

    def launch(self, ms: float) -> None:
        self.queue.append(ms)

    def work(self, pieces: int) -> None:
        for _ in range(pieces):
            next_one = self.queue.popleft()
            if isinstance(next_one, float):
                self.clock_ms += next_one
            else:
                next_one.at_ms = self.clock_ms


class TimingEvent:
    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        TimingEvent.made += 1
        self.at_ms: float | None = None

    def record(self, device: Device) -> None:
        self.at_ms = None
        device.queue.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def synchronize(self) -> None:
        assert self.at_ms is not None, "nobody may wait for the device"

    def elapsed_time(self, end: TimingEvent) -> float:
        if self.at_ms is None or end.at_ms is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at_ms - self.at_ms


class World:
    """A stage that launches steps of layers of 3 ms and, where it samples, of 1 ms behind them."""

    def __init__(self, folder: Path) -> None:
        self.device = Device()
        raw: Any = self.device
        self.stream = Stream("compute", torch.device("cpu"), raw)
        ring = RingWriter(folder / "r", "main", 0, 0)
        self.timer, self.reader = DeviceTimer(ring), RingReader(folder / "r")

    def launch(self, step: int, samples: bool = True, masks_ms: float = 0.0) -> Pending:
        """Launch as `CudaRunner` does: 5 pieces on the stream, 3 without sampling; 7 if masks come late."""
        pending = Pending(Retired(1, step, 0, 0))
        work = self.timer.work(self.stream, step, 4, 40)
        pending.finally_do(work.publish)
        with work:
            self.device.launch(3.0)
            if samples:
                work.sampling()
                if masks_ms:
                    self.device.launch(masks_ms)  # The device idles, and its clock goes on.
                    work.goes_on()
                self.device.launch(1.0)
        pending.until(work)
        return pending

    def records(self) -> list[Record]:
        return self.reader.since(0)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(torch.cuda, "Event", TimingEvent)
    TimingEvent.made = 0
    yield World(tmp_path)


def test_a_step_is_written_once_when_it_is_retired(world: World) -> None:
    pending = world.launch(7)
    assert not pending.done and world.records() == []
    world.device.work(4)
    assert not pending.done, "the last event is still to come"
    world.device.work(1)
    assert pending.done and world.records() == [], "who looks writes nothing"
    before = time.monotonic_ns()
    pending.finish()
    (record,) = world.records()
    assert (record.kind, record.step, record.size, record.detail) == (Kind.ON_DEVICE, 7, 4, 40)
    assert before <= record.done_ns <= time.monotonic_ns()
    assert record.done_ns - record.enqueued_ns == 4 * MS
    assert record.returned_ns - record.enqueued_ns == 3 * MS, "layers and head"


def test_a_step_that_samples_nothing_is_layers_alone(world: World) -> None:
    world.launch(1)  # whose events are those of no other
    pending = world.launch(2, samples=False)
    world.device.work(8)
    pending.finish()
    (record,) = world.records()
    assert record.step == 2
    assert record.returned_ns - record.enqueued_ns == record.done_ns - record.enqueued_ns == 3 * MS


def test_the_time_until_late_masks_come_is_not_its_work(world: World) -> None:
    pending = world.launch(1, masks_ms=20.0)
    world.device.work(7)
    pending.finish()
    (record,) = world.records()
    assert record.done_ns - record.enqueued_ns == 4 * MS
    assert record.returned_ns - record.enqueued_ns == 3 * MS


def test_sampling_on_another_stream_is_its_work(world: World) -> None:
    pending, work = Pending(Retired(1, 1, 0, 0)), world.timer.work(world.stream, 1, 4, 40)
    pending.finally_do(work.publish)
    with work:
        world.device.launch(3.0)
        work.sampling()
    world.device.launch(20.0)  # the layers of the next step
    raw: Any = world.device
    with work.elsewhere(Stream("late sampling", torch.device("cpu"), raw)):
        world.device.launch(1.0)
    pending.until(work)
    world.device.work(8)
    pending.finish()
    (record,) = world.records()
    assert record.done_ns - record.enqueued_ns == 4 * MS
    assert record.returned_ns - record.enqueued_ns == 3 * MS


def test_what_waits_on_the_stream_before_a_step_is_not_its_work(world: World) -> None:
    world.device.launch(50.0)
    pending = world.launch(1)
    world.device.work(6)
    pending.finish()
    assert world.records()[0].done_ns - world.records()[0].enqueued_ns == 4 * MS


def test_events_are_as_many_as_steps_have_been_under_way(world: World) -> None:
    under_way: deque[Pending] = deque()
    for step in range(1, 51):
        under_way.append(world.launch(step, samples=bool(step % 3)))
        if len(under_way) == 3:
            world.device.work(5 if (step - 2) % 3 else 3)
            assert under_way[0].done and not under_way[1].done
            under_way.popleft().finish()
    assert TimingEvent.made == 4 * 3
    records = world.records()
    assert [record.step for record in records] == list(range(1, 49))
    assert {record.done_ns - record.enqueued_ns for record in records} == {3 * MS, 4 * MS}


def test_a_step_that_fails_while_it_is_launched_is_not_written(world: World) -> None:
    work = world.timer.work(world.stream, 3, 1, 1)
    with pytest.raises(RuntimeError, match="launch"), work:
        raise RuntimeError("launch")
    world.device.work(1)
    assert not work.done() and not world.device.queue and world.timer.free == []
    pending = world.launch(4)
    world.device.work(5)
    pending.finish()
    assert [record.step for record in world.records()] == [4]


def test_a_read_before_its_time_is_an_error(world: World) -> None:
    work = TimedWork(world.timer)
    work.take(world.stream, 1, 1, 1)
    with work:
        pass
    with pytest.raises(RuntimeError, match="completed"):
        work.publish()
    assert world.records() == []
