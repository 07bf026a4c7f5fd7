"""Edges between two real processes: exact in every dtype, several in flight, tokens back, a dead peer."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace as Struct
from typing import cast

import numpy as np
import pytest
import torch
from ppengine.common.ring import Gauge, Kind, RingReader, shape_text
from ppengine.stage.edge import Edge
from ppengine.stage.edge_addresses import FolderBook
from ppengine.stage.meeting import meet
from ppengine.stage.runner import Runner
from ppengine.stage.token_return import HostTokenTable
from ppengine.stage.transport import MAX_UNDELIVERED, WireReceiver, WireSender
from ppengine.stage.wire import PeerLostError, SupersededError, Wire
from stage_helpers import BIG, DTYPES, RETURNS, TOKENS, WIDTH, hidden_states, make_ring, start_upstream, until


def edge_to(folder: Path) -> Edge:
    return Edge(meet(FolderBook(folder, 1), "e0", False, 0, lambda: False), False, make_ring(folder, "receive"))


def assert_both_sides_agree(sent: RingReader, received: RingReader, count: int) -> None:
    """Every message has a record on each side: number, step, bytes and shape are the same, all three times are set."""
    pairs = list(zip(sent.latest(count + 1), received.latest(count + 1), strict=True))
    assert [one.detail for one, _ in pairs] == list(range(1, count + 1))
    for one, other in pairs:
        assert (one.detail, one.step, one.size, one.code) == (other.detail, other.step, other.size, other.code)
        assert one.enqueued_ns <= one.returned_ns <= one.done_ns
        assert other.enqueued_ns <= other.returned_ns <= other.done_ns
        assert (one.kind, one.peer, other.kind, other.peer) == (Kind.SEND, 1, Kind.RECEIVE, 0)


def test_hidden_states_arrive_bit_for_bit(tmp_path: Path) -> None:
    process = start_upstream(tmp_path, "hidden")
    try:
        edge = edge_to(tmp_path)
        # Nobody receives yet, and nobody waits for that: the kernel holds them.
        assert process.wait(20) == 0
        ring = RingReader(tmp_path / "main.ring")
        assert ring.gauge(Gauge.OUTBOX) == 0
        step = 0
        for dtype in DTYPES:
            receiver = WireReceiver(edge, 64, WIDTH, dtype)
            for offset, tokens in enumerate(TOKENS):
                receiver.expect(step + 1 + offset, tokens)
            for tokens in TOKENS:
                step += 1
                taken = receiver.take(step)
                assert taken.dtype == dtype and tuple(taken.shape) == (tokens, WIDTH)
                assert torch.equal(taken, hidden_states(step, tokens, dtype))
        assert_both_sides_agree(RingReader(tmp_path / "send.ring"), RingReader(tmp_path / "receive.ring"), step)
    finally:
        process.kill()
        process.wait(60)
        process.close()


def is_ring(path: Path) -> bool:
    """Whether a ring is there, whole: it is a file before it is one."""
    try:
        RingReader(path).close()
    except (OSError, ValueError):
        return False
    return True


def test_what_is_too_big_for_the_kernel_waits_on_a_thread(tmp_path: Path) -> None:
    process = start_upstream(tmp_path, "big")
    try:
        edge = edge_to(tmp_path)
        until(lambda: all(is_ring(tmp_path / f"{name}.ring") for name in ("main", "send")), "the upstream's rings")
        ring, sent = RingReader(tmp_path / "main.ring"), RingReader(tmp_path / "send.ring")
        # As many as allowed are under way; the recorder shows the first one open.
        until(lambda: ring.gauge(Gauge.OUTBOX) == MAX_UNDELIVERED, "sends under way")
        (send,) = sent.latest(9)
        assert (send.kind, send.step, send.peer, send.done_ns, send.detail) == (Kind.SEND, 1, 1, 0, 1)
        assert send.returned_ns >= send.enqueued_ns
        until(lambda: Kind.ROOM in {one.kind for one in ring.latest(9)}, "that there is no room is told")
        (room,) = (one for one in ring.latest(9) if one.kind == Kind.ROOM)
        assert (room.step, room.peer, room.done_ns) == (MAX_UNDELIVERED + 1, 1, 0), "the step loop waits for the peer"
        assert shape_text(send.size, send.code) == f"float64[{BIG[0]}, 48] {BIG[0] * WIDTH * 8} B"
        receiver = WireReceiver(edge, max(BIG), WIDTH, torch.float64)
        for step, tokens in enumerate(BIG, 1):
            receiver.expect(step, tokens)
        for step, tokens in enumerate(BIG, 1):
            assert torch.equal(receiver.take(step), hidden_states(step, tokens, torch.float64))
        until(lambda: ring.gauge(Gauge.OUTBOX) == 0, "all delivered")
        assert_both_sides_agree(sent, RingReader(tmp_path / "receive.ring"), len(BIG))
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(60)
        process.close()


@pytest.mark.parametrize(
    ("tokens", "text", "blamed"),
    [
        (TOKENS[0], f"m1 has {TOKENS[0]} tokens, so stage 1 expected a wrong message", (1, 0)),
        (TOKENS[0] + 1, "stage 0 sent message 1", (0, None)),
    ],
)
def test_stage_that_expects_more_than_its_step_has_blames_itself(
    tmp_path: Path, tokens: int, text: str, blamed: tuple[int, int | None]
) -> None:
    process = start_upstream(tmp_path, "hidden")
    try:
        receiver, stage = WireReceiver(edge_to(tmp_path), 8, WIDTH, DTYPES[0]), cast(Runner, Struct(stage=1, rank=0))
        receiver.expect(1, TOKENS[0] + 1)
        with pytest.raises(PeerLostError, match=text) as raised:
            Runner._take(stage, receiver, 1, tokens)
        assert (raised.value.peer, raised.value.rank) == blamed
    finally:
        process.kill()
        process.wait(60)
        process.close()


@pytest.mark.parametrize(
    ("step", "shape", "dtype", "due"),
    [
        (2, (1, WIDTH), torch.float64, r"message 1 \(m2, float64\[1, 48\] 384 B\)"),
        (1, (2, WIDTH), torch.float64, r"message 1 \(m1, float64\[2, 48\] 768 B\)"),
        (1, (2, WIDTH), torch.float32, r"message 1 \(m1, float32\[2, 48\] 384 B\)"),
    ],
    ids=["step", "size", "type"],
)
def test_what_was_not_due_is_refused(
    tmp_path: Path, step: int, shape: tuple[int, int], dtype: torch.dtype, due: str
) -> None:
    process = start_upstream(tmp_path, "hidden")
    try:
        edge = edge_to(tmp_path)
        with pytest.raises(PeerLostError, match=rf"stage 0 sent .*1, 48\] 384 B\), due was {due}") as raised:
            edge.receive(torch.zeros(shape, dtype=dtype), step)
        assert raised.value.peer == 0
    finally:
        process.kill()
        process.wait(60)
        process.close()


def test_a_message_is_under_way_from_its_hand_over(tmp_path: Path) -> None:
    """One that waits for the send thread is recorded as of the moment at which the step loop is done with it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = Wire(socket.create_connection(listener.getsockname()), 1, lambda: False)
        answered, _ = listener.accept()
    sender = WireSender(Edge(wire, True, make_ring(tmp_path, "send")), make_ring(tmp_path, "main"))
    deliver, over = sender._deliver, threading.Event()
    sender._deliver = lambda parcel: (over.wait(), deliver(parcel))  # type: ignore[method-assign,assignment]
    sender._count(1)  # As if another one were on the thread.
    sender.put(1, torch.zeros(4, dtype=torch.int64))
    handed_ns = time.monotonic_ns()
    over.set()
    ring = RingReader(tmp_path / "send.ring")
    until(lambda: bool(ring.latest(1)), "the message is sent")
    (record,) = ring.latest(1)
    assert record.enqueued_ns <= handed_ns < record.returned_ns
    sender.close()
    answered.close()


