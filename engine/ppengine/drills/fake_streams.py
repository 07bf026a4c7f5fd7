"""Streams, events and a buffer pool without a device, which behave as CUDA's do where order is concerned.

A `FakeStream` is a worker thread with a FIFO: launching returns at once. A lagging stream does
nothing until something waits for it, which is the latest that a real one may be; a prompt one works
at once. So the harmful schedule happens on every run. `LifoPool` hands out the memory that came
back last, contents included, as allocators do.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from ppengine.stage.ledger.actors import Actor, Buffer, Mark
from ppengine.stage.ledger.ledger import Ledger

_PATIENCE_S = 30.0
HOME = 2
"""Device of the stage whose incidents are replayed; a thread that sets no device is on 0."""


class FakeError(RuntimeError):
    """The error that a CUDA call would have returned."""


class FakeRuntime:
    """Devices as a process sees them: the current one belongs to each thread and begins as 0."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._local = threading.local()
        self._before = ledger.thread().device
        self._streams: list[FakeStream] = []

    @property
    def device(self) -> int:
        """The calling thread's current device."""
        return int(getattr(self._local, "device", 0))

    def set_device(self, device: int) -> None:
        """Make `device` the calling thread's current one."""
        self._local.device = device
        self.ledger.thread(device=f"cuda:{device}")

    def stream(self, name: str, purpose: str, *, lag: bool = False) -> FakeStream:
        """Return a new stream on the calling thread's current device; one that lags is as late as a stream may be."""
        self.set_device(self.device)
        stream = FakeStream(self, name, purpose, self.device, lag)
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        """Let every stream finish and end its worker; call it in the thread that made this."""
        for stream in self._streams:
            stream.close()
        self.ledger.thread(device=self._before)


class FakeStream:
    """One stream. Its worker takes operations in order, as far as they are wanted."""

    def __init__(self, runtime: FakeRuntime, name: str, purpose: str, device: int, lag: bool) -> None:
        self.name = name
        self.device = device
        self.closed = False
        self.actor = runtime.ledger.stream(name, purpose, f"cuda:{device}", depth=2)
        self._runtime = runtime
        self._ledger = runtime.ledger
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lag = lag
        self._launched = self._wanted = self._done = 0
        self._moved = threading.Condition()
        self._worker = threading.Thread(target=self._work, name=f"fake-{name}", daemon=True)
        self._worker.start()

    def launch(
        self,
        what: str,
        work: Callable[[], None],
        reads: Sequence[FakeMemory] = (),
        writes: Sequence[FakeMemory] = (),
        depth: int = 0,
    ) -> None:
        """Put `work` on the stream. Raises FakeError for a handle that is not valid in the calling thread."""
        ledger, mark = self._ledger, None
        if ledger.on:
            ledger.thread(device=f"cuda:{self._runtime.device}")
            read, written = [memory.buffer for memory in reads], [memory.buffer for memory in writes]
            mark = ledger.launch(self.actor, what, read, written, depth + 1)
        if self.closed or self.device != self._runtime.device:
            raise FakeError("CUDA error 400: invalid resource handle")
        self._put(work, mark)
        if ledger.strict:
            self._reach(self._launched)

    def record(self, name: str) -> FakeEvent:
        """Return an event that is complete when everything launched so far is done."""
        mark = self._ledger.record(self.actor, name) if self._ledger.on else None
        return FakeEvent(self, self._launched, mark)

    def wait(self, event: FakeEvent) -> None:
        """Let all later launches wait for `event`."""
        if self._ledger.on:
            self._ledger.wait(self.actor, event.mark)
        self._put(event.reach, None)

    def synchronize(self) -> None:
        """Wait, in the calling thread, until everything launched so far is done."""
        self.record("synchronize").synchronize()

    def close(self) -> None:
        """Finish all launched work and destroy the stream."""
        if not self.closed:
            self._reach(self._launched)
            self._ledger.close(self.actor, depth=1)
            self.closed = True
            self._queue.put(None)
            self._worker.join(_PATIENCE_S)

    def _put(self, work: Callable[[], None], mark: Mark | None) -> None:
        def run() -> None:
            work()
            if mark is not None:
                self._ledger.completed(mark)

        self._launched += 1
        self._queue.put(run)
        if not self._lag:
            self._want(self._launched)

    def _want(self, number: int) -> None:
        with self._moved:
            self._wanted = max(self._wanted, number)
            self._moved.notify_all()

    def _reach(self, number: int) -> None:
        """Have the stream go as far as operation `number`, and wait for it."""
        self._want(number)
        with self._moved:
            if not self._moved.wait_for(lambda: self._done >= number, _PATIENCE_S):
                raise FakeError(f"stream {self.name} is stuck: {self._done} of {number} operations are done")

    def _work(self) -> None:
        while (run := self._queue.get()) is not None:
            with self._moved:
                self._moved.wait_for(lambda: self._wanted > self._done)
            run()
            with self._moved:
                self._done += 1
                self._moved.notify_all()


class FakeEvent:
    """A point in a stream's order."""

    def __init__(self, stream: FakeStream, number: int, mark: Mark | None) -> None:
        self.mark = mark
        self._stream = stream
        self._number = number

    def reach(self) -> None:
        """Wait until the stream has come this far; not declared."""
        self._stream._reach(self._number)

    def synchronize(self) -> None:
        """Wait in the calling thread."""
        if self._stream._ledger.on:
            self._stream._ledger.sync(self.mark)
        self.reach()


class FakeMemory:
    """A few numbers in memory of a pool; `data` outlives its owners. The methods are stream work."""

    def __init__(self, buffer: Buffer, size: int) -> None:
        self.buffer = buffer
        self.data: list[float] = [0.0] * size

    def set(self, values: Sequence[float]) -> None:
        """Write numbers."""
        self.data[:] = values

    def double(self, source: FakeMemory) -> None:
        """Write twice the numbers of `source`."""
        self.data[:] = [2 * value for value in source.data]

    def read(self, into: list[float]) -> None:
        """Append the numbers to `into`."""
        into.extend(self.data)


class LifoPool:
    """Memory of one device: freed memory goes, with its contents, to the next owner of that size."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self._free: dict[int, list[FakeMemory]] = {}
        self._numbers = itertools.count()

    def take(self, size: int, name: str = "", order: FakeStream | None = None) -> FakeMemory:
        """Return memory of `size` numbers, used from here on in the order of `order` (None: of the thread)."""
        ledger, free = self._runtime.ledger, self._free.get(size)
        if free:
            memory = free.pop()
            memory.buffer.name = name or memory.buffer.name
        else:
            device = f"cuda:{self._runtime.device}"
            label = name or f"buffer {next(self._numbers)}"
            # Not by name: a run that is repeated has memory of its own.
            memory = FakeMemory(Buffer(label, device, size), size)
        if ledger.on:
            ledger.issue(memory.buffer, "allocation", _actor(order), depth=1)
        return memory

    def give(self, memory: FakeMemory, order: FakeStream | None = None) -> None:
        """Take memory back in the order of `order`: uses by other streams are not waited for."""
        if self._runtime.ledger.on:
            self._runtime.ledger.free(memory.buffer, "free", _actor(order), depth=1)
        self._free.setdefault(len(memory.data), []).append(memory)


def _actor(stream: FakeStream | None) -> Actor | None:
    return None if stream is None else stream.actor
