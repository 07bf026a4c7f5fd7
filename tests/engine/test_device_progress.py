"""What a device writes of its progress: page and words, who reads them, and what the diagnosis makes of them."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from pathlib import Path

import msgspec
import pytest
from diagnosis_world import PLACES, pipeline_held_at, stuck, with_stage
from monitor_helpers import processes, sample, stage_process
from ppengine.agent.agent import Sampler
from ppengine.agent.device_watch import DeviceWatch
from ppengine.agent.stage_watch import StageWatch
from ppengine.common.device_page import PAGE_BYTES, DevicePage, DevicePageReader, Line, word_of
from ppengine.common.ring import RingWriter
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.device_evidence import with_xids
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.fault_log import FaultLog
from ppengine.diagnosis.process_history import Sighting
from ppengine.diagnosis.tracker import EvidenceTracker
from ppengine.protocol.facts import Lost, Serving
from ppengine.protocol.gpu import GpuInfo, Xid
from ppengine.protocol.place import Place
from ppengine.protocol.stage_info import StreamInfo
from ppengine.stage.backends.cuda.stream_progress import DeviceProgress, StreamProgress


class LateDevice:
    """A device that writes into host memory when it is told to, stream by stream, in order."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[tuple[int, int]]] = {}

    def show(self, address: int, size: int) -> int:
        assert size == PAGE_BYTES and address % PAGE_BYTES == 0
        return address

    def write_word(self, word: int, value: int, stream: int) -> None:
        self.queues.setdefault(stream, deque()).append((word, value))

    def go(self, stream: int, operations: int) -> None:
        for _ in range(operations):
            address, value = self.queues[stream].popleft()
            ctypes.c_uint64.from_address(address).value = value


class NamedStream:
    def __init__(self, name: str, handle: int) -> None:
        self.name, self.handle = name, handle
        self.progress: StreamProgress | None = None


