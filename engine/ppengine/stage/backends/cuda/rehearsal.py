"""The incidents of `ppengine.stage.ledger` on a GPU: real streams and events, and the allocator that torch really has.

A lagging stream spins for a while before each piece of work, so that the schedule that hurts is the one that happens.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import driver as cuda
from torch import Tensor

from ppengine.stage.backends.cuda.streams import Event, Stream
from ppengine.stage.ledger.actors import Actor, Buffer, Mark
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.runtime import StreamError

_LAG_CYCLES = 40_000_000
"""20 ms at 2 GHz: far more than the host needs for what it launches next."""
_LANDINGS, _MOST = 64, 16


class DeviceRuntime:
    """The card of a stage, and a second context for whoever strays: with more cards than one, on the next of them."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self.ledger = ledger
        self.device = device
        self._before = ledger.thread().device
        self._local = threading.local()
        self._streams: list[DeviceStream] = []
        self._context: Any = None
        # Memory that is pinned later might have the host wait for the device.
        self._landings = torch.empty(_LANDINGS, _MOST, dtype=torch.float64, pin_memory=True)
        self._landed = itertools.count()
        self.enter()
        self._warm_up()

    @property
    def current(self) -> str:
        """Name of the calling thread's current device."""
        return str(getattr(self._local, "name", self.device))

    def enter(self) -> None:
        """See `Runtime`."""
        torch.cuda.set_device(self.device)
        self._be(str(self.device))

    def stray(self) -> None:
        """See `Runtime`."""
        other = ((self.device.index or 0) + 1) % torch.cuda.device_count()
        self._context = _done(cuda.cuCtxCreate(None, 0, other))
        self._be(f"cuda:{other}" if other != (self.device.index or 0) else f"cuda:{other} in another context")

    def stream(self, name: str, purpose: str, *, lag: bool = False) -> DeviceStream:
        """See `Runtime`."""
        strayed = self.current != str(self.device)
        if strayed:
            handle = int(_done(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value)))
            _done(cuda.cuCtxPopCurrent())
            # The handle is taken at its word, as a collective takes what it is given.
            taken = torch.cuda.ExternalStream(handle, self.device)  # type: ignore[no-untyped-call]
            raw = Stream(name, self.device, taken)
        else:
            self.enter()
            raw = Stream(name, self.device)
        stream = DeviceStream(self, raw, self.ledger.stream(name, purpose, self.current, depth=1), lag and not strayed)
        if not strayed:
            self._streams.append(stream)
        return stream

    def pool(self) -> DevicePool:
        """See `Runtime`."""
        return DevicePool(self)

    def landing(self, size: int) -> Tensor:
        """Return pinned memory for `size` numbers."""
        return self._landings[next(self._landed) % _LANDINGS, :size]

    def close(self) -> None:
        """See `Runtime`."""
        for stream in self._streams:
            stream.close()
        if self._context is not None:
            _done(cuda.cuCtxDestroy(self._context))
        self.ledger.thread(device=self._before)

    def _warm_up(self) -> None:
        """Do everything once: a kernel's first launch loads it, and may wait for all streams."""
        one, other = (
            DeviceMemory(self, Buffer("", ""), torch.zeros(1, dtype=torch.float64, device=self.device))
            for _ in range(2)
        )
        one.set([1.0])
        other.double(one)
        other.read([])
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)

    def _be(self, name: str) -> None:
        self._local.name = name
        self.ledger.thread(device=name)


