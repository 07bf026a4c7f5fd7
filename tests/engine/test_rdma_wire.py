"""Edges by RDMA: the agreement of two hosts, and with NIXL installed the bytes, by UCX's TCP in place of an adapter."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ppengine.stage import rdma_agent, rdma_meeting
from ppengine.stage.connect import Connector
from ppengine.stage.edge import Edge
from ppengine.stage.rdma_agent import NoRdmaError, missing
from ppengine.stage.rdma_meeting import receive_by_rdma, send_by_rdma
from ppengine.stage.rdma_wire import RdmaWire
from ppengine.stage.transport import WireReceiver, WireSender
from ppengine.stage.wire import PeerLostError, SupersededError, Wire
from stage_helpers import hidden_states, make_ring

NIXL = any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13"))
with_nixl = pytest.mark.skipif(not NIXL, reason="NIXL is not installed: pip install 'ppconsole[rdma]'")
KEY = b"k" * 32
RING = 64 * 1024


class Ends:
    """Two ends of a connection, as if their stages had met. `left`: both must leave it."""

    def __init__(self, keys: tuple[bytes, bytes] = (KEY, KEY)) -> None:
        self.left = False
        with socket.create_server(("127.0.0.1", 0)) as listener:
            caller = socket.create_connection(listener.getsockname())
            answered, _ = listener.accept()
        self.sender = Wire(caller, 1, lambda: self.left, key=keys[0])
        self.receiver = Wire(answered, 0, lambda: self.left, key=keys[1])

    def agree(self) -> list[Wire | Exception]:
        """Return what each side's agreement gives: the sender's, the receiver's."""
        with ThreadPoolExecutor(2) as pool:
            sides: list[Callable[[], Wire]] = [
                lambda: send_by_rdma(self.sender, RING), lambda: receive_by_rdma(self.receiver, RING)
            ]  # fmt: skip
            calls = [pool.submit(side) for side in sides]
            return [call.exception() or call.result() for call in calls]  # type: ignore[misc]


