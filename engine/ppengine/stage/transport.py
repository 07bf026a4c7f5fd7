"""Edges between stages: gloo point-to-point over loopback, one communicator an edge.

Shapes are known from the step, so tensors travel without a shape message into preallocated buffers. Sends return at
once; a thread waits for them in order, keeps the tensors alive until they are delivered, and tells how many are not.
Timeouts are as good as infinite: a hang is for the diagnosis to name. A dead peer is different: gloo sees its
connection close, and both sides of this module then raise `PeerLostError`.

With the ledger on, gloo's own threads are streams of the thread that calls them, and every hand-off between step loop,
send thread and gloo is declared.

A blocked wait cannot be interrupted from this side, only by the other one closing. So a stage that leaves a generation
closes its edges whatever its neighbours do, and theirs come free by it. A rendezvous can be left: each side says that
it is there and looks for the other before gloo is asked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppengine.ring import DTYPES, Gauge, Kind, shape_code
from ppengine.stage.recorder import Recorder
from ppengine.streams.actors import Buffer, Mark
from ppengine.streams.ledger import Ledger
from ppengine.streams.storage import StorageBuffers

FOREVER = timedelta(days=365)
MAX_UNDELIVERED = 2
"""Sends that may be under way; the step loop waits (and is seen waiting) before it hands over another one."""
MEET_S = 0.01
"""Between two looks for the other side of an edge."""
RECEIVE_BUFFERS = 3
"""The one in use and two that fill meanwhile."""
_CODES = {getattr(torch, name): shape_code(name, 0) for name in DTYPES}


class PeerLostError(Exception):
    """The process at the other end of an edge is gone; one line. `peer`: the stage there, where that is known."""

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class SupersededError(Exception):
    """A rendezvous was left: a newer generation has begun, or the stage was told to leave."""


def open_store(path: str, stages: int) -> Any:
    """Return the rendezvous store in file `path` that all stages of one generation share."""
    store: Any = dist.FileStore(path, stages)  # type: ignore[attr-defined]
    store.set_timeout(FOREVER)
    return store


def meet(store: Any, name: str, upstream: bool, left: Callable[[], bool]) -> None:
    """Wait until both processes of edge `name` are there. Raises SupersededError as soon as `left()` is true."""
    store.set(f"{name}/{'up' if upstream else 'down'}", "here")
    while not store.check([f"{name}/{'down' if upstream else 'up'}"]):
        if left():
            raise SupersededError(name)
        time.sleep(MEET_S)


class Transfer(NamedTuple):
    """A message handed to the transport: gloo's handle, and its record (0: none)."""

    work: Any
    seq: int


class Edge:
    """One communicator of two processes. `upstream` is the sending side; `peer` the stage at the other end.

    Both sides count the messages from 1 and record each one in `ring`, which belongs to the thread that uses the edge:
    handed over, call returned, done.
    """

    def __init__(self, store: Any, name: str, upstream: bool, peer: int, ring: Recorder | None = None) -> None:
        self.peer = peer
        self._ring = ring
        self._kind = Kind.SEND if upstream else Kind.RECEIVE
        self._number = 0
        self._open: set[int] = set()
        """Records of messages that nobody has waited for."""
        self._other = 1 if upstream else 0
        # The options have no public name, and only they can keep gloo off the outer network interfaces.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._timeout = FOREVER
        options._threads = 1
        try:
            self._group: Any = gloo(dist.PrefixStore(name, store), 1 - self._other, 2, options)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self._lost(error) from None

    def send(self, tensor: Tensor, step: int = 0) -> Transfer:
        """Begin to send a contiguous tensor; it must stay unchanged until `wait` of the result returns."""
        return self._hand_over(self._group.send, tensor, step)

    def receive(self, tensor: Tensor, step: int = 0) -> Transfer:
        """Begin to receive into a contiguous tensor."""
        return self._hand_over(self._group.recv, tensor, step)

    def wait(self, transfer: Transfer) -> None:
        """Block until the transfer is done, without the GIL. Raises PeerLostError."""
        try:
            transfer.work.wait()
        except RuntimeError as error:
            raise self._lost(error) from None
        if self._ring is not None:
            self._ring.end(transfer.seq)
            self._open.discard(transfer.seq)

    def _hand_over(self, call: Any, tensor: Tensor, step: int) -> Transfer:
        self._number += 1
        ring, seq = self._ring, 0
        if ring is not None:
            code = _CODES.get(tensor.dtype, 0) + (tensor.shape[-1] if tensor.dim() > 1 else 1)
            seq = ring.begin(self._kind, step, self.peer, tensor.nbytes, self._number, code)
            self._open.add(seq)
        try:
            work = call([tensor], self._other, 0)
        except RuntimeError as error:
            raise self._lost(error) from None
        if ring is not None:
            ring.returned(seq)
        return Transfer(work, seq)

    def close(self) -> None:
        """Close the connection, once nothing that was begun here is kept any more; the peer is told at once."""
        self._group = None
        if self._ring is not None:
            for seq in self._open:  # or the ring would show them under way for ever
                self._ring.end(seq)
        self._open.clear()

    def _lost(self, error: RuntimeError) -> PeerLostError:
        text = str(error)
        # Closed or reset: which one depends on what was in the socket when the process died.
        known = "it closed the connection" if "by peer" in text else " ".join(text.split())[:200]
        return PeerLostError(f"lost stage {self.peer}: {known}", self.peer)


