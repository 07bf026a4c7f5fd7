"""Edges that lose, add, cut or delay messages: between stages, and from a stage to the core."""

from __future__ import annotations

import contextlib
import socket
import time
from functools import partial
from typing import Any

import msgspec

from ppengine.common.ring import Kind as Op
from ppengine.drills import tcp_sockets
from ppengine.drills.fault_points import Fault, Go
from ppengine.drills.registry import Undo, edge_of, outside, strike
from ppengine.drills.target import Target
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.steps import FromStage, Retired

_CYCLE_BYTES = 64 << 20
"""More bytes than the kernel buffers for a connection."""
_NUMBER_BYTES = 8
"""A header begins with the number of its message, from 1."""
_LOOK_S = 0.001
_SLOW_RATE = 40_000
"""Bytes a second."""
_BOTH_S = 0.05
"""Seconds after which the neighbour has its fault as well, and has begun a step since."""


@strike("send", "hang", "mismatch", "link", clears=True, where="not last")
def drop_send(fault: Fault, go: Go, *args: Any) -> Any:
    """Hidden states are not sent from now on, though the step loop continues as if they were. Cleared: they are sent.

    Verdict: stage K never sent step n although it reported it finished; stage K+1 waits for it.
    """
    step, tensor = args
    fault.keep(partial(_send_late, fault.parts.sender, fault.parts.sender.checksum, go, step, tensor.clone()))


def _send_late(sender: Any, checksum: int, go: Go, step: int, tensor: Any) -> None:
    """Send a kept message with the checksum that was made with it: its sender has that of a later one by now."""
    newest, sender.checksum = sender.checksum, checksum
    go(step, tensor)
    sender.checksum = newest


@strike("send", "hang", "mismatch", "link", clears=True, where="last")
def drop_token_return(fault: Fault, go: Go, *args: Any) -> Any:
    """The last stage does not send its sampled tokens to the first one from now on. Cleared: they are sent.

    Verdict: the last stage never sent the tokens of step n; stage 0 waits for them.
    """
    step, tensor = args
    fault.keep(partial(go, step, tensor.clone()))


@strike("send", "wrong", "mismatch")
def skip_send(fault: Fault, go: Go, *args: Any) -> Any:
    """One message is not sent; the next stage takes those after it for the ones before.

    Verdict: stage K sent one message less than its steps: step n was never sent, and later messages are off by one.
    """
    return None if fault.first() else go(*args)


@strike("send", "wrong", "mismatch")
def extra_send(fault: Fault, go: Go, *args: Any) -> Any:
    """One message is sent twice; the next stage takes the second one for the next step's.

    Verdict: stage K sent one message more than its steps: step n twice.
    """
    if fault.first():
        go(*args)
    return go(*args)


@strike("send", "wrong", "mismatch")
def short_send(fault: Fault, go: Go, *args: Any) -> Any:
    """One message is sent without its last value.

    Verdict: a mismatch at step n: stage K sent X bytes, the next stage expects Y.
    """
    step, tensor = args
    return go(step, tensor.flatten()[:-1].contiguous() if fault.first() else tensor)


@strike("send", "wrong", "mismatch", held_out=True)
def long_send(fault: Fault, go: Go, *args: Any) -> Any:
    """One message is sent with all of its values twice.

    Verdict: a mismatch at step n: stage K sent X bytes, the next stage expects Y.
    """
    step, tensor = args
    return go(step, tensor.flatten().repeat(2) if fault.first() else tensor)


@strike("send", "wrong", "mismatch")
def wrong_dtype(fault: Fault, go: Go, *args: Any) -> Any:
    """Messages are sent in a narrower type than the next stage expects.

    Verdict: a mismatch at step n: stage K sent X bytes, the next stage expects Y.
    """
    step, tensor = args
    return go(step, tensor.half() if tensor.is_floating_point() else tensor.int())


