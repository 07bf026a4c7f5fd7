"""What both ends of an edge agree on, the words that order two devices, and headers whose bytes a device carries."""

from __future__ import annotations

import mmap
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppengine.common.ring import Kind, RingReader
from ppengine.stage.edge import Edge
from ppengine.stage.edge_flags import MAGIC, PAGE, RELEASED, EdgeFlags, Flag
from ppengine.stage.edge_offers import HANDLE_BYTES, MAX_FRAME, Offer, RefusedError, consider, propose
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.wire import PeerLostError, SupersededError, Wire
from stage_helpers import WIDTH, make_ring

OFFER = Offer("GPU-1", bytes(range(HANDLE_BYTES)), 1000, 3)


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    """The sender's wire to stage 1, and the receiver's to stage 0."""
    listener = socket.create_server(("127.0.0.1", 0))
    caller = socket.create_connection(listener.getsockname())
    answered, _ = listener.accept()
    with listener, caller, answered:
        yield Wire(caller, 1, lambda: False), Wire(answered, 0, lambda: False)


def beside(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begin `call` on a thread; what is returned waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()

    def result() -> Any:
        thread.join(10)
        return found[0]

    return result


def say(wire: Wire, body: bytes, size: int | None = None) -> None:
    wire.send([memoryview(struct.pack("<I", len(body) if size is None else size)), memoryview(body)])


# --- the handshake ------------------------------------------------------------------------------------------------


def test_an_offer_that_is_accepted_arrives_whole(wires: tuple[Wire, Wire]) -> None:
    sender, receiver = wires
    refusal = beside(lambda: propose(receiver, OFFER))
    opened, why = consider(sender, lambda offer: (offer, "opened"))
    assert opened == (OFFER, "opened") and why == ""
    assert refusal() == ""
    assert not sender.readable and not receiver.readable, "nothing of it is left for the messages"


def test_a_refusal_says_why_to_both(wires: tuple[Wire, Wire]) -> None:
    def refuse(offer: Offer) -> None:
        raise RefusedError(f"{offer.device} is out of reach")

    sender, receiver = wires
    refusal = beside(lambda: propose(receiver, OFFER))
    assert consider(sender, refuse) == (None, "GPU-1 is out of reach")
    assert refusal() == "GPU-1 is out of reach"


def test_where_nothing_is_offered_nothing_is_opened(wires: tuple[Wire, Wire]) -> None:
    sender, receiver = wires
    refusal = beside(lambda: propose(receiver, None))
    assert consider(sender, lambda offer: pytest.fail("opened")) == (None, "stage 1 offers no memory")
    assert refusal() == "stage 1 offers no memory"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"offer": 5}', "Expected `object | null`"),
        (b"{}", "missing required field `offer`"),
        (b'{"offer": null, "path": "/etc"}', "unknown field `path`"),
        (b'{"offer": {"device": "x", "handle": "AAAA", "slot_bytes": 8}}', "a handle of 3 bytes, 64 is right"),
        (b"\x80\x04.", "malformed"),
    ],
    ids=["type", "missing", "unknown", "handle", "pickle"],
)
def test_what_is_no_offer_is_refused(wires: tuple[Wire, Wire], body: bytes, said: str) -> None:
    sender, receiver = wires
    say(receiver, body)
    with pytest.raises(PeerLostError, match=f"stage 1 sent no proposal: .*{said}") as raised:
        consider(sender, lambda offer: offer)
    assert raised.value.peer == 1


def test_a_frame_that_is_too_long_is_not_read(wires: tuple[Wire, Wire]) -> None:
    sender, receiver = wires
    say(receiver, b"", MAX_FRAME + 1)
    with pytest.raises(PeerLostError, match="stage 1 began with 4097 bytes, at most 4096 are right"):
        consider(sender, lambda offer: offer)


def test_the_handshake_is_left_when_told_so(wires: tuple[Wire, Wire]) -> None:
    receiver = wires[1]
    receiver._left = lambda: True
    with pytest.raises(SupersededError):
        propose(receiver, OFFER)


def test_messages_take_the_slots_in_turn() -> None:
    assert [OFFER.offset(number) for number in range(1, 8)] == [1000, 2000, 0, 1000, 2000, 0, 1000]
    for number in range(1, 20):
        assert OFFER.offset(OFFER.before(number)) == OFFER.offset(number), "it waits for its own slot"
        others = {OFFER.offset(other) for other in range(OFFER.before(number) + 1, number)}
        assert OFFER.offset(number) not in others and max(others, default=0) + 1000 <= OFFER.size
    assert Offer("x", OFFER.handle, 7).offset(12) == 0


