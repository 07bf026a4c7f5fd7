"""The offers that ranks of a stage on cards send each other when they meet: memory that the others write to."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from ppengine.stage.edge_offers import MAX_FRAME, Offer
from ppengine.stage.wire import PeerLostError, Wire

_LENGTH = struct.Struct("<I")


class RankOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of a rank that the other ranks write to."""

    calls: Offer
    """That of calls which are kernels."""
    copies: Offer


def exchange(offer: RankOffer, wires: Mapping[int, Wire]) -> dict[int, RankOffer]:
    """Send an offer to all other ranks; return theirs, by rank. Raises PeerLostError, SupersededError."""
    body = msgspec.json.encode(offer)
    for wire in wires.values():
        wire.send([memoryview(_LENGTH.pack(len(body))), memoryview(body)])
    return {peer: _receive(wire) for peer, wire in wires.items()}


def _receive(wire: Wire) -> RankOffer:
    """Return the offer of another rank. Raises PeerLostError for anything else."""
    length = bytearray(_LENGTH.size)
    wire.receive(memoryview(length))
    (size,) = _LENGTH.unpack(length)
    body = bytearray(min(size, MAX_FRAME))
    wire.receive(memoryview(body))
    try:
        return msgspec.json.decode(body, type=RankOffer)
    except msgspec.DecodeError as error:
        text = f"stage {wire.peer} rank {wire.rank} sent no offer: {error}"
        raise PeerLostError(text, wire.peer, wire.rank) from None