class Inlet:
    """Receiving side of the edge from the stage before. Receives are posted as soon as a step is known."""

    def __init__(
        self, edge: Edge, max_tokens: int, width: int, dtype: torch.dtype, ledger: Ledger | None = None
    ) -> None:
        self.edge = edge
        self._ledger = ledger = ledger or Ledger()
        self._stream = ledger.stream(f"recv<{edge.peer}", "receive")
        self._peer = ledger.peer(f"stage {edge.peer}")
        # Written once, so that the memory is really there before the profile run counts it.
        self._free = deque(
            (torch.zeros(max_tokens, width, dtype=dtype), ledger.buffer(f"recv<{edge.peer} {index}"))
            for index in range(RECEIVE_BUFFERS)
        )
        self._posted: deque[tuple[int, tuple[Tensor, Buffer], Tensor, Transfer, Mark | None]] = deque()
        self._waiting: deque[tuple[int, int]] = deque()
        self._in_use: tuple[Tensor, Buffer] | None = None

    def expect(self, step: int, tokens: int) -> None:
        """Announce, in step order, that `step` brings hidden states of `tokens` tokens."""
        self._waiting.append((step, tokens))
        if not self._ledger.strict:
            self._post()

    def take(self, step: int) -> Tensor:
        """Return the hidden states [tokens, width] of the oldest expected step; valid until the next `take`."""
        if self._in_use is not None:
            self._free.append(self._in_use)
            self._in_use = None
            if not self._ledger.strict:
                self._post()
        if not self._posted:
            self._post(1)
        number, buffer, view, transfer, mark = self._posted.popleft()
        if number != step:
            raise PeerLostError(f"step {step} wants hidden states, but those of step {number} come next")
        self.edge.wait(transfer)
        self._in_use = buffer
        if self._ledger.on and mark is not None:
            self._ledger.passed(self._peer, self._stream, "message")
            self._ledger.sync(mark)
            self._ledger.read(buffer[1], f"forward of m{step}", depth=1)
        return view

    def close(self) -> None:
        """Drop what was posted and close the edge."""
        self._waiting.clear()
        self._posted.clear()
        self._ledger.close(self._stream)
        self.edge.close()

    def _post(self, most: int = RECEIVE_BUFFERS) -> None:
        while self._waiting and self._free and most:
            most -= 1
            step, tokens = self._waiting.popleft()
            buffer = self._free.popleft()
            view, mark = buffer[0][:tokens], None
            if self._ledger.on:
                mark = self._ledger.launch(self._stream, f"receive of m{step}", writes=[buffer[1]])
            self._posted.append((step, buffer, view, self.edge.receive(view, step), mark))


class _Parcel(NamedTuple):
    """One send: what the ledger knows of it, and whom to tell in strict order."""

    step: int
    tensor: Tensor
    declared: tuple[Buffer, Mark] | None
    delivered: threading.Event | None


class Outbox:
    """Sending side of one edge and the thread that sends: a system call a message that the step loop is spared."""

    def __init__(self, edge: Edge, main: Recorder, ledger: Ledger | None = None) -> None:
        self.edge = edge
        self.error: PeerLostError | None = None
        self._main = main
        self._dropping = False
        self._ledger = ledger or Ledger()
        self._buffers = StorageBuffers(self._ledger, f"send>{edge.peer} buffer")
        self._queue: SimpleQueue[_Parcel | None] = SimpleQueue()
        # A permit is what the send thread hands back with a delivery; the first ones were nobody's.
        self._permits: SimpleQueue[Mark | None] = SimpleQueue()
        for _ in range(MAX_UNDELIVERED):
            self._permits.put(None)
        self._depth = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._see_through, name="send", daemon=True)
        self._thread.start()

    def put(self, step: int, tensor: Tensor) -> None:
        """Send `tensor` and keep it until delivered; blocks while `MAX_UNDELIVERED` are under way.

        In strict order it returns when the tensor is delivered.
        """
        permit, ledger, declared = self._permits.get(), self._ledger, None
        if self.error is not None:
            raise self.error
        if ledger.on:
            ledger.acquire(permit)
            buffer = self._buffers.of(tensor.untyped_storage(), tensor.data_ptr(), tensor.nbytes)
            ledger.write(buffer, f"result of m{step}", depth=1)
            declared = buffer, ledger.release("queue")
        self._count(1)
        parcel = _Parcel(step, tensor, declared, threading.Event() if ledger.strict else None)
        self._queue.put(parcel)
        if parcel.delivered is not None:
            parcel.delivered.wait()

    def finish(self, timeout: float) -> None:
        """Let what was handed over be delivered, for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def close(self) -> None:
        """Drop what was handed over, wait for the send under way to end either way, and close the edge."""
        self._dropping = True
        self._queue.put(None)
        self._thread.join()
        self.error = None
        self.edge.close()

    def _see_through(self) -> None:
        ledger = self._ledger
        stream = ledger.stream(f"send>{self.edge.peer}", "send", owner=ledger.thread("send"))
        peer = ledger.peer(f"stage {self.edge.peer}")
        while (parcel := self._queue.get()) is not None:
            if self._dropping:
                continue
            mark = permit = None
            if ledger.on and parcel.declared is not None:
                buffer, handed = parcel.declared
                ledger.acquire(handed)
                mark = ledger.launch(stream, f"send of m{parcel.step}", reads=[buffer])
            try:
                self.edge.wait(self.edge.send(parcel.tensor, parcel.step))
            except PeerLostError as error:
                # For the step loop, which alone talks to the core. Without its frames: they hold the edge open.
                self.error = error.with_traceback(None)
                self.error.__context__ = None
            if ledger.on and mark is not None:
                ledger.passed(stream, peer, "message")
                ledger.sync(mark)
                permit = ledger.release("delivery")
            self._count(-1)
            self._permits.put(permit)
            if parcel.delivered is not None:
                parcel.delivered.set()
        ledger.close(stream)
        ledger.leave()

    def _count(self, change: int) -> None:
        with self._lock:
            self._depth += change
            self._main.gauge(Gauge.OUTBOX, self._depth)