class World:
    """Two streams of a stage, and who watches them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s0.0.device.page"
        self.device = LateDevice()
        self.progress = DeviceProgress(DevicePage(self.path), self.device)
        self.compute, self.swap = NamedStream("compute", 7), NamedStream("swap out", 9)
        for stream in (self.compute, self.swap):
            self.progress.follow(stream)  # type: ignore[arg-type]
        self.watch = DeviceWatch(self.path, self.path.stat().st_ino)

    def launch(self, stream: NamedStream, step: int) -> None:
        self.progress.step = step
        assert stream.progress is not None
        with stream.progress:
            pass

    def look(self) -> tuple[StreamInfo, StreamInfo]:
        first, second = self.watch.look(os.getpid())
        return first, second


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_counts_and_steps_share_a_word_and_wrap() -> None:
    assert word_of(2**32 + 1, 2**32 + 2) == 1 << 32 | 2


def test_lines_are_named_and_begin_empty(world: World) -> None:
    reader = DevicePageReader(world.path)
    assert reader.pid == os.getpid()
    assert reader.lines() == [Line(name, (0, 0), (0, 0), (0, 0)) for name in ("compute", "swap out")]


def test_a_page_has_an_end(world: World) -> None:
    for number in range(PAGE_BYTES // 64 - 3):
        world.progress.page.add(f"more {number}")
    with pytest.raises(ValueError, match="one too many"):
        world.progress.page.add("one too many")
    assert len(DevicePageReader(world.path).lines()) == PAGE_BYTES // 64 - 1


@pytest.mark.parametrize("content", [b"", bytes(PAGE_BYTES), b"x" * 100])
def test_what_is_no_page_is_refused_and_tried_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "page"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"page|empty"):
        DevicePageReader(path)
    watch = DeviceWatch(path, 1)
    assert watch.look(os.getpid()) == []
    DevicePage(path).add("compute")
    assert [one.name for one in watch.look(os.getpid())] == ["compute"]
    assert watch.look(os.getpid() + 1) == [], "the page of a predecessor"


def test_a_stream_from_launch_to_end(world: World) -> None:
    idle, _ = world.look()
    assert (idle.op, idle.pending, idle.begun_step, idle.done_step, idle.age_ms) == (None, 0, None, None, None)
    world.launch(world.compute, 41)
    world.launch(world.compute, 42)
    waits, other = world.look()
    assert (waits.op, waits.pending, waits.waits_for) == (None, 2, "another stream")
    assert other.pending == 0 and other.on_device
    world.device.go(7, 1)
    works, _ = world.look()
    assert (works.op, works.pending, works.waits_for) == ("device m41", 2, None)
    assert (works.begun_step, works.done_step) == (41, None)
    world.device.go(7, 2)
    works, _ = world.look()
    assert (works.op, works.pending, works.begun_step, works.done_step) == ("device m42", 1, 42, 41)
    world.device.go(7, 1)
    done, _ = world.look()
    assert (done.op, done.pending, done.done_step, done.age_ms) == (None, 0, 42, None)


def test_age_is_since_the_device_moved_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000_000]
    monkeypatch.setattr("ppengine.agent.device_watch.time.monotonic_ns", lambda: now[0])

    def after(seconds: float) -> float | None:
        now[0] += int(seconds * 1e9)
        return world.look()[0].age_ms

    after(5)
    world.launch(world.compute, 1)
    assert after(1) == 0.0, "an idle stream has not stood still"
    assert after(1) == 1000.0
    world.device.go(7, 1)
    assert after(1) == 0.0 and after(2) == 2000.0
    world.launch(world.compute, 2)
    assert after(1) == 3000.0, "more to do is no progress"
    world.device.go(7, 1)
    assert after(1) == 0.0


def test_what_an_exception_leaves_is_begun_and_not_done(world: World) -> None:
    world.progress.step = 5
    with pytest.raises(RuntimeError), world.compute.progress:  # type: ignore[union-attr]
        raise RuntimeError("launch")
    world.device.go(7, 1)
    assert world.look()[0].op == "device m5" and not world.device.queues[7]


# --- the agent ----------------------------------------------------------------------------------------------


def test_the_agent_shows_device_streams_behind_the_threads(tmp_path: Path) -> None:
    from monitor_helpers import make_config, remove

    config = make_config(1)
    try:
        folder = Path(config.ring_dir)
        ring = RingWriter(folder / "s0.0.main.ring", "main", 0, 0)
        world = World(folder)
        sampler = Sampler(config)
        world.launch(world.swap, 3)
        world.device.go(9, 1)
        (seen,) = sampler.look().stages
        assert [(one.name, one.on_device) for one in seen.streams] == [
            ("main", False), ("compute", True), ("swap out", True),
        ]  # fmt: skip
        assert seen.streams[2].op == "device m3"
        world.path.unlink()
        watch = StageWatch(0, 0)
        watch.update({"main": (folder / "s0.0.main.ring", 1)})
        sample = watch.look()
        assert sample is not None and [one.name for one in sample.streams] == ["main"]
        ring.close()
    finally:
        remove(config)


# --- the diagnosis ------------------------------------------------------------------------------------------


def stream(name: str = "compute", step: int = 8, age_s: float | None = 6.0, **changes: object) -> StreamInfo:
    at_work = StreamInfo(
        name=name, owner="main", op=f"device m{step}", age_ms=None if age_s is None else age_s * 1e3, pending=1,
        on_device=True, begun_step=step, done_step=step - 1,
    )  # fmt: skip
    return msgspec.structs.replace(at_work, **changes)


IDLE = stream(op=None, age_s=None, pending=0, begun_step=7, done_step=7)


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_kernel_that_never_ends_is_named_with_its_stream(count: int, k: int) -> None:
    stages = with_stage(pipeline_held_at(count, k), k, op="device", streams=(stream(), stream("swap in", 8, 6.0)))
    root, *others = diagnose(stuck(stages))
    assert (root.stage, root.cause, root.root) == (k, "stream_stuck", True)
    assert root.summary == f"stage {k}: stream compute is stuck in m8, begun on the device 6.0s ago"
    assert any("stream compute: the device began m8, done m7, pending 1" in line for line in root.evidence)
    assert not any(other.root for other in others)


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_devices_that_wait_for_the_one_that_is_stuck_are_no_roots(count: int, k: int) -> None:
    # Messages go from card to card: every host has launched, and waits for its own device.
    ahead = stream(op=None, begun_step=9, done_step=9, waits_for="another stream")
    behind = stream(op=None, begun_step=7, done_step=7, waits_for="another stream")
    stages = [
        msgspec.structs.replace(
            one, op="device", op_age_s=6.0, unretired_age_s=6.0, unretired_tokens=1, outbox=0, edges=(),
            streams=(stream() if one.stage == k else ahead if one.stage < k else behind,),
        )
        for one in pipeline_held_at(count, k)
    ]  # fmt: skip
    root, *others = diagnose(stuck(stages))
    assert (root.stage, root.cause) == (k, "stream_stuck")
    assert not any(other.root for other in others)
    assert {other.cause for other in others} <= {"starved", "blocked"}


def test_a_swap_that_never_ends() -> None:
    stages = with_stage(pipeline_held_at(2, 1), 1, op="device", streams=(IDLE, stream("swap out", 5)))
    root = diagnose(stuck(stages))[0]
    assert root.cause == "stream_stuck" and "stream swap out is stuck in m5" in root.summary


@pytest.mark.parametrize("name", ["swap in", "upload"])
def test_a_stream_for_which_the_layers_wait_on_the_same_device(name: str) -> None:
    waits = msgspec.structs.replace(IDLE, pending=1, age_ms=6e3, waits_for="another stream")
    stages = pipeline_held_at(3, 1)
    for k, streams in ((0, (IDLE,)), (1, (waits, stream(name, 8, 6.0))), (2, (waits,))):
        stages = with_stage(stages, k, op="device", op_age_s=6.0, outbox=0, edges=(), streams=streams)
    root, *others = diagnose(stuck(stages))
    assert (root.stage, root.cause) == (1, "stream_stuck") and f"stream {name} is stuck in m8" in root.summary
    assert not any(other.root for other in others)


@pytest.mark.parametrize(
    "streams",
    [
        (),
        (IDLE,),
        (stream(age_s=0.2),),
        (msgspec.structs.replace(IDLE, pending=1, age_ms=6e3, waits_for="another stream"),),
    ],
    ids=["no device", "idle", "it moves", "it waits"],
)
def test_a_stream_that_is_not_the_one_that_stands(streams: tuple[StreamInfo, ...]) -> None:
    root = diagnose(stuck(with_stage(pipeline_held_at(2, 0), 0, streams=streams)))[0]
    assert (root.stage, root.cause) == (0, "self_stuck")


def test_an_end_tells_how_far_the_device_was_and_what_the_driver_said() -> None:
    words = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    stages = with_stage(
        pipeline_held_at(2, 1, 0.3), 1, lost=words, lost_for_s=0.2, streams=(stream(age_s=0.3),),
        xids=(Xid(code=31, age_ms=250.0), Xid(code=999, age_ms=100.0)),
    )  # fmt: skip
    root = diagnose(stuck(stages, 0.3))[0]
    assert (root.stage, root.cause) == (1, "crashed") and "illegal memory access" in root.summary
    assert "stream compute: the device began m8, done m7, pending 1, 0.3s without a move" in root.evidence
    assert "driver: XID 31 of its card 0.2s ago (a kernel touched memory that is not there)" in root.evidence
    assert "driver: XID 999 of its card 0.1s ago" in root.evidence


def test_xids_of_a_card_go_to_the_stages_that_are_on_it() -> None:
    gpu = GpuInfo(uuid="GPU-1", xids=[Xid(code=13, age_ms=29_000.0), Xid(code=43, age_ms=100.0)])
    on, off = StageEvidence(stage=0, card="GPU-1"), StageEvidence(stage=1)
    assert with_xids(3_000_000_000, on, {"GPU-1": (gpu, 1_000_000_000)}).xids == (Xid(code=43, age_ms=2100.0),)
    assert with_xids(3_000_000_000, off, {"GPU-1": (gpu, 1_000_000_000)}) is off
    assert with_xids(3_000_000_000, on, {}) is on


def test_the_streams_of_who_cannot_go_on_stay_when_its_page_is_gone() -> None:
    tracker, log, second = EvidenceTracker(1, 10.0), FaultLog(), 1_000_000_000

    def streams(at_s: int, *of_device: StreamInfo, pid: int = 1000) -> tuple[int | None, list[int | None]]:
        seen = Sighting(sample(0, pid=pid, streams=list(of_device)), at_s * second)
        process = stage_process(0, pid=pid, generation=pid - 999)
        (found,) = tracker.build(at_s * second, None, {(0, 0): seen}, processes(process), None, faults=log).stages
        return found.pid, [stream.done_step for stream in found.streams]

    assert streams(1, stream()) == (1000, [stream().done_step])
    assert streams(2) == (1000, []), "a process that goes on has the streams that it has"
    assert streams(3, stream())[1]
    log.take(Lost(mono_ns=3 * second, place=Place(0, 0), generation=1, words="it failed", pid=1000))
    assert streams(4, stream(step=9)) == (1000, [stream(step=9).done_step])
    assert streams(5) == (1000, [stream(step=9).done_step])
    assert streams(6, pid=1001) == (1000, [stream(step=9).done_step])
    served = ((Place(0, 0), 2),)
    log.take(Serving(mono_ns=7 * second, generation=2, processes=served, took_s=4.0, recomputed=0))
    assert streams(8, pid=1001) == (1001, [])


def test_an_abort_behind_a_cuda_error_is_told_with_its_text() -> None:
    words = "CUDA error: device-side assert triggered"
    end = {"exit_code": -6, "dead_for_s": 0.2, "exit_detail": f"killed by SIGABRT: {words}"}
    root = diagnose(stuck(with_stage(pipeline_held_at(2, 1, 0.3), 1, **end), 0.3))[0]
    assert (root.stage, root.cause) == (1, "crashed")
    assert root.summary == "stage 1 was killed by SIGABRT: " + words
    assert f"last words: {words}" in root.evidence


def test_what_the_driver_calls_out_of_memory_is_so() -> None:
    words = "DriverError: cuMemCreate of 33554432 bytes: CUDA_ERROR_OUT_OF_MEMORY"
    stages = with_stage(pipeline_held_at(2, 0, 0.3), 0, lost=words, lost_for_s=0.2)
    assert diagnose(stuck(stages, 0.3))[0].cause == "out_of_memory"
