"""Edges between stages: what a message is, its records, and the buffers on both sides.

Shapes are known from the step, so a message is a header and the bytes of one tensor, which travel from the sender's
tensor into the receiver's preallocated buffer. The header says what is sent, and what was not due is refused. There is
no timeout: a hang is for the diagnosis to name, a dead peer raises `PeerLostError` on the other side.

A message goes out from the step loop as far as the kernel has room for it. Only the rest of one that is too big waits
for the receiver, on a thread, so that the step loop can go on.

With the ledger on, a connection is a stream of the step loop, and every hand-off is declared.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from ppengine.ring import DTYPES, Gauge, Kind, shape_code, shape_text
from ppengine.stage.recorder import Recorder
from ppengine.stage.wire import PeerLostError, SupersededError, Wire
from ppengine.streams.actors import Mark
from ppengine.streams.ledger import Ledger
from ppengine.streams.storage import StorageBuffers

MAX_UNDELIVERED = 2
"""Sends that may be under way; the step loop waits (and is seen waiting) before it hands over another one."""
_HEADER = struct.Struct("<QQQII")
"""Number of the message on this edge, step, bytes, shape code, and a constant."""
_CONSTANT = 0x45505031
_CODES = {getattr(torch, name): shape_code(name, 0) for name in DTYPES}


class Sending(NamedTuple):
    """A message whose first `push` has been made: its record (0: none) and what is left to send."""

    seq: int
    rest: list[memoryview]


class Edge:
    """One wire between two stages, in one direction.

    Both sides count the messages from 1 and record each one in `ring`, which belongs to the thread that uses the edge:
    handed over, call returned, done.
    """

    def __init__(self, wire: Wire, upstream: bool, ring: Recorder | None = None) -> None:
        self.peer = wire.peer
        self.wire = wire
        self._ring = ring
        self._kind = Kind.SEND if upstream else Kind.RECEIVE
        self._number = 0
        self._open: set[int] = set()
        """Records of messages that are not done."""
        self.before_wait: Callable[[], None] | None = None
        """Called before a message is waited for: what this stage owes others must not wait for it."""

    def send(self, tensor: Tensor, step: int = 0) -> Sending:
        """Send as much of a contiguous tensor as there is room for; it must stay unchanged until all is sent."""
        self.wire.check_sendable()
        code, seq = self._begin(tensor, step)
        header = _HEADER.pack(self._number, step, tensor.nbytes, code, _CONSTANT)
        rest = self.wire.push([memoryview(header), _bytes_of(tensor)])
        if self._ring is not None:
            self._ring.returned(seq)
        if not rest:
            self._end(seq)
        return Sending(seq, rest)

    def finish(self, sending: Sending) -> None:
        """Send the rest of a message, waiting for room. Raises PeerLostError, SupersededError."""
        self.wire.send(sending.rest)
        self._end(sending.seq)

    def receive(self, tensor: Tensor, step: int = 0) -> None:
        """Wait for the next message and fill a contiguous tensor with it.

        Raises PeerLostError, for a message that is not of this step, size and element type as well; SupersededError.
        """
        code, seq = self._begin(tensor, step)
        if self._ring is not None:
            self._ring.returned(seq)
        if self.before_wait is not None and not self.wire.readable:
            self.before_wait()
        header, body = memoryview(bytearray(_HEADER.size)), _bytes_of(tensor)
        count = self.wire.read([header, body])
        self.wire.receive(header[count:])
        number, sent_step, size, sent_code, constant = _HEADER.unpack(header)
        if (number, sent_step, size, sent_code, constant) != (self._number, step, tensor.nbytes, code, _CONSTANT):
            raise PeerLostError(
                f"stage {self.peer} sent message {number} (m{sent_step}, {shape_text(size, sent_code)}), due was "
                f"message {self._number} (m{step}, {shape_text(tensor.nbytes, code)})",
                self.peer,
            )
        self.wire.receive(body[max(0, count - _HEADER.size) :])
        self._end(seq)

    def close(self) -> None:
        """Close the connection; the peer is told at once."""
        self.wire.close()
        for seq in list(self._open):  # or the ring would show them under way for ever
            self._end(seq)

    def _begin(self, tensor: Tensor, step: int) -> tuple[int, int]:
        """Count a message; return its shape code and record."""
        self._number += 1
        code = _CODES.get(tensor.dtype, 0) + (tensor.shape[-1] if tensor.dim() > 1 else 1)
        if self._ring is None:
            return code, 0
        seq = self._ring.begin(self._kind, step, self.peer, tensor.nbytes, self._number, code)
        self._open.add(seq)
        return code, seq

    def _end(self, seq: int) -> None:
        if self._ring is not None:
            self._ring.end(seq)
            self._open.discard(seq)


class Inlet:
    """Receiving side of the edge from the stage before."""

    def __init__(
        self,
        edge: Edge,
        max_tokens: int,
        width: int,
        dtype: torch.dtype,
        ledger: Ledger | None = None,
        pinned: bool = False,
    ) -> None:
        self.edge = edge
        self._ledger = ledger = ledger or Ledger()
        self._stream = ledger.stream(f"recv<{edge.peer}", "receive")
        self._peer = ledger.peer(f"stage {edge.peer}")
        # Written once, so that the memory is really there before the profile run counts it.
        self._buffer = torch.zeros(max_tokens, width, dtype=dtype, pin_memory=pinned)
        self._known = ledger.buffer(f"recv<{edge.peer} buffer")
        self._expected: deque[tuple[int, int]] = deque()

    def expect(self, step: int, tokens: int) -> None:
        """Announce, in step order, that `step` brings hidden states of `tokens` tokens."""
        self._expected.append((step, tokens))

    def take(self, step: int) -> Tensor:
        """Return the hidden states [tokens, width] of the oldest expected step; valid until the next `take`."""
        number, tokens = self._expected.popleft()
        if number != step:
            raise PeerLostError(f"step {step} wants hidden states, but those of step {number} come next")
        view, mark = self._buffer[:tokens], None
        if self._ledger.on:
            mark = self._ledger.launch(self._stream, f"receive of m{step}", writes=[self._known])
        self.edge.receive(view, step)
        if self._ledger.on and mark is not None:
            self._ledger.passed(self._peer, self._stream, "message")
            self._ledger.sync(mark)
            self._ledger.read(self._known, f"forward of m{step}", depth=1)
        return view

    def close(self) -> None:
        """Close the edge."""
        self._expected.clear()
        self._ledger.close(self._stream)
        self.edge.close()


class _Parcel(NamedTuple):
    """A message that waits for room. `sending` None: nothing of it is sent."""

    step: int
    tensor: Tensor
    sending: Sending | None
    mark: Mark | None
    delivered: threading.Event | None


class Outbox:
    """Sending side of one edge, and the thread that sends what does not fit at once."""

    def __init__(self, edge: Edge, main: Recorder, ledger: Ledger | None = None) -> None:
        self.edge = edge
        self.error: PeerLostError | None = None
        self._main = main
        self._dropping = False
        self._ledger = ledger = ledger or Ledger()
        self._stream = ledger.stream(f"send>{edge.peer}", "send")
        self._peer = ledger.peer(f"stage {edge.peer}")
        self._buffers = StorageBuffers(ledger, f"send>{edge.peer} buffer")
        self._queue: SimpleQueue[_Parcel | None] = SimpleQueue()
        # A permit is what comes back with a delivery; the first ones were nobody's.
        self._permits: SimpleQueue[Mark | None] = SimpleQueue()
        for _ in range(MAX_UNDELIVERED):
            self._permits.put(None)
        self._depth = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, step: int, tensor: Tensor) -> None:
        """Send `tensor` and keep it until delivered; blocks while `MAX_UNDELIVERED` are under way.

        In strict order it returns when the tensor is delivered.
        """
        permit, ledger, mark = self._permit(step, tensor), self._ledger, None
        if self.error is not None:
            raise self.error
        if ledger.on:
            ledger.acquire(permit)
            buffer = self._buffers.of(tensor.untyped_storage(), tensor.data_ptr(), tensor.nbytes)
            ledger.write(buffer, f"result of m{step}", depth=1)
            mark = ledger.launch(self._stream, f"send of m{step}", reads=[buffer])
            ledger.passed(self._stream, self._peer, "message")
        sending = None
        if not self._depth:
            # With nothing on the thread, edge and ring are the step loop's.
            sending = self.edge.send(tensor, step)
            if not sending.rest:
                if mark is not None:
                    ledger.sync(mark)
                self._permits.put(None)
                return
        self._hand_over(_Parcel(step, tensor, sending, mark, threading.Event() if ledger.strict else None))

    def _permit(self, step: int, tensor: Tensor) -> Mark | None:
        """Return a permit to send; where there is none, that is waited for, and seen to be."""
        try:
            return self._permits.get_nowait()
        except Empty:
            with self._main.operation(Kind.ROOM, step, self.edge.peer, tensor.nbytes):
                return self._permits.get()

    def finish(self, timeout: float | None = None) -> None:
        """Let what was handed over be delivered, for at most `timeout` seconds."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        """Drop what was handed over, wait for the send under way to end either way, and close the edge."""
        self._dropping = True
        self.finish()
        self.error = None
        self._ledger.close(self._stream)
        self.edge.close()

    def _hand_over(self, parcel: _Parcel) -> None:
        if self._thread is None:
            self._begin()
        self._count(1)
        self._queue.put(parcel)
        if parcel.delivered is not None:
            with self._main.operation(Kind.ROOM, parcel.step, self.edge.peer, parcel.tensor.nbytes):
                parcel.delivered.wait()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._see_through, name="send", daemon=True)
        self._thread.start()

    def _see_through(self) -> None:
        ledger = self._ledger
        while (parcel := self._queue.get()) is not None:
            permit = None
            if not self._dropping:
                self._deliver(parcel)
                if ledger.on:
                    ledger.sync(parcel.mark)
                    permit = ledger.release("delivery")
            self._count(-1)
            self._permits.put(permit)
            if parcel.delivered is not None:
                parcel.delivered.set()
        ledger.leave()

    def _deliver(self, parcel: _Parcel) -> None:
        try:
            self.edge.finish(parcel.sending or self.edge.send(parcel.tensor, parcel.step))
        except PeerLostError as error:
            # For the step loop, which alone talks to the core. Without its frames: they hold the edge open.
            self.error = error.with_traceback(None)
            self.error.__context__ = None
        except SupersededError:
            self._dropping = True

    def _count(self, change: int) -> None:
        with self._lock:
            self._depth += change
            self._main.gauge(Gauge.OUTBOX, self._depth)


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.dtype is torch.bfloat16:  # numpy has no such type
        tensor = tensor.view(torch.int16)
    return tensor.numpy().data.cast("B")
