"""Sockets for other nodes: which peers come in, over which endpoint."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from engines import wait_until
from ppengine.common import cluster, curve
from ppengine.common.cluster import NODE_KEY, SERVER_KEY, Cluster, NodeKeys
from ppengine.common.config import ConfigError, EngineConfig, Profile
from ppengine.common.profile_sections import ModelConfig, ParallelConfig
from ppengine.common.zap import ZapHandler
from ppengine.protocol.keys import KeyFileError
from ppengine.stage.edge_addresses import CoreBook
from ppengine.stage.meeting import meet
from ppengine.stage.wire import SupersededError, Wire
from ppengine.supervisor import boot

Socket = zmq.Socket[bytes]
PORTS = {"steps": 7000, "collect": 7001, "agent": 7002, "faults": 7003, "stores": 7004}


class Sockets:
    """A context whose sockets are closed before it ends: the thread of a handler closes its own."""

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.context.setsockopt(zmq.LINGER, 0)
        self._open: list[Socket] = []

    def socket(self, kind: int) -> Socket:
        made = self.context.socket(kind)
        self._open.append(made)
        return made

    def close(self) -> None:
        for one in self._open:
            one.close(linger=0)
        self.context.term()


@pytest.fixture
def context() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


def bound(context: Sockets, folder: Path) -> tuple[Socket, str, list[str]]:
    """Return a ROUTER for this host and for nodes, its TCP endpoint, and the refusals."""
    refused: list[str] = []
    cluster.make_keys(folder)
    ZapHandler(context.context, {curve.NODES: cluster.node_accepts(folder)}, refused.append)
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{folder}/before")
    (port,) = {cluster.free_ports("127.0.0.1")["steps"]}
    cluster.bind(router, folder, f"tcp://127.0.0.1:{port}")
    router.bind(f"ipc://{folder}/after")
    return router, f"tcp://127.0.0.1:{port}", refused


def heard(router: Socket, ms: int = 3000) -> bytes | None:
    return router.recv_multipart()[1] if router.poll(ms) else None


def test_nodes_come_by_tcp_with_their_key_and_this_host_by_files_without(context: Sockets, tmp_path: Path) -> None:
    router, endpoint, refused = bound(context, tmp_path)
    for name in ("before", "after"):
        local = context.socket(zmq.DEALER)
        local.connect(f"ipc://{tmp_path}/{name}")
        local.send(name.encode())
        assert heard(router) == name.encode()
    node = context.socket(zmq.DEALER)
    cluster.be_node(node, tmp_path)
    node.connect(endpoint)
    node.send(b"node")
    assert heard(router) == b"node"
    assert refused == []


def test_strangers_do_not_come_in(context: Sockets, tmp_path: Path) -> None:
    router, endpoint, refused = bound(context, tmp_path)
    plain = context.socket(zmq.DEALER)
    plain.connect(endpoint)
    plain.send(b"plain")
    keys = cluster.read_node_keys(tmp_path)
    other = context.socket(zmq.DEALER)
    curve.be_client(other, curve.make_keypair(), keys.server)
    other.connect(endpoint)
    other.send(b"other key")
    assert heard(router, 500) is None
    wait_until(lambda: refused, "the other key is refused")
    assert all(line.startswith("refused key ") for line in refused)


def test_without_a_handler_nobody_comes_in(context: Sockets, tmp_path: Path) -> None:
    cluster.make_keys(tmp_path)
    router = context.socket(zmq.ROUTER)
    port = cluster.free_ports("127.0.0.1")["steps"]
    cluster.bind(router, tmp_path, f"tcp://127.0.0.1:{port}")
    node = context.socket(zmq.DEALER)
    cluster.be_node(node, tmp_path)
    node.connect(f"tcp://127.0.0.1:{port}")
    node.send(b"node")
    assert heard(router, 500) is None


def test_keys_are_this_users_alone_and_the_server_secret_stays_at_home(tmp_path: Path) -> None:
    cluster.make_keys(tmp_path)
    for name in (SERVER_KEY, NODE_KEY):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    kept = cluster.read_keys(tmp_path)
    assert cluster.read_node_keys(tmp_path).own.secret not in kept[SERVER_KEY].decode()
    (tmp_path / NODE_KEY).unlink()
    with pytest.raises(FileNotFoundError):
        cluster.read_node_keys(tmp_path)
    cluster.write_keys(tmp_path, kept)
    assert cluster.read_keys(tmp_path) == kept
    (tmp_path / NODE_KEY).write_text("{}")
    with pytest.raises(KeyFileError, match="has no keys of a node"):
        cluster.read_node_keys(tmp_path)
    assert "secret" not in repr(NodeKeys("ab", curve.make_keypair())).lower()


def config(run_dir: str, node: str = "") -> EngineConfig:
    return EngineConfig(
        id="abcdef", name="x", epoch="e", profile=Profile(name="x", model=ModelConfig(path="/m")), model_path="/m",
        model_type="llama", layers=[(0, 1)], max_model_len=8, run_dir=run_dir, ring_dir="/rings", started_wall=0.0,
        cluster=Cluster("10.0.0.1", PORTS), node=node,
    )  # fmt: skip


def test_endpoints_of_the_own_host_are_files_and_those_of_a_node_tcp() -> None:
    assert config("/run/x").endpoint("steps") == "ipc:///run/x/steps"
    assert config("/run/x", node="b").endpoint("steps") == "tcp://10.0.0.1:7000"
    assert config("/run/x", node="b").node_name == "b"
    assert config("/run/x").node_name == socket.gethostname()


@pytest.mark.parametrize(
    ("parallel", "ray", "error"),
    [
        ({"placement": "SPREAD"}, "", "parallel.placement is set; it needs parallel.executor=ray"),
        ({"listen": "tcp://10.0.0.1:7000"}, "", "parallel.listen is set; it needs parallel.executor=ray"),
        (
            {"executor": "ray", "placement": "SPREAD"},
            "",
            "parallel.placement is SPREAD; it needs a Ray cluster",
        ),
        ({"executor": "ray"}, "", ""),
        ({"executor": "ray", "placement": "STRICT_PACK"}, "10.0.0.1:6379", ""),
    ],
)
def test_other_nodes_need_a_cluster(
    parallel: dict[str, str], ray: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray)
    profile = Profile(name="x", model=ModelConfig(path="/m"), parallel=ParallelConfig(**parallel))  # type: ignore[arg-type]
    if error:
        with pytest.raises(ConfigError, match=error):
            boot.reach_of(profile)
    else:
        assert boot.reach_of(profile) is None


def test_ports_follow_the_address_of_the_profile_or_are_free_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    parallel = ParallelConfig(executor="ray", listen="tcp://10.0.0.1:7000")
    fixed = boot.reach_of(Profile(name="x", model=ModelConfig(path="/m"), parallel=parallel))
    assert fixed == Cluster("10.0.0.1", PORTS)
    monkeypatch.setattr(cluster, "_ANYWHERE", ("127.0.0.1", 9))  # A machine of tests may have no other address.
    free = boot.reach_of(Profile(name="x", model=ModelConfig(path="/m"), parallel=ParallelConfig(executor="ray")))
    assert free is not None and free.address == "127.0.0.1" and len(set(free.ports.values())) == 5


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[fd00::1]"])
def test_an_address_that_other_nodes_do_not_reach_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    parallel = ParallelConfig(executor="ray", listen=f"tcp://{host}:7000")
    with pytest.raises(ConfigError, match="must have an IPv4 address that other nodes reach"):
        boot.reach_of(Profile(name="x", model=ModelConfig(path="/m"), parallel=parallel))


def test_a_loopback_address_of_ray_is_none_for_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the head's pod of KubeRay: the default route has the address."""
    asked: list[tuple[str, int]] = []

    class Probe:
        def __init__(self, *_: object) -> None:
            self._to = ""

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, where: tuple[str, int]) -> None:
            asked.append(where)
            self._to = where[0]

        def getsockname(self) -> tuple[str, int]:
            return ("127.0.0.1" if self._to.startswith("127.") else "10.1.2.3"), 5

    monkeypatch.setattr(cluster.sockets, "socket", Probe)
    assert cluster.own_address("127.0.0.1:6379") == "10.1.2.3"
    assert cluster.own_address("10.0.0.1:6379") == "10.1.2.3"
    assert [host for host, _ in asked] == ["127.0.0.1", "192.0.2.1", "10.0.0.1"]


