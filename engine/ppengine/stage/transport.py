"""The two ends of an edge whose messages go through the wire.

A message goes out from the step loop as far as the kernel has room for it. Only the rest of a
message that is too big waits for the receiver, on a thread, so that the step loop can go on.

With the ledger on, a connection is a stream of the step loop, and every hand-off is declared.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from queue import Empty, SimpleQueue
from time import monotonic_ns
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ppengine.common.ring import Gauge, Kind
from ppengine.stage.edge import Edge, Sending
from ppengine.stage.ledger.actors import Mark
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.storage import StorageBuffers
from ppengine.stage.pending_step import Pending
from ppengine.stage.recorder import Recorder
from ppengine.stage.wire import PeerLostError, SupersededError

MAX_UNDELIVERED = 2
"""Sends that may be under way; the step loop waits, in a record, before it hands over another one."""
_SEND = Kind.SEND.value


class ExpectedSteps(deque[tuple[int, int]]):
    """Steps whose hidden states are still to come, in order, with their numbers of tokens."""

    def next(self, step: int) -> int:
        """Return the tokens of the oldest one, which must be `step`. Raises PeerLostError."""
        number, tokens = self.popleft()
        if number != step:
            raise PeerLostError(f"step {step} wants hidden states, but those of step {number} come next")
        return tokens


class WireEnd:
    """An end of an edge for which no device waits."""

    def check_peer(self) -> None:
        """Do nothing: a host that waits for the peer sees it go."""

    def release(self) -> None:
        """Do nothing: no device waits."""


class WireReceiver(WireEnd):
    """Receives hidden states of at most `max_tokens` tokens into host memory, page-locked if `pinned`."""

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
        self._memory = torch.zeros(max_tokens, width, dtype=dtype, pin_memory=pinned)
        self.buffer = ledger.buffer(f"recv<{edge.peer} buffer", size=self._memory.nbytes)
        """The memory, as the ledger knows it."""
        self.buffer.forget()  # An earlier generation has left it, maybe in the middle of a message.
        self._expected = ExpectedSteps()

    def expect(self, step: int, tokens: int) -> None:
        """Announce, in step order, that `step` brings hidden states of `tokens` tokens."""
        self._expected.append((step, tokens))

    def take(self, step: int) -> Tensor:
        """Return the hidden states [tokens, width] of the oldest expected step; valid until the next `take`."""
        view, mark = self._memory[: self._expected.next(step)], None
        if self._ledger.on:
            mark = self._ledger.launch(self._stream, f"receive of m{step}", writes=[self.buffer])
        self.edge.receive(view, step)
        if self._ledger.on and mark is not None:
            self._ledger.passed(self._peer, self._stream, "message")
            self._ledger.sync(mark)
            self._ledger.read(self.buffer, f"forward of m{step}", depth=1)
        return view

    def close(self) -> None:
        """Close the edge."""
        self._expected.clear()
        self._ledger.close(self._stream)
        self.edge.close()


class RecordedSender(ABC):
    """A sending end whose messages are parts of a step in the main thread's ring."""

    def __init__(self, edge: Edge, ring: Recorder) -> None:
        self.edge = edge
        self._ring = ring
        self.checksum = 0
        """Checksum of the next message; 0: it carries none."""

    @abstractmethod
    def put(self, step: int, tensor: Tensor) -> None:
        """Send one contiguous tensor, which must stay unchanged until it is delivered."""

    def _record_put(self, step: int, tensor: Tensor) -> None:
        self._ring.part(_SEND, step, self.edge.peer, tensor.nbytes)
        try:
            self.put(step, tensor)
        finally:
            self._ring.end_part()


class _Parcel(NamedTuple):
    """A message that waits for room. `sending` None: nothing of it is sent."""

    step: int
    tensor: Tensor
    checksum: int
    since_ns: int
    """When the step loop has handed it over."""
    sending: Sending | None
    mark: Mark | None
    delivered: threading.Event | None


class WireSender(WireEnd, RecordedSender):
    """Sends tensors, and has a thread send the rest of one that does not fit at once."""

    def __init__(self, edge: Edge, ring: Recorder, ledger: Ledger | None = None) -> None:
        super().__init__(edge, ring)
        self.error: PeerLostError | None = None
        self._dropping = False
        self._ledger = ledger = ledger or Ledger()
        self._stream = ledger.stream(f"send>{edge.peer}", "send")
        self._peer = ledger.peer(f"stage {edge.peer}")
        self._buffers = StorageBuffers(ledger, f"send>{edge.peer} buffer")
        self._queue: SimpleQueue[_Parcel | None] = SimpleQueue()
        # A permit comes back with each delivery; the first ones carry no mark.
        self._permits: SimpleQueue[Mark | None] = SimpleQueue()
        for _ in range(MAX_UNDELIVERED):
            self._permits.put(None)
        self._depth = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, step: int, hidden: Tensor, pending: Pending) -> None:
        """Send `hidden` [T, H] of `step`, which is computed."""
        self._record_put(step, hidden)

    @override
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
            sending = self.edge.send(tensor, step, self.checksum)
            if not sending.rest:
                if mark is not None:
                    ledger.sync(mark)
                self._permits.put(None)
                return
        self._hand_over(
            _Parcel(
                step, tensor, self.checksum, monotonic_ns(), sending, mark, threading.Event() if ledger.strict else None
            )
        )

    def _permit(self, step: int, tensor: Tensor) -> Mark | None:
        """Return a permit to send; a wait for one is recorded."""
        try:
            return self._permits.get_nowait()
        except Empty:
            with self._ring.operation(Kind.ROOM, step, self.edge.peer, tensor.nbytes):
                return self._permits.get()

    def finish(self, timeout: float | None = None) -> None:
        """Let messages that were handed over be delivered, for at most `timeout` seconds."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        """Drop messages that were handed over, wait for the send under way to end either way, and close the edge."""
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
            with self._ring.operation(Kind.ROOM, parcel.step, self.edge.peer, parcel.tensor.nbytes):
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
            sending = parcel.sending
            self.edge.finish(sending or self.edge.send(parcel.tensor, parcel.step, parcel.checksum, parcel.since_ns))
        except PeerLostError as error:
            # For the step loop, which alone talks to the core. Without its frames: they hold the edge open.
            self.error = error.with_traceback(None)
            self.error.__context__ = None
        except SupersededError:
            self._dropping = True

    def _count(self, change: int) -> None:
        with self._lock:
            self._depth += change
            self._ring.gauge(Gauge.OUTBOX, self._depth)


class WireTokenSender(WireSender):
    """Sends the last stage's sampled tokens to the first one, as soon as they are sampled."""

    newest = None

    def sampled(self, step: int, tokens: Tensor, *, late: bool = False) -> None:
        """Send tokens [R] of `step`."""
        self._record_put(step, tokens)

    def retired(self, step: int, tokens: Tensor) -> None:
        """Do nothing: they are sent."""
