"""The agreement of the two ends of an edge once they have met: whether a device carries its messages.

The receiver offers memory of its card that the sender's device may write. The sender opens it and
says so, or says why it cannot; then messages go through the wire. Both are short JSON frames on the
wire that has just been made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ppengine.stage.wire import PeerLostError, Wire

HANDLE_BYTES = 64
"""Size of a CUDA handle for another process's memory."""
MAX_FRAME = 4096
_LENGTH = struct.Struct("<I")
_Frame = TypeVar("_Frame")
_Opened = TypeVar("_Opened")


class RefusedError(Exception):
    """Memory that was offered cannot be used; one line."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of the receiver's card: `slots` slots of `slot_bytes`, which messages take in turn."""

    device: str
    """UUID of the card."""
    handle: bytes
    slot_bytes: int
    slots: int = 1

    def __post_init__(self) -> None:
        if len(self.handle) != HANDLE_BYTES:
            raise ValueError(f"a handle of {len(self.handle)} bytes, {HANDLE_BYTES} is right")
        if self.slot_bytes < 1 or self.slots < 1:
            raise ValueError(f"{self.slots} slots of {self.slot_bytes} bytes; both must be at least 1")

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    def offset(self, number: int) -> int:
        """Return where message `number`, from 1, begins."""
        return number % self.slots * self.slot_bytes

    def before(self, number: int) -> int:
        """Return the message whose slot message `number` takes; below 1: it is the first one there."""
        return number - self.slots


class _Proposal(msgspec.Struct, forbid_unknown_fields=True):
    offer: Offer | None


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    refusal: str
    """Empty: accepted."""


def propose(wire: Wire, offer: Offer | None) -> str:
    """Offer memory to the sender of this edge; return why it is not used, empty if it is.

    Raises PeerLostError, also for an answer that cannot be read; SupersededError.
    """
    _send(wire, _Proposal(offer))
    return _receive(wire, _Answer).refusal


def consider(wire: Wire, accept: Callable[[Offer], _Opened]) -> tuple[_Opened | None, str]:
    """Receive the offer of this edge's receiver, and answer; return the result of `accept`, or None and why not.

    `accept` may raise RefusedError. Raises PeerLostError, also for an offer that cannot be read;
    SupersededError.
    """
    offer, opened, refusal = _receive(wire, _Proposal).offer, None, ""
    if offer is None:
        refusal = f"stage {wire.peer} offers no memory"
    else:
        try:
            opened = accept(offer)
        except RefusedError as error:
            refusal = str(error)
    _send(wire, _Answer(refusal))
    return opened, refusal


def _send(wire: Wire, frame: msgspec.Struct) -> None:
    body = msgspec.json.encode(frame)
    wire.send([memoryview(_LENGTH.pack(len(body))), memoryview(body)])


def _receive(wire: Wire, kind: type[_Frame]) -> _Frame:
    length = bytearray(_LENGTH.size)
    wire.receive(memoryview(length))
    (size,) = _LENGTH.unpack(length)
    if size > MAX_FRAME:
        raise PeerLostError(f"stage {wire.peer} began with {size} bytes, at most {MAX_FRAME} are right", wire.peer)
    body = bytearray(size)
    wire.receive(memoryview(body))
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise PeerLostError(f"stage {wire.peer} sent no {kind.__name__[1:].lower()}: {error}", wire.peer) from None