def test_a_wait_is_left_when_told_so(tmp_path: Path) -> None:
    process = start_upstream(tmp_path, "silent")
    told = threading.Event()
    try:
        edge = Edge(meet(FolderBook(tmp_path, 1), "e0", False, 0, told.is_set), False)
        threading.Timer(0.2, told.set).start()
        with pytest.raises(SupersededError):
            edge.receive(torch.zeros(4), 1)
    finally:
        process.kill()
        process.wait(60)
        process.close()


def test_a_rendezvous_is_left_when_told_so(tmp_path: Path) -> None:
    for upstream in (True, False):
        with pytest.raises(SupersededError):
            meet(FolderBook(tmp_path, 1), "e0", upstream, 0, lambda: True)
    assert not list(tmp_path.iterdir())


def test_who_does_not_know_the_key_is_turned_away(tmp_path: Path) -> None:
    answered: list[Wire] = []
    thread = threading.Thread(
        target=lambda: answered.append(meet(FolderBook(tmp_path, 1), "e0", False, 0, lambda: False))
    )
    thread.start()
    path = tmp_path / "g1-e0.edge"
    until(path.exists, "the address")
    assert path.stat().st_mode & 0o777 == 0o600
    address = FolderBook(tmp_path, 1).find("e0")
    assert address is not None
    with socket.create_connection((address.host, address.port)) as stranger:
        assert len(stranger.recv(64)) == 32, "its nonce"
        stranger.sendall(b"0" * 64)
        assert stranger.recv(1) == b""
    assert not answered
    process = start_upstream(tmp_path, "silent")
    try:
        thread.join(20)
        assert answered and not path.exists()
    finally:
        process.kill()
        process.wait(60)
        process.close()