@pytest.mark.parametrize(("slot_bytes", "slots"), [(0, 1), (8, 0), (-8, 3)])
def test_an_offer_of_nothing_is_refused(slot_bytes: int, slots: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots of {slot_bytes} bytes"):
        Offer("x", OFFER.handle, slot_bytes, slots)


# --- words --------------------------------------------------------------------------------------------------------


def test_words_are_where_the_layout_says(tmp_path: Path) -> None:
    path = tmp_path / "e0.words"
    mine = EdgeFlags(path, create=True)
    theirs = EdgeFlags(path, create=False)
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size == PAGE
    with path.open("r+b") as file, mmap.mmap(file.fileno(), PAGE) as page:
        assert page[:8] == MAGIC
        struct.pack_into("<Q", page, 64, 17)
        struct.pack_into("<Q", page, 128, 1 << 40)
    assert (mine.value(Flag.FILLED), theirs.value(Flag.READ)) == (17, 1 << 40)
    theirs.release(Flag.READ)
    assert mine.value(Flag.READ) == RELEASED and mine.value(Flag.FILLED) == 17
    theirs.close()
    assert path.exists(), "it is the receiver's"
    mine.close()
    assert not list(tmp_path.iterdir())
    mine.release(Flag.FILLED)  # the control thread may come late


def test_a_new_generation_begins_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "e0.words"
    old = EdgeFlags(path, create=True)
    new = EdgeFlags(path, create=True)
    old.release(Flag.FILLED)
    assert new.value(Flag.FILLED) == 0


@pytest.mark.parametrize(("content", "said"), [(b"", "0 bytes, 4096 are right"), (bytes(PAGE), "does not begin with")])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "e0.words"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        EdgeFlags(path, create=False)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    EdgeFlags(tmp_path / "real", create=True)
    (tmp_path / "e0.words").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match=r"e0\.words"):
        EdgeFlags(tmp_path / "e0.words", create=False)


# --- headers ------------------------------------------------------------------------------------------------------


def test_a_header_alone_is_recorded_on_both_sides(wires: tuple[Wire, Wire], tmp_path: Path) -> None:
    sending = Edge(wires[0], True, make_ring(tmp_path, "send"))
    receiving = Edge(wires[1], False, make_ring(tmp_path, "receive"))
    for step, tokens in ((4, 3), (6, 1)):
        like = torch.empty(tokens, WIDTH, dtype=torch.float16, device="meta")
        assert not sending.announce(like, step).rest
        assert receiving.receive_header(like, step) == sending.number
    sent, received = (RingReader(tmp_path / f"{name}.ring").latest(9) for name in ("send", "receive"))
    for one, other, number in zip(sent, received, (1, 2), strict=True):
        assert (one.kind, other.kind, one.detail, other.detail) == (Kind.SEND, Kind.RECEIVE, number, number)
        assert (one.step, one.size, one.code) == (other.step, other.size, other.code)
        assert one.done_ns and other.done_ns


def test_who_waits_for_a_body_takes_no_header_without_one(wires: tuple[Wire, Wire]) -> None:
    sending, receiving = Edge(wires[0], True), Edge(wires[1], False)
    sending.announce(torch.zeros(4), 1)
    with pytest.raises(PeerLostError, match="stage 0 sent a header of kind"):
        receiving.receive(torch.zeros(4), 1)


def test_a_peer_that_has_closed_is_seen_behind_unread_headers(wires: tuple[Wire, Wire]) -> None:
    sending, receiving = Edge(wires[0], True), Edge(wires[1], False)
    receiving.wire.check_open()
    sending.announce(torch.zeros(4), 1)
    receiving.wire.check_open()
    sending.close()
    with pytest.raises(PeerLostError, match="lost stage 0: it closed the connection"):
        receiving.wire.check_open()
    assert receiving.receive_header(torch.zeros(4), 1) == 1


def test_work_goes_on_while_a_message_is_waited_for(wires: tuple[Wire, Wire]) -> None:
    turns: list[int] = []

    def meanwhile() -> bool:
        turns.append(len(turns))
        if len(turns) == 3:
            sending.announce(torch.zeros(4), 1)
        return True

    sending, receiving = Edge(wires[0], True), Edge(wires[1], False, meanwhile=meanwhile)
    assert receiving.receive_header(torch.zeros(4), 1) == 1 and turns[:3] == [0, 1, 2]


# --- tokens on the first stage's card -----------------------------------------------------------------------------


class Waits:
    """Notes what a stream would wait for."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def wait(self, word: Flag, number: int) -> None:
        assert word is Flag.FILLED
        self.numbers.append(number)

    def peer_does(self, number: int, what: str, **more: Any) -> None:
        """What the ledger would be told."""


def test_a_stream_waits_for_the_newest_token_of_its_rows_once(wires: tuple[Wire, Wire], tmp_path: Path) -> None:
    tables = pytest.importorskip("ppengine.stage.backends.cuda.device_tokens", reason="needs cuda-bindings")
    sending, waits = Edge(wires[0], True), Waits()
    tokens = Buffer("newest tokens", "cuda:0")
    table = tables.DeviceTokenTable(make_ring(tmp_path, "main"), Edge(wires[1], False), OFFER, waits, tokens)
    slots = [np.array([0, 1, 2]), np.array([1, 2]), np.array([0, 70, 1])]
    for step, into in enumerate(slots, 1):
        table.expect(step, into)
        sending.announce(torch.empty(len(into), dtype=torch.int64, device="meta"), step)
    assert table.tokens(np.array([2])).tolist() == [-1] and not waits.numbers
    table.arrive()
    assert waits.numbers == [2], "slot 2 was sampled last by the second return"
    for more in ([2, 2], [1, 2], [0, 70]):
        assert table.tokens(np.array(more)).tolist() == [-1, -1]
        table.arrive()
    assert waits.numbers == [2, 3]
    table.forget([70, 500])
    with pytest.raises(ValueError, match="slot 70 has no sampled token"):
        table.tokens(np.array([1, 70]))