@pytest.fixture
def software(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let UCX use TCP on loopback."""
    monkeypatch.setenv(rdma_agent.TRANSPORTS, "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.fixture
def wires(software: None) -> Iterator[tuple[Ends, Wire, Wire]]:
    ends = Ends()
    sender, receiver = ends.agree()
    assert isinstance(sender, Wire) and isinstance(receiver, Wire), (sender, receiver)
    yield ends, sender, receiver
    sender.close()
    receiver.close()


@with_nixl
def test_hidden_states_arrive_bit_for_bit_through_a_ring_that_is_smaller(
    tmp_path: Path, wires: tuple[Ends, Wire, Wire]
) -> None:
    _, send, receive = wires
    assert (send.carrier, receive.carrier) == ("RDMA", "RDMA")
    # 384 bytes to 1.1 MB, through a ring of 64 KiB.
    tokens = [1, 7, 3000, 1, 900, 64, 2000]
    sender = WireSender(Edge(send, True, make_ring(tmp_path, "send")), make_ring(tmp_path, "main"))
    receiver = WireReceiver(Edge(receive, False, make_ring(tmp_path, "receive")), max(tokens), 48, torch.float64)
    for step, count in enumerate(tokens, 1):
        receiver.expect(step, count)

    def send_all() -> None:
        for step, count in enumerate(tokens, 1):
            sender.put(step, hidden_states(step, count, torch.float64))

    thread = threading.Thread(target=send_all)
    thread.start()
    for step, count in enumerate(tokens, 1):
        assert torch.equal(receiver.take(step), hidden_states(step, count, torch.float64))
    thread.join()
    sender.finish(20)


@with_nixl
def test_a_sender_without_room_waits_for_the_receiver_and_leaves_with_the_generation(
    wires: tuple[Ends, Wire, Wire],
) -> None:
    ends, send, receive = wires
    rest = send.push([memoryview(bytes(3 * RING))])
    assert sum(map(len, rest)) == 2 * RING, "the ring is the bound of what a sender may have under way"
    assert send.push(rest) == rest
    into = memoryview(bytearray(RING))
    receive.receive(into)
    assert sum(map(len, send.push(rest))) < 2 * RING
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(send.send, [memoryview(bytes(9 * RING))])
        ends.left = True
        with pytest.raises(SupersededError):
            waits.result(20)


@with_nixl
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_end_that_closes_is_a_lost_peer(side: str, wires: tuple[Ends, Wire, Wire]) -> None:
    _, send, receive = wires
    if side == "sender":
        send.push([memoryview(b"whole")])
        send.close()
        into = memoryview(bytearray(5))
        receive.receive(into)
        assert bytes(into) == b"whole", "bytes that were written come before the end"
        with pytest.raises(PeerLostError, match="lost stage 0: it closed the connection"):
            receive.receive(into)
    else:
        receive.close()
        with pytest.raises(PeerLostError, match="lost stage 1: it closed the connection"):
            send.check_sendable()
        with pytest.raises(PeerLostError, match="lost stage 1"):
            send.send([memoryview(bytes(2 * RING))])


@with_nixl
@pytest.mark.parametrize("count", [RING + 1, 2**63])
def test_a_count_that_cannot_be_is_refused(count: int, wires: tuple[Ends, Wire, Wire]) -> None:
    ends, send, receive = wires
    ends.sender.send([memoryview(count.to_bytes(8, "little"))])
    with pytest.raises(PeerLostError, match=rf"RDMA: it wrote {count} bytes, 0 to {RING} are possible"):
        receive.receive(memoryview(bytearray(1)))
    ends.receiver.send([memoryview(count.to_bytes(8, "little"))])
    with pytest.raises(PeerLostError, match=rf"RDMA: it took {count} bytes, 0 to 0 are possible"):
        send.push([memoryview(b"x")])


@with_nixl
def test_another_key_and_changed_bytes_are_no_offer(software: None) -> None:
    ends = Ends((KEY, b"x" * 32))
    with ThreadPoolExecutor(1) as pool:
        receives = pool.submit(receive_by_rdma, ends.receiver, RING)
        with pytest.raises(PeerLostError, match="stage 1 did not send this offer of RDMA: its HMAC differs"):
            send_by_rdma(ends.sender, RING)
        ends.sender.close()
        with pytest.raises(PeerLostError, match="lost stage 0"):
            receives.result(20)


def test_without_rdma_both_sides_say_why_and_the_connection_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"sender": "", "receiver": "no adapter there"}

    class Agent:
        address, metadata = 4096, b"metadata"

        def __init__(self, size: int) -> None:
            side = "receiver" if threading.current_thread().name.endswith("_1") else "sender"
            if reasons[side]:
                raise NoRdmaError(reasons[side])
            self.view = memoryview(bytearray(size))

        def reach(self, metadata: bytes, address: int) -> None:
            raise NoRdmaError("the adapters do not reach each other")

        def progress(self) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(rdma_meeting, "RdmaAgent", Agent)
    for reasons["receiver"], reasons["sender"], mine, theirs in (
        ("no adapter there", "", "stage 1: no adapter there", "no adapter there"),
        ("", "no package here", "no package here", "stage 0: no package here"),
        ("", "", "the adapters do not reach each other", "stage 0: the adapters do not reach each other"),
    ):
        ends = Ends()
        results = ends.agree()
        assert [str(each) for each in results] == [mine, theirs]
        assert all(isinstance(each, NoRdmaError) for each in results)
        ends.sender.send([memoryview(b"by TCP")])
        into = memoryview(bytearray(6))
        ends.receiver.receive(into)
        assert bytes(into) == b"by TCP"


def test_only_a_profile_that_allows_it_falls_back_to_tcp() -> None:
    def refuses(wire: Wire) -> RdmaWire:
        raise NoRdmaError("stage 1: no adapter there")

    def edge_by(carrier: str) -> Edge:
        config: Any = SimpleNamespace(profile=SimpleNamespace(parallel=SimpleNamespace(edges=carrier)))
        unused: Any = None
        edge = Edge(Ends().sender, True)
        Connector(config, 0, 0, unused, unused, unused, lambda: False)._by_rdma(edge, refuses)
        return edge

    assert edge_by("auto").wire.carrier == edge_by("tcp").wire.carrier == "TCP"
    with pytest.raises(PeerLostError, match=r"no RDMA with stage 1: stage 1: no adapter there; with .*auto TCP"):
        edge_by("rdma")


def test_a_frame_that_is_too_long_is_refused() -> None:
    ends = Ends()
    ends.receiver.send([memoryview((2**31).to_bytes(4, "little") + bytes(8))])
    with pytest.raises(PeerLostError, match="stage 1 began with 2147483648 bytes, at most 65536 are right"):
        send_by_rdma(ends.sender, RING)


def test_the_reason_names_the_package_or_the_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(rdma_agent.TRANSPORTS, raising=False)
    monkeypatch.setattr(rdma_agent, "find_spec", lambda name: None)
    assert re.fullmatch(r"the package nixl is not installed: pip install .*\[rdma\]'", missing())
    monkeypatch.setattr(rdma_agent, "find_spec", lambda name: name)
    monkeypatch.setattr(rdma_agent, "_ADAPTERS", tmp_path)
    assert missing() == f"this host has no RDMA adapter: {tmp_path} is empty"
    (tmp_path / "mlx5_0").touch()
    assert missing() == ""
    assert os.environ.get("UCX_TLS") in (None, "tcp")