def test_two_stages_meet_with_more_descriptors_than_a_select_takes(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"at most {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    book = FolderBook(tmp_path, 1)
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        first = opened.enter_context(Path("/dev/null").open("rb")).fileno()
        while first < 1024:
            first = os.dup(first)
            opened.callback(os.close, first)
        with ThreadPoolExecutor(2) as threads:
            late = time.monotonic() + 20
            ends = [
                threads.submit(meet, book, "e0", upstream, 0, lambda: time.monotonic() > late)
                for upstream in (True, False)
            ]
            for end in ends:
                opened.callback(end.result().close)


def test_tokens_come_back_in_step_order(tmp_path: Path) -> None:
    process = start_upstream(tmp_path, "tokens")
    try:
        table = HostTokenTable(make_ring(tmp_path, "first"), edge_to(tmp_path))
        slots = [np.array([0, 1, 2]), np.array([1, 2]), np.array([0, 70, 1])]
        for step, (into, tokens) in enumerate(zip(slots, RETURNS, strict=True)):
            assert len(into) == len(tokens)
            table.expect(step + 1, into)
        # Slot 2 was sampled last by the second return: the third need not be taken in.
        assert table.tokens(np.array([2])).tolist() == [9]
        assert table.tokens(np.array([1, 70, 0, 2])).tolist() == [12, 11, 10, 9]
        table.forget([70])
        with pytest.raises(ValueError, match="slot 70 has no sampled token"):
            table.tokens(np.array([70]))
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(60)
        process.close()


def test_a_wait_for_tokens_that_ends_with_the_peer_is_over_in_the_ring(tmp_path: Path) -> None:
    process = start_upstream(tmp_path, "silent")
    try:
        table = HostTokenTable(make_ring(tmp_path, "first"), edge_to(tmp_path))
        table.expect(1, np.array([0]))
        process.kill()
        with pytest.raises(PeerLostError, match="lost stage 0"):
            table.tokens(np.array([0]))
        record = RingReader(tmp_path / "first.ring").record(1)
        assert record is not None and record.kind == Kind.TOKEN_RETURN and record.done_ns > 0
    finally:
        process.kill()
        process.wait(60)
        process.close()


def test_a_killed_peer_is_noticed_at_once(tmp_path: Path) -> None:
    """Within a second in the best of three tries."""
    tries: list[float] = []
    while len(tries) < 3 and not any(took < 1.0 for took in tries):
        folder = tmp_path / f"try{len(tries)}"
        folder.mkdir()
        tries.append(kill_peer(folder))
    assert tries[-1] < 1.0, tries


def kill_peer(tmp_path: Path) -> float:
    """Return after how many seconds the loss of a killed peer is raised."""
    process = start_upstream(tmp_path, "silent")
    try:
        receiver = WireReceiver(edge_to(tmp_path), 8, WIDTH, torch.float32)
        receiver.expect(1, 8)
        process.kill()
        killed = time.monotonic()
        with pytest.raises(PeerLostError, match="lost stage 0: it closed the connection"):
            receiver.take(1)
        took = time.monotonic() - killed
        with pytest.raises(PeerLostError, match="lost stage 0"):
            receiver.edge.finish(receiver.edge.send(torch.zeros(4)))
        return took
    finally:
        process.kill()
        process.wait(60)
        process.close()
