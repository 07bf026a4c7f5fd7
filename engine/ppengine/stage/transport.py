"""The buffers on both sides of an edge between stages, where its messages go through the wire.

A message goes out from the step loop as far as the kernel has room for it. Only the rest of one that is too big waits
for the receiver, on a thread, so that the step loop can go on.

With the ledger on, a connection is a stream of the step loop, and every hand-off is declared.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from ppengine.common.ring import Gauge, Kind
from ppengine.stage.edge import Edge, Sending
from ppengine.stage.ledger.actors import Mark
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.storage import StorageBuffers
from ppengine.stage.recorder import Recorder
from ppengine.stage.wire import PeerLostError, SupersededError

MAX_UNDELIVERED = 2
"""Sends that may be under way; the step loop waits (and is seen waiting) before it hands over another one."""


class Due:
    """Steps whose hidden states are still to come, in order, with their numbers of tokens."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque()

    def add(self, step: int, tokens: int) -> None:
        """Note the step after those that are known."""
        self._steps.append((step, tokens))

    def next(self, step: int) -> int:
        """Return the tokens of the oldest one, which must be `step`. Raises PeerLostError."""
        number, tokens = self._steps.popleft()
        if number != step:
            raise PeerLostError(f"step {step} wants hidden states, but those of step {number} come next")
        return tokens

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()


class Inlet:
    """Receiving side of the edge from the stage before."""

    by_device = False
    """Whether messages come from device to device: then a step is launched before its message is there."""

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
        self.known = ledger.buffer(f"recv<{edge.peer} buffer", size=self._buffer.nbytes)
        """The receive buffer, as the ledger knows it."""
        self.known.forget()  # An earlier generation has left it, in the middle of a message perhaps.
        self._due = Due()

    def expect(self, step: int, tokens: int) -> None:
        """Announce, in step order, that `step` brings hidden states of `tokens` tokens."""
        self._due.add(step, tokens)

    def take(self, step: int) -> Tensor:
        """Return the hidden states [tokens, width] of the oldest expected step; valid until the next `take`."""
        view, mark = self._buffer[: self._due.next(step)], None
        if self._ledger.on:
            mark = self._ledger.launch(self._stream, f"receive of m{step}", writes=[self.known])
        self.edge.receive(view, step)
        if self._ledger.on and mark is not None:
            self._ledger.passed(self._peer, self._stream, "message")
            self._ledger.sync(mark)
            self._ledger.read(self.known, f"forward of m{step}", depth=1)
        return view

    def close(self) -> None:
        """Close the edge."""
        self._due.clear()
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

    by_device = False
    """Whether messages go from device to device: then they are put when their step is launched."""

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