@strike("expect", "wrong", "mismatch", where="not first")
def wrong_metadata(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage reads one token too many out of a step, and posts a receive that is too big.

    Verdict: a mismatch at step n: stage K expects another message than the step has, which the stage before sent.
    """
    step, tokens = args
    return go(step, tokens + 1)


@strike("step", "hang", "deadlock", pair=True)
def send_cycle(fault: Fault, go: Go, *args: Any) -> Any:
    """Two neighbours send to each other over their edge, and neither receives.

    Verdict: stages K and K+1 wait for each other, both in a send.
    """
    parts = fault.parts
    before, behind = edge_of(fault.aim, parts.stages)
    if parts.stage == before:
        if time.monotonic() - fault.since < _BOTH_S:
            return go(*args)
        edge, other = parts.sender.edge, behind
    else:
        edge, other = parts.receiver.edge, before
        if not _is_cycle(edge):
            return go(*args)
    with parts.ring.operation(Op.ROOM, args[0].number, other, _CYCLE_BYTES):  # type: ignore[attr-defined]
        edge.wire.send([memoryview(bytes(_CYCLE_BYTES))])
    return go(*args)


def _is_cycle(edge: Any) -> bool:
    """Wait for the next message; return whether it is a neighbour's part of the cycle: zeros, unlike any header.

    Both must begin with the same message, otherwise one reads the zeros of the other as a message.
    """
    while not edge.wire.readable:
        if edge.meanwhile is None or not edge.meanwhile():
            time.sleep(_LOOK_S)
    return not any(edge.wire._socket.recv(_NUMBER_BYTES, socket.MSG_PEEK))


@strike("reduce", "wrong", "mismatch", ranks=True)
def skip_reduce(fault: Fault, go: Go, *args: Any) -> Any:
    """One rank leaves out one all-reduce and goes on with its own part alone.

    Verdict: a mismatch in stage K: its ranks launched different collectives, with both call sites.
    """
    return args[0] if fault.first() else go(*args)


@strike("reduce", "hang", "self_stuck", clears=True, ranks=True)
def sleep_in_reduce(fault: Fault, go: Go, *args: Any) -> Any:
    """The rank sleeps before it takes part in an all-reduce; the other ranks of its stage wait for its part.

    Verdict: stage K rank R is stuck in itself; the ranks that wait for it starve.
    """
    fault.hold()
    return go(*args)


@strike("ack", "hang", "link", clears=True)
def drop_ack(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage finishes its steps and acknowledges none to the core. Cleared: it acknowledges all.

    Verdict: stage K has finished step n, but the core has no acknowledgement: it was lost.
    """
    fault.late.append(partial(go, *args))


@strike("ack", "hang", "link", "mismatch", held_out=True)
def stale_ack(fault: Fault, go: Go, *args: Any) -> Any:
    """The stage acknowledges steps of another generation, which the core rightly ignores.

    Verdict: stage K has finished step n, but its acknowledgement to the core is of another generation.
    """
    message = Codec(FromStage).decode(args[0])
    if not isinstance(message, Retired):
        return go(*args)
    return go(encode(msgspec.structs.replace(message, generation=message.generation + 1)))


@outside("hang", "link", pair=True)
def link_reset(target: Target) -> None:
    """The connection between two stages is shut down from outside; both processes live.

    Verdict: the link between stages K and K+1 is broken: both lost the connection, neither process has ended.
    """
    for connection in tcp_sockets.between(*target.edge_pids):
        connection.shut_down()


@outside("hang", "link", pair=True, clears=True, held_out=True)
def link_stall(target: Target) -> Undo:
    """The connection between two stages delivers nothing more: arriving bytes stay in the kernel, unnoticed.

    Verdict: the link between stages K and K+1 has stalled: one has sent messages that the other does not get.
    """
    undo = contextlib.ExitStack()
    for connection in tcp_sockets.between(*target.edge_pids):
        undo.callback(connection.stall())
    return undo.close


@outside("slow", "link", pair=True, clears=True)
def link_slow(target: Target) -> Undo:
    """The connection between two stages moves at most 40 kB a second, by the pacing of its sockets.

    Verdict: the link from stage K to K+1 is slow: its bytes a second now and before.
    """
    undo = contextlib.ExitStack()
    for connection in tcp_sockets.between(*target.edge_pids):
        undo.callback(connection.slow_down(_SLOW_RATE))
    return undo.close