class Link:
    """The core's side of a stage's link, in one process: addresses by name."""

    def __init__(self) -> None:
        self.known: dict[str, object] = {}
        self.edges: dict[str, object] = {}
        self.asked = 0

    def send(self, message: object) -> None:
        name = getattr(message, "name", "")
        if hasattr(message, "port"):
            self.known[name] = message
        else:
            self.asked += 1
            if name in self.known:
                self.edges[name] = self.known[name]

    def receive(self, timeout_ms: int) -> list[object]:
        return []


def test_two_nodes_meet_through_the_core() -> None:
    link = Link()
    ends: dict[bool, Wire] = {}

    def join(upstream: bool) -> None:
        book = CoreBook(link, "127.0.0.1", int(not upstream), 0, 3)  # type: ignore[arg-type]
        ends[upstream] = meet(book, "e0", upstream, int(upstream), lambda: False)

    threads = [threading.Thread(target=join, args=(upstream,)) for upstream in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert ends[True].push([memoryview(b"hidden")]) == []
    into = bytearray(6)
    ends[False].receive(memoryview(into))
    assert bytes(into) == b"hidden"
    for wire in ends.values():
        wire.close()


def test_an_address_of_an_older_generation_is_none() -> None:
    link = Link()
    CoreBook(link, "127.0.0.1", 1, 0, 2).publish("e0", 9, b"k")  # type: ignore[arg-type]
    book = CoreBook(link, "127.0.0.1", 0, 0, 3)  # type: ignore[arg-type]
    assert book.find("e0") is None
    assert book.find("e0") is None, "it has come meanwhile, and is of generation 2"
    assert link.asked == 1, "questions have a least distance"


def test_strangers_at_the_port_do_not_keep_two_stages_from_meeting() -> None:
    """More callers than are taken in, which say nothing, or the wrong thing."""
    link, ends = Link(), dict[bool, Wire]()
    waiting = threading.Thread(target=lambda: ends.update({False: _met(link, upstream=False)}))
    waiting.start()
    wait_until(lambda: "e0" in link.known, "the address is known")
    port = link.known["e0"].port  # type: ignore[attr-defined]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for stranger in strangers[::2]:
        stranger.sendall(b"x" * 64)
    began = time.monotonic()
    ends[True] = _met(link, upstream=True)
    waiting.join(10)
    assert not waiting.is_alive() and time.monotonic() - began < 5
    for one in (*strangers, *ends.values()):
        one.close()


def _met(link: Link, *, upstream: bool) -> Wire:
    book = CoreBook(link, "127.0.0.1", int(not upstream), 0, 3)  # type: ignore[arg-type]
    return meet(book, "e0", upstream, int(upstream), lambda: False)


def test_a_stopped_node_loses_no_message(context: Sockets, tmp_path: Path) -> None:
    """A process that a signal has stopped answers no heartbeat; its kernel does."""
    router, endpoint, _ = bound(context, tmp_path)
    code = (
        "import sys, zmq, pathlib; from ppengine.common import cluster; s = zmq.Context().socket(zmq.DEALER); "
        "s.identity = b's1.0'; cluster.be_node(s, pathlib.Path(sys.argv[1])); s.connect(sys.argv[2]); s.send(b'here')\n"
        "while True: print(s.recv().decode(), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), endpoint], stdout=subprocess.PIPE, text=True
    ) as node:
        assert node.stdout is not None
        assert heard(router, 10_000) == b"here"
        for step in range(1, 10):
            if step == 2:
                os.kill(node.pid, signal.SIGSTOP)
            router.send_multipart([b"s1.0", b"%d" % step])
            time.sleep(0.5)
        os.kill(node.pid, signal.SIGCONT)
        assert [node.stdout.readline().strip() for _ in range(9)] == [str(step) for step in range(1, 10)]
        node.kill()


def test_a_listener_that_does_not_know_the_key_is_left(tmp_path: Path) -> None:
    """An impostor at the address gets no message: it cannot prove that it has the key."""
    link = Link()
    left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        CoreBook(link, "127.0.0.1", 1, 0, 1).publish("e0", impostor.getsockname()[1], b"k" * 32)  # type: ignore[arg-type]
        caller = threading.Thread(target=lambda: _called(link, left.is_set))
        caller.start()
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(b"0" * 32)
            assert len(connection.recv(64, socket.MSG_WAITALL)) == 64
            connection.sendall(b"1" * 32)
            assert connection.recv(1) == b""
        left.set()
        caller.join(10)
        assert not caller.is_alive()


def _called(link: Link, left: Callable[[], bool]) -> None:
    with pytest.raises(SupersededError):
        meet(CoreBook(link, "127.0.0.1", 0, 0, 1), "e0", True, 1, left)  # type: ignore[arg-type]