class DeviceStream:
    """See `PlayStream`."""

    def __init__(self, runtime: DeviceRuntime, stream: Stream, actor: Actor, lag: bool) -> None:
        self.actor = actor
        self._runtime, self._stream, self._lag = runtime, stream, lag
        self._ledger = runtime.ledger
        self._landed: list[tuple[Tensor, list[float]]] = []
        self._newest: Mark | None = None

    def launch(
        self,
        what: str,
        work: Callable[[], None],
        reads: Sequence[DeviceMemory] = (),
        writes: Sequence[DeviceMemory] = (),
        depth: int = 0,
    ) -> None:
        """See `PlayStream`."""
        ledger = self._ledger
        if ledger.on:
            ledger.thread(device=self._runtime.current)
            read, written = [memory.buffer for memory in reads], [memory.buffer for memory in writes]
            self._newest = ledger.launch(self.actor, what, read, written, depth + 1)
        for memory in reads:
            memory.readers = self._landed
        try:
            with self._stream.use():
                if self._lag:
                    torch.cuda._sleep(_LAG_CYCLES)  # type: ignore[no-untyped-call]
                work()
        except torch.AcceleratorError as error:
            raise StreamError(_told(error)) from None
        if ledger.strict:
            self._stream.synchronize()

    def record(self, name: str) -> DevicePoint:
        """See `PlayStream`. Raises StreamError."""
        mark = self._ledger.record(self.actor, name) if self._ledger.on else None
        try:
            return DevicePoint(self._ledger, self._stream.record(name), mark)
        except torch.AcceleratorError as error:
            raise StreamError(_told(error)) from None

    def wait(self, event: DevicePoint) -> None:
        """See `PlayStream`."""
        if self._ledger.on:
            self._ledger.wait(self.actor, event.mark)
        self._stream.wait(event.event)

    def synchronize(self) -> None:
        """See `PlayStream`."""
        self.record("synchronize").synchronize()
        while self._landed:
            landing, into = self._landed.pop(0)
            into.extend(landing.tolist())

    def close(self) -> None:
        """Finish what was launched."""
        self._stream.synchronize()
        if self._newest is not None:
            self._ledger.completed(self._newest)
        self._ledger.close(self.actor, depth=1)


class DevicePoint:
    """See `Point`."""

    def __init__(self, ledger: Ledger, event: Event, mark: Mark | None) -> None:
        self.event, self.mark = event, mark
        self._ledger = ledger

    def synchronize(self) -> None:
        """See `Point`."""
        if self._ledger.on:
            self._ledger.sync(self.mark)
        self.event.synchronize()


class DeviceMemory:
    """See `Memory`."""

    def __init__(self, runtime: DeviceRuntime, buffer: Buffer, tensor: Tensor) -> None:
        self.buffer = buffer
        self.tensor: Tensor | None = tensor
        self.readers: list[tuple[Tensor, list[float]]] = []
        self._runtime = runtime

    @property
    def _here(self) -> Tensor:
        assert self.tensor is not None, f"{self.buffer.name} was given back"
        return self.tensor

    def set(self, values: Sequence[float]) -> None:
        """See `Memory`."""
        # By kernels: a copy from the host would have to be of memory that is pinned already.
        for place, value in enumerate(values):
            self._here[place].fill_(value)

    def double(self, source: DeviceMemory) -> None:
        """See `Memory`."""
        torch.mul(source._here, 2, out=self._here)

    def read(self, into: list[float]) -> None:
        """See `Memory`."""
        landing = self._runtime.landing(len(self._here))
        landing.copy_(self._here, non_blocking=True)
        self.readers.append((landing, into))

    def preset(self, values: Sequence[float]) -> None:
        """See `Memory`."""
        self._here.copy_(torch.tensor(values, dtype=torch.float64))
        torch.cuda.current_stream(self._runtime.device).synchronize()

    def values(self) -> list[float]:
        """See `Memory`."""
        return [float(value) for value in self._here.tolist()]


class DevicePool:
    """torch's allocator: freed memory goes to the next one who asks for that size on the same stream."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._buffers: dict[int, Buffer] = {}

    def take(self, size: int, name: str = "", order: DeviceStream | None = None) -> DeviceMemory:
        """See `Pool`."""
        runtime = self._runtime
        if order is None:
            tensor = torch.empty(size, dtype=torch.float64, device=runtime.device)
        else:
            with order._stream.use():
                tensor = torch.empty(size, dtype=torch.float64, device=runtime.device)
        buffer = self._buffers.setdefault(tensor.data_ptr(), Buffer(name, str(runtime.device), size))
        buffer.name = name or buffer.name
        if runtime.ledger.on:
            runtime.ledger.issue(buffer, "allocation", _actor(order), depth=1)
        return DeviceMemory(runtime, buffer, tensor)

    def give(self, memory: DeviceMemory, order: DeviceStream | None = None) -> None:
        """See `Pool`."""
        if self._runtime.ledger.on:
            self._runtime.ledger.free(memory.buffer, "free", _actor(order), depth=1)
        memory.tensor = None


def _actor(stream: DeviceStream | None) -> Actor | None:
    return None if stream is None else stream.actor


def _done(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise StreamError(f"CUDA error: {status}")
    return values[0] if values else None


def _told(error: torch.AcceleratorError) -> str:
    """Return torch's text without its advice, with the number that the driver has for it."""
    text = str(error).partition("\n")[0]
    return text.replace("CUDA error:", "CUDA error 400:") if "invalid resource handle" in text else text
