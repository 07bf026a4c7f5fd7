"""How long the device works for each step, by its own clock: a host sees only how long the launch takes.

Timing events lie around a step's launches, beside kernels and graph replays and not inside. No
stream or host waits for them: they are read when the step is retired.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ppengine.common.ring import Kind, RingWriter
from ppengine.stage.backends.cuda.streams import Event, Stream


class DeviceTimer:
    """Writes the device's work into the main ring. For the thread that launches, which owns that ring."""

    def __init__(self, ring: RingWriter) -> None:
        self.ring = ring
        self.free: list[TimedWork] = []
        """Reused, so there are as many as steps have been under way at once."""

    def work(self, stream: Stream, step: int, tokens: int, context: int) -> TimedWork:
        """Return a block for the launches of `step` on `stream`: `tokens`, of which attention reads `context`."""
        work = self.free.pop() if self.free else TimedWork(self)
        work.take(stream, step, tokens, context)
        return work


class TimedWork:
    """The device's work for one step: all launches in its block. A `Completion`, done when the device is."""

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._begun, self._through, self._again, self._ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(4)
        )

    def take(self, stream: Stream, step: int, tokens: int, context: int) -> None:
        """Become the work of another step."""
        self._stream, self._labels, self._samples = stream, (step, tokens, context), False
        self._waited = False
        self._end = Event("step", self._ended, stream.order.ledger)

    def __enter__(self) -> None:
        self._begun.record(self._stream.raw)

    def sampling(self) -> None:
        """Note that layers and head are launched: the rest of the block samples."""
        self._through.record(self._stream.raw)
        self._samples = True

    def goes_on(self) -> None:
        """Note that launches go on, behind layers and head: the time since then is not work."""
        self._again.record(self._stream.raw)
        self._waited = True

    @contextmanager
    def elsewhere(self, stream: Stream) -> Iterator[None]:
        """Return a block for launches on `stream` that go on with it, behind a block that ended with `sampling`."""
        self._again.record(stream.raw)
        self._waited = True
        yield
        self._end = stream.record("step", self._ended)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end = self._stream.record("step", self._ended)

    def done(self) -> bool:
        """Return whether the device has done it; does not wait."""
        return self._end.done()

    def synchronize(self) -> None:
        """Wait in the calling thread."""
        self._end.synchronize()

    def publish(self) -> None:
        """Write it into the ring as ended now, and free it for another step; it must be done."""
        over_ns, (step, tokens, context) = time.monotonic_ns(), self._labels
        work_ns = _elapsed_ns(self._begun, self._ended)
        if self._waited:
            work_ns -= _elapsed_ns(self._through, self._again)
        begun_ns = over_ns - work_ns
        through_ns = begun_ns + _elapsed_ns(self._begun, self._through) if self._samples else over_ns
        self._timer.ring.begin(
            Kind.ON_DEVICE,
            step,
            size=tokens,
            detail=context,
            begun_ns=begun_ns,
            returned_ns=through_ns,
            done_ns=over_ns,
        )
        self._timer.free.append(self)


def _elapsed_ns(begun: torch.cuda.Event, over: torch.cuda.Event) -> int:
    return int(begun.elapsed_time(over) * 1e6)
