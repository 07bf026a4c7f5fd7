"""The agreement of the two ends of an edge on RDMA, over the connection on which they have proved their key.

The receiver offers memory: NIXL's metadata and an address. The sender writes a pattern there and names it.
When the receiver has found it, messages go by RDMA. Each frame has an HMAC of the edge's key, so no host
on the way can direct a sender to other memory.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import struct
import time
from collections.abc import Callable

from ppengine.stage.rdma_agent import NoRdmaError, RdmaAgent
from ppengine.stage.rdma_wire import RING_BYTES, RdmaReceiveWire, RdmaSendWire
from ppengine.stage.wire import PeerLostError, SupersededError, Wire

CONNECT_S = 10.0
"""Seconds for the first write, which connects the adapters."""
MAX_FRAME = 65_536
_PATTERN_BYTES, _MAC_BYTES = 32, 32
_HEAD = struct.Struct("<IQ")
"""Length of the body, and a number: the address of the memory, or 1. 0: no RDMA, and the body is the reason."""
_LOOK_S = 1e-3


def receive_by_rdma(wire: Wire, size: int = RING_BYTES) -> RdmaReceiveWire:
    """Offer memory of `size` bytes to the sender of this edge; return the wire that is received by RDMA.

    Raises NoRdmaError if one of the two cannot: then `wire` goes on as it is. PeerLostError, SupersededError.
    """
    agent, reason = _agent(size)
    with contextlib.ExitStack() as unless_used:
        if agent is not None:
            unless_used.callback(agent.close)
        address, offer = (0, reason.encode()) if agent is None else (agent.address, agent.metadata)
        _send(wire, b"offer", address, offer)
        reached, pattern = _receive(wire, b"answer", None if agent is None else agent.progress)
        if agent is None or not reached:
            raise NoRdmaError(reason or _theirs(wire, pattern))
        found = bytes(agent.view[:_PATTERN_BYTES]) == pattern
        reason = "" if found else "its first write has not arrived"
        _send(wire, b"found", int(found), reason.encode())
        if not found:
            raise NoRdmaError(reason)
        unless_used.pop_all()
    return RdmaReceiveWire(wire, agent)


def send_by_rdma(wire: Wire, size: int = RING_BYTES) -> RdmaSendWire:
    """Take the offer of this edge's receiver; return the wire that sends by RDMA. Raises as `receive_by_rdma`.

    `size` is the receiver's.
    """
    address, offer = _receive(wire, b"offer")
    agent, reason = _agent(size) if address else (None, _theirs(wire, offer))
    with contextlib.ExitStack() as unless_used:
        pattern = secrets.token_bytes(_PATTERN_BYTES)
        if agent is not None:
            unless_used.callback(agent.close)
            try:
                _try_write(wire, agent, address, offer, pattern)
            except NoRdmaError as error:
                reason = str(error)
        _send(wire, b"answer", int(not reason), reason.encode() or pattern)
        if agent is None or reason:
            raise NoRdmaError(reason)
        found, theirs = _receive(wire, b"found")
        if not found:
            raise NoRdmaError(_theirs(wire, theirs))
        unless_used.pop_all()
    return RdmaSendWire(wire, agent)


def _agent(size: int) -> tuple[RdmaAgent | None, str]:
    try:
        return RdmaAgent(size), ""
    except NoRdmaError as error:
        return None, str(error)


def _theirs(wire: Wire, reason: bytes) -> str:
    return f"stage {wire.peer}: {reason.decode(errors='replace')}"


def _try_write(wire: Wire, agent: RdmaAgent, address: int, metadata: bytes, pattern: bytes) -> None:
    """Write `pattern` to the beginning of the peer's memory, within CONNECT_S."""
    agent.view[:_PATTERN_BYTES] = pattern
    agent.reach(metadata, address)
    write, deadline = agent.write(0, _PATTERN_BYTES), time.monotonic() + CONNECT_S
    try:
        while not write.done():
            if wire.left:
                raise SupersededError(f"stage {wire.peer} was written to")
            wire.check_open()
            if time.monotonic() > deadline:
                raise NoRdmaError(f"stage {wire.peer} was not reached in {CONNECT_S:g} s")
            time.sleep(_LOOK_S)
    finally:
        write.release()


def _send(wire: Wire, kind: bytes, number: int, body: bytes) -> None:
    said = _HEAD.pack(len(body), number) + body
    wire.send([memoryview(said + _mac(wire, kind, said))])


def _receive(wire: Wire, kind: bytes, meanwhile: Callable[[], None] | None = None) -> tuple[int, bytes]:
    """Return the number and the body of the next frame. `meanwhile` is called until it comes."""
    while meanwhile is not None and not wire.readable:
        if wire.left:
            raise SupersededError(f"stage {wire.peer} was waited for")
        meanwhile()
        time.sleep(_LOOK_S)
    head = _exactly(wire, _HEAD.size)
    size, number = _HEAD.unpack(head)
    if size > MAX_FRAME:
        raise PeerLostError(f"stage {wire.peer} began with {size} bytes, at most {MAX_FRAME} are right", wire.peer)
    body = _exactly(wire, size)
    if not hmac.compare_digest(_exactly(wire, _MAC_BYTES), _mac(wire, kind, head + body)):
        raise PeerLostError(f"stage {wire.peer} did not send this {kind.decode()} of RDMA: its HMAC differs", wire.peer)
    return number, body


def _exactly(wire: Wire, size: int) -> bytes:
    found = bytearray(size)
    wire.receive(memoryview(found))
    return bytes(found)


def _mac(wire: Wire, kind: bytes, said: bytes) -> bytes:
    return hmac.digest(wire.key, kind + said, "sha256")
