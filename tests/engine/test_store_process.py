"""A real store process over a real socket: the test is the core and the stage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq
from ppengine.common import procfs
from ppengine.common.child_process import Child, spawn
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import MemoryConfig, ModelConfig, ParallelConfig
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.store_messages import (
    BackendSpec,
    Cancel,
    Clear,
    Done,
    Fetch,
    Fetched,
    Find,
    Found,
    FoundChunk,
    FromStore,
    Mark,
    Marker,
    Put,
    Stored,
    StoreFigures,
    StoreReady,
    UseBackends,
    UseNamespace,
    Weights,
)
from ppengine.protocol.store_messages import Test as Trial
from store_world import SLOT_BYTES, Pool

PATIENCE_MS = 60_000
T = TypeVar("T")
KEY, OTHER = b"k" * 16, b"o" * 16


def engine_config(folder: Path) -> EngineConfig:
    """Return an engine of two ranks in one stage, written to its run folder."""
    profile = Profile(
        name="t", model=ModelConfig(path=str(folder)), parallel=ParallelConfig(tensor=2), memory=MemoryConfig()
    )
    config = EngineConfig(
        id="e", name="t", epoch="p", profile=profile, model_path=str(folder), model_type="opt", layers=[(0, 2)],
        max_model_len=64, run_dir=str(folder), ring_dir=str(folder), started_wall=0.0,
    )  # fmt: skip
    (folder / "engine.json").write_bytes(msgspec.json.encode(config))
    return config


class Core:
    """The core's end of the socket, and the store that it talks to."""

    def __init__(self, folder: Path, role: str = "store0.1") -> None:
        self.config, self.role = engine_config(folder), role
        self._folder = folder
        self._codec = Codec(FromStore)
        self._context = zmq.Context()
        self.bind()
        self.start()

    def bind(self) -> None:
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(self.config.endpoint("stores"))

    def start(self) -> None:
        arguments = ["--engine", str(self._folder / "engine.json"), "--role", self.role]
        path = os.pathsep.join([str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        log = self._folder / f"{self.role}.log"
        self.child: Child = spawn("ppengine.store", arguments, log=log, env={"PYTHONPATH": path})

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.socket.send_multipart([self.role.encode(), encode(message)])

    def next(self, kind: type[T]) -> T:
        """Return the next message of a kind; figures in between are skipped."""
        while self.socket.poll(PATIENCE_MS):
            name, body = self.socket.recv_multipart()
            message = self._codec.decode(body)
            assert name == self.role.encode()
            if isinstance(message, kind):
                return message
            assert isinstance(message, StoreFigures), message
        raise AssertionError(f"no {kind.__name__} within {PATIENCE_MS} ms:\n{self.log}")

    @property
    def log(self) -> str:
        return (self._folder / f"{self.role}.log").read_text()

    def figures_with(self, state: str) -> StoreFigures:
        while True:
            figures = self.next(StoreFigures)
            if figures.backends and all(backend.state == state for backend in figures.backends):
                return figures

    def close(self) -> None:
        self.child.kill()
        self.child.wait(10)
        self.child.close()
        self.socket.close(0)
        self._context.term()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    core = Core(tmp_path)
    yield core
    core.close()


def files_spec(folder: Path) -> BackendSpec:
    return BackendSpec("disk", "files", str(folder / "kv"), 2**30, 60_000)


def begin(core: Core, pool: Pool, tmp_path: Path) -> None:
    core.send(pool.message(), UseNamespace(b"n" * 16), UseBackends([files_spec(tmp_path)]))
    core.figures_with("open")


def test_the_life_of_a_chunk(core: Core, pool: Pool, tmp_path: Path) -> None:
    ready = core.next(StoreReady)
    assert (ready.stage, ready.rank, ready.pid) == (0, 1, core.child.pid)
    begin(core, pool, tmp_path)
    for slot in (2, 3):
        pool.write(slot, os.urandom(SLOT_BYTES))
    core.send(Put(1, 1, "disk", KEY, [2, 3], 60_000))
    stored = core.next(Stored)
    assert (stored.stage, stored.rank, stored.job, stored.error) == (0, 1, 1, "")
    core.send(Fetch(2, 1, "disk", [KEY, OTHER], [[9, 8], [10, 11]], [stored.sum, b""], 60_000))
    fetched = core.next(Fetched)
    assert (fetched.job, fetched.good, fetched.corrupt, fetched.missing) == (2, 1, False, True)
    assert [pool.read(9), pool.read(8)] == [pool.read(2), pool.read(3)]
    core.send(Fetch(3, 2, "disk", [KEY], [[9, 8]], [stored.sum], 60_000))
    assert "generation" in core.next(Fetched).error
    core.send(Trial(4, "disk"))
    assert core.next(Done).text.startswith("4 MiB written in ")
    core.send(Cancel(99), Find(5, [KEY], 100))
    assert "place (0, 0)" in core.next(Found).error
    core.send(Clear(6, "disk"))
    assert core.next(Done).text == "0.0 MiB deleted"
    core.send(Fetch(7, 1, "disk", [KEY], [[9, 8]], [stored.sum], 60_000))
    assert core.next(Fetched).good == 0


def test_the_first_place_has_the_markers(tmp_path: Path, pool: Pool) -> None:
    core = Core(tmp_path, "store0")
    core.next(StoreReady)
    weights = core.next(Weights)
    assert weights.digest == b"" and "config.json" in weights.error, "there is no model"
    begin(core, pool, tmp_path)
    marker = Marker([8192, 8192], [b"a" * 16, b"b" * 16], 1)
    core.send(Mark(1, "disk", KEY, marker, 60_000))
    assert core.next(Done).error == ""
    core.send(Find(2, [KEY, OTHER], 60_000))
    assert core.next(Found).chunks == [FoundChunk("disk", marker)]
    core.close()


def test_a_killed_store_is_followed_by_one_that_has_the_objects(core: Core, pool: Pool, tmp_path: Path) -> None:
    core.next(StoreReady)
    begin(core, pool, tmp_path)
    pool.write(0, os.urandom(SLOT_BYTES))
    core.send(Put(1, 1, "disk", KEY, [0], 60_000))
    stored = core.next(Stored)
    os.kill(core.child.pid, signal.SIGKILL)
    core.child.wait(30)
    core.child.close()
    core.start()
    assert core.next(StoreReady).pid == core.child.pid
    begin(core, pool, tmp_path)
    core.send(Fetch(2, 1, "disk", [KEY], [[5]], [stored.sum], 60_000))
    assert core.next(Fetched).good == 1 and pool.read(5) == pool.read(0)


def test_another_core_finds_a_store_that_has_nothing(core: Core, pool: Pool, tmp_path: Path) -> None:
    core.next(StoreReady)
    begin(core, pool, tmp_path)
    core.socket.close(0)
    core.bind()
    assert core.next(StoreReady).pid == core.child.pid
    core.send(Put(1, 1, "disk", KEY, [0], 60_000))
    assert core.next(Stored).error != ""
    begin(core, pool, tmp_path)
    core.send(Put(2, 1, "disk", KEY, [0], 60_000))
    assert core.next(Stored).error == ""


def test_the_memory_of_a_backend_goes_back_with_it(core: Core, tmp_path: Path) -> None:
    def private() -> int:
        """Return the bytes of the store's memory that no file and no other process has."""
        found = procfs.unbacked(core.child.pid)
        assert found is not None
        return found.total - found.shared

    mib, count = 2**20, 7
    pool = Pool(count, mib)
    core.next(StoreReady)
    memory = BackendSpec("mem", "memory", "", 2**30, 60_000)
    core.send(pool.message(), UseNamespace(b"n" * 16), UseBackends([memory]))
    core.figures_with("open")
    before = private()
    # It has freed an object of 4 MiB then: from now on glibc keeps the memory of smaller ones, up to 8 MiB a thread.
    core.send(Trial(1, "mem"))
    assert core.next(Done).error == ""
    core.send(*(Put(2 + slot, 1, "mem", b"%016d" % slot, [slot], 60_000) for slot in range(count)))
    assert {core.next(Stored).error for _ in range(count)} == {""}
    assert private() - before > 5 * mib
    core.send(UseBackends([]))
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while (left := private() - before) > 3 * mib:
        assert time.monotonic() < deadline, f"{left / mib:.1f} MiB are left"
        core.next(StoreFigures)
    pool.close()


HANGING = """
import threading
from ppengine.store.backends.memory_backend import MemoryBackend

class Hanging(MemoryBackend):
    threads = 2

    def write(self, key, data):
        threading.Event().wait()
"""


def test_a_backend_that_hangs_holds_up_nothing_else(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "hanging-1.dist-info").mkdir()
    (tmp_path / "hanging-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1\n")
    (tmp_path / "hanging-1.dist-info/entry_points.txt").write_text("[ppconsole.backends]\nhanging = hanging:Hanging\n")
    core = Core(tmp_path)
    assert {"memory", "files", "hanging"} <= core.next(StoreReady).kinds.keys()
    slow = BackendSpec("slow", "hanging", "", 2**30, 60_000)
    core.send(pool.message(), UseNamespace(b"n" * 16), UseBackends([slow, files_spec(tmp_path)]))
    core.figures_with("open")
    # More than it has threads: the others wait in its queue.
    core.send(*(Put(job, 1, "slow", KEY, [0], 200) for job in range(1, 5)))
    assert [core.next(Stored).error for _ in range(4)] == ["its deadline of 200 ms is over"] * 4
    core.send(Fetch(10, 1, "slow", [KEY], [[1]], [b""], 60_000))
    assert "is not there" in core.next(Fetched).error, "a thread is left for reads"
    core.send(Put(5, 1, "disk", KEY, [0], 60_000))
    assert core.next(Stored).error == ""
    assert [backend.name for backend in core.next(StoreFigures).backends] == ["slow", "disk"]
    core.send(UseBackends([msgspec.structs.replace(slow, timeout_ms=100), files_spec(tmp_path)]))
    while core.next(StoreFigures).backends[0].errors < 1:
        pass
    core.send(UseBackends([files_spec(tmp_path)]), Put(6, 1, "slow", KEY, [0], 200))
    assert core.next(Stored).error == "there is no backend slow"
    core.child.terminate()
    assert core.child.wait(30) == 0, "it leaves with calls that hang"
    core.close()


def test_a_store_leaves_in_order_and_with_its_parent(core: Core, pool: Pool, tmp_path: Path) -> None:
    core.next(StoreReady)
    begin(core, pool, tmp_path)
    core.child.terminate()
    assert core.child.wait(30) == 0
    assert list((tmp_path / "kv/drafts").iterdir()) == [], "its folder of drafts is removed"
    core.child.close()
    core.start()
    core.next(StoreReady)
    core.child.close()
    assert core.child.wait(30) is not None, "it ends with its lifeline"


def test_strange_messages_are_dropped(core: Core, pool: Pool, tmp_path: Path) -> None:
    core.next(StoreReady)
    for body in (b"", b"\xc1", b"x" * 1000, encode(StoreReady(0, 0, 1))):
        core.socket.send_multipart([core.role.encode(), body])
    begin(core, pool, tmp_path)
    deadline = time.monotonic() + 30
    while core.log.count("is dropped") < 4:
        assert time.monotonic() < deadline, core.log
        core.next(StoreFigures)


def test_a_role_of_no_place_is_refused(tmp_path: Path) -> None:
    core = Core(tmp_path, "store7")
    assert core.child.wait(30) == 1
    assert "error: --role store7: this engine has no such place" in core.log
    core.close()
