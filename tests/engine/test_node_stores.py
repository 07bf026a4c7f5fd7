"""Stores on another node: real processes that come to the core by TCP, and their ends as the driver hears of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq
from engines import wait_until
from ppengine.common import cluster, curve
from ppengine.common.cluster import Cluster
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import ModelConfig
from ppengine.common.zap import ZapHandler
from ppengine.protocol.discovery import process_start
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.store_messages import (
    BackendSpec,
    Fetch,
    Fetched,
    FromStore,
    Put,
    Stored,
    StoreFigures,
    StoreReady,
    UseBackends,
    UseNamespace,
    Weights,
)
from ppengine.store.backend_kinds import known_kinds
from ppengine.supervisor.launch.node_stores import NodeStores, StoreNews
from store_world import KEY, SLOT_BYTES, Pool

PATIENCE_MS = 60_000
ROLE = "store0"
T = TypeVar("T")


class Core:
    """The core's end of the socket `stores`, for other nodes alone."""

    def __init__(self, folder: Path) -> None:
        cluster.make_keys(folder)
        self._reach = Cluster("127.0.0.1", cluster.free_ports("127.0.0.1"))
        config = EngineConfig(
            id="e", name="t", epoch="p", profile=Profile(name="t", model=ModelConfig(path=str(folder))),
            model_path=str(folder), model_type="opt", layers=[(0, 2)], max_model_len=64, run_dir=str(folder),
            ring_dir=str(folder), started_wall=0.0, cluster=self._reach, node="b",
        )  # fmt: skip
        (folder / "engine.json").write_bytes(msgspec.json.encode(config))
        self._folder, self._codec, self.refused = folder, Codec(FromStore), list[str]()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open: list[zmq.Socket[bytes]] = []
        ZapHandler(self.context, {curve.NODES: cluster.node_accepts(folder)}, self.refused.append)
        self.bind()

    @property
    def endpoint(self) -> str:
        return self._reach.endpoint("stores")

    def bind(self) -> None:
        self.socket = self.make(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        cluster.bind(self.socket, self._folder, self.endpoint)

    def make(self, kind: int) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        made.linger = 0
        self._open.append(made)
        return made

    def close(self) -> None:
        """Close all sockets but that of the handler, whose thread does so."""
        for one in self._open:
            one.close()
        self.context.term()

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.socket.send_multipart([ROLE.encode(), encode(message)])

    def next(self, kind: type[T]) -> T:
        """Return the next message of a kind; figures and news of weights in between are skipped."""
        while self.socket.poll(PATIENCE_MS):
            name, body = self.socket.recv_multipart()
            message = self._codec.decode(body)
            assert name == ROLE.encode()
            if isinstance(message, kind):
                return message
            assert isinstance(message, StoreFigures | Weights), message
        raise AssertionError(f"no {kind.__name__}: {(self._folder / f'{ROLE}.log').read_text()}")


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    core = Core(tmp_path)
    yield core
    core.close()


@pytest.fixture
def stores(core: Core, tmp_path: Path) -> Iterator[NodeStores]:
    stores = NodeStores(tmp_path)
    yield stores
    stores.stop()


def until(stores: NodeStores, roles: list[str], condition: Callable[[StoreNews], bool]) -> list[StoreNews]:
    """Keep stores until news of one meets a condition; return all news."""
    found: list[StoreNews] = []

    def met() -> bool:
        found.extend(stores.keep(roles))
        return any(map(condition, found))

    wait_until(met, "news of a store", PATIENCE_MS / 1e3)
    return found


def test_a_store_serves_from_its_node_and_another_one_follows_it(
    core: Core, stores: NodeStores, tmp_path: Path
) -> None:
    ((role, pid, code, _),) = stores.keep([ROLE])
    assert (role, code) == (ROLE, None)
    assert core.next(StoreReady) == StoreReady(0, 0, pid, "b", known_kinds())
    pool = Pool()
    try:
        pool.write(0, b"a" * SLOT_BYTES)
        spec = BackendSpec("disk", "files", str(tmp_path / "kv"), 2**30, 60_000)
        core.send(pool.message(), UseNamespace(b"n" * 16), UseBackends([spec]))
        while not any(each.state == "open" for each in core.next(StoreFigures).backends):
            pass
        core.send(Put(1, 1, "disk", KEY, [0], 60_000))
        stored = core.next(Stored)
        assert not stored.error
        core.send(Fetch(2, 1, "disk", [KEY], [[3]], [stored.sum], 60_000))
        assert not core.next(Fetched).error
        assert pool.read(3) == b"a" * SLOT_BYTES
    finally:
        pool.close()
    os.kill(pid, signal.SIGKILL)
    end, start = until(stores, [ROLE], lambda news: news[1] != pid)
    assert end == (ROLE, pid, -9, "killed by SIGKILL")
    assert start == (ROLE, start[1], None, "")
    assert core.next(StoreReady).pid == start[1]
    core.socket.close()
    core.bind()
    assert core.next(StoreReady) == StoreReady(0, 0, start[1], "b", known_kinds()), "it has no job of the core before"
    assert core.refused == []


def test_a_stranger_does_not_come_in_as_a_store(core: Core) -> None:
    plain, other = core.make(zmq.DEALER), core.make(zmq.DEALER)
    for one in (plain, other):
        one.setsockopt(zmq.IDENTITY, ROLE.encode())
    curve.be_client(other, curve.make_keypair(), cluster.read_node_keys(Path(core._folder)).server)
    for one in (plain, other):
        one.connect(core.endpoint)
        one.send(encode(StoreReady(0, 0, 1)))
    wait_until(lambda: core.refused, "the other key is refused")
    assert not core.socket.poll(300)


def test_a_store_that_its_node_needs_no_more_ends(core: Core, stores: NodeStores) -> None:
    ((_, pid, *_),) = stores.keep([ROLE])
    assert until(stores, [], lambda news: news[2] is not None) == [(ROLE, pid, -9, "killed by SIGKILL")]
    assert stores.keep([]) == []


def test_stores_that_are_killed_for_good_are_not_started_again(core: Core, stores: NodeStores) -> None:
    """As at the end of a lease, while a look is under way."""
    ((_, pid, *_),) = stores.keep([ROLE])
    stores.kill()
    assert until(stores, [ROLE], lambda news: news[2] is not None) == [(ROLE, pid, -9, "killed by SIGKILL")]
    assert stores.keep([ROLE]) == []


def test_the_next_actor_ends_a_stopped_store_of_the_one_before(core: Core, stores: NodeStores, tmp_path: Path) -> None:
    ((_, pid, *_),) = stores.keep([ROLE])
    assert core.next(StoreReady).pid == pid
    os.kill(pid, signal.SIGSTOP)
    (tmp_path / "store1.pid").write_text(f"{os.getpid()} 1\n")  # Another process has that pid now.
    successor = NodeStores(tmp_path)
    successor.clear()
    assert until(stores, [], lambda news: news[2] is not None) == [(ROLE, pid, -9, "killed by SIGKILL")]
    assert process_start(pid) is None
