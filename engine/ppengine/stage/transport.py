"""Edges between stages: gloo point-to-point over loopback, one communicator an edge.

Shapes are known from the step, so tensors travel without a shape message into preallocated buffers. Sends return at
once; a thread waits for them in order, keeps the tensors alive until they are delivered, and tells how many are not.
Timeouts are as good as infinite: a hang is for the diagnosis to name. A dead peer is different: gloo sees its
connection close, and both sides of this module then raise `PeerLostError`.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppengine.ring import Gauge, Kind
from ppengine.stage.recorder import Recorder

FOREVER = timedelta(days=365)
MAX_UNDELIVERED = 2
"""Sends that may be under way; the step loop waits (and is seen waiting) before it hands over another one."""
MEET_S = 0.01
"""Between two looks for the other side of an edge."""
RECEIVE_BUFFERS = 3
"""The one in use and two that fill meanwhile."""


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


class Edge:
    """One communicator of two processes. `upstream` is the sending side; `peer` the stage at the other end."""

    def __init__(self, store: Any, name: str, upstream: bool, peer: int) -> None:
        self.peer = peer
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

    def send(self, tensor: Tensor) -> Any:
        """Begin to send a contiguous tensor; it must stay unchanged until `wait` of the result returns."""
        try:
            return self._group.send([tensor], self._other, 0)
        except RuntimeError as error:
            raise self._lost(error) from None

    def receive(self, tensor: Tensor) -> Any:
        """Begin to receive into a contiguous tensor."""
        try:
            return self._group.recv([tensor], self._other, 0)
        except RuntimeError as error:
            raise self._lost(error) from None

    def wait(self, work: Any) -> None:
        """Block until `work` is done, without the GIL. Raises PeerLostError."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from None

    def close(self) -> None:
        """Close the connection, once nothing that was begun here is kept any more; the peer is told at once."""
        self._group = None

    def _lost(self, error: RuntimeError) -> PeerLostError:
        text = str(error)
        # Closed or reset: which one depends on what was in the socket when the process died.
        known = "it closed the connection" if "by peer" in text else " ".join(text.split())[:200]
        return PeerLostError(f"lost stage {self.peer}: {known}", self.peer)


class Inlet:
    """Receiving side of the edge from the stage before. Receives are posted as soon as a step is known."""

    def __init__(self, edge: Edge, max_tokens: int, width: int, dtype: torch.dtype) -> None:
        self.edge = edge
        # Written once, so that the memory is really there before the profile run counts it.
        self._free = deque(torch.zeros(max_tokens, width, dtype=dtype) for _ in range(RECEIVE_BUFFERS))
        self._posted: deque[tuple[int, Tensor, Tensor, Any]] = deque()
        self._waiting: deque[tuple[int, int]] = deque()
        self._in_use: Tensor | None = None

    def expect(self, step: int, tokens: int) -> None:
        """Announce, in step order, that `step` brings hidden states of `tokens` tokens."""
        self._waiting.append((step, tokens))
        self._post()

    def take(self, step: int) -> Tensor:
        """Return the hidden states [tokens, width] of the oldest expected step; valid until the next `take`."""
        if self._in_use is not None:
            self._free.append(self._in_use)
            self._in_use = None
            self._post()
        number, buffer, view, work = self._posted.popleft()
        if number != step:
            raise PeerLostError(f"step {step} wants hidden states, but those of step {number} come next")
        self.edge.wait(work)
        self._in_use = buffer
        return view

    def close(self) -> None:
        """Drop what was posted and close the edge."""
        self._waiting.clear()
        self._posted.clear()
        self.edge.close()

    def _post(self) -> None:
        while self._waiting and self._free:
            step, tokens = self._waiting.popleft()
            buffer = self._free.popleft()
            view = buffer[:tokens]
            self._posted.append((step, buffer, view, self.edge.receive(view)))


class Outbox:
    """Sending side of one edge and the thread that sends: a system call a message that the step loop is spared.

    `ring` is that thread's own.
    """

    def __init__(self, edge: Edge, ring: Recorder, main: Recorder) -> None:
        self.edge = edge
        self.error: PeerLostError | None = None
        self._ring = ring
        self._main = main
        self._queue: SimpleQueue[tuple[int, Tensor] | None] = SimpleQueue()
        self._slots = threading.Semaphore(MAX_UNDELIVERED)
        self._dropping = False
        self._depth = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._see_through, name="send", daemon=True)
        self._thread.start()

    def put(self, step: int, tensor: Tensor) -> None:
        """Send `tensor` and keep it until delivered; blocks while `MAX_UNDELIVERED` are under way."""
        self._slots.acquire()
        if self.error is not None:
            raise self.error
        self._count(1)
        self._queue.put((step, tensor))

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
        while (entry := self._queue.get()) is not None:
            step, tensor = entry
            if self._dropping:
                continue
            with self._ring.operation(Kind.SEND, step, self.edge.peer, tensor.nbytes):
                try:
                    self.edge.wait(self.edge.send(tensor))
                except PeerLostError as error:
                    # For the step loop, which alone talks to the core. Without its frames: they hold the edge open.
                    self.error = error.with_traceback(None)
                    self.error.__context__ = None
            self._count(-1)
            self._slots.release()

    def _count(self, change: int) -> None:
        with self._lock:
            self._depth += change
            self._main.gauge(Gauge.OUTBOX, self._depth)
