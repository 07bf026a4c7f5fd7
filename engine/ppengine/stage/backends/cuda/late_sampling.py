"""Sampling behind masks that come later, on a stream of its own: the layers of the next step do not wait for it.

A last stage that has others before it keeps a copy of the logits and launches the next step. When the masks are there,
it samples on the stream `late sampling`, beside these layers. Steps sample in their order, and one waits at most.
"""

from __future__ import annotations

from collections.abc import Iterable

from ppengine.common.ring import Kind
from ppengine.protocol.steps import Mask, Register, Step
from ppengine.stage.backends.cuda.decode_graphs import Launched
from ppengine.stage.backends.cuda.device_buffers import DeviceBuffers
from ppengine.stage.backends.cuda.device_timing import TimedWork
from ppengine.stage.backends.cuda.step_sampler import StepSampler
from ppengine.stage.backends.cuda.streams import Event
from ppengine.stage.pending_step import Pending
from ppengine.stage.runner import RunnerParts

KEPT = 4
"""Copies that may be in use at once: more than a stage has steps under way."""


class _Waiting:
    """A step whose layers are launched, and its sampling not. A `Completion`, done when that is launched, too."""

    def __init__(
        self, step: Step, requests: list[Register], kept: Launched, work: TimedWork, pending: Pending,
        sampling: LateSampling,
    ) -> None:  # fmt: skip
        self.step, self.requests, self.work = step, requests, work
        self.pending: Pending | None = pending
        """The step's own; None once it is sampled: in a cycle, copies would stay until Python looks for cycles."""
        self.kept = kept
        """Copies, which this keeps until the step is retired: torch would hand their memory to the layers."""
        self._sampling = sampling

    def done(self) -> bool:
        """Return whether its sampling is launched."""
        return self.pending is None

    def synchronize(self) -> None:
        """Wait for its masks, and launch it."""
        if not self.done():
            self._sampling.wait()


class LateSampling:
    """The steps of one runner that sample behind masks; `sampler` launches."""

    def __init__(self, parts: RunnerParts, buffers: DeviceBuffers, sampler: StepSampler) -> None:
        self._late_masks, self._ring = parts.late_masks, parts.ring
        self._compute, self._stream, self._sampler = buffers.compute, buffers.late_sampling, sampler
        self._turn = 0
        self._buffers = [self._compute.buffer(f"kept logits {turn}") for turn in range(KEPT)]
        """Copies as the ledger knows them: each step has the next one."""
        self._waiting: _Waiting | None = None
        self._sampled: Event | None = None
        """End of the newest sampling, as long as compute may run beside it."""

    @property
    def number(self) -> int:
        """Number of the step that waits for masks; 0: none does."""
        return 0 if self._waiting is None else self._waiting.step.number

    def keep(self, step: Step, requests: list[Register], launched: Launched, work: TimedWork, pending: Pending) -> None:
        """Launch copies of the logits of a step, which will be overwritten. No other step may wait."""
        assert self._stream is not None and self._waiting is None
        compute = self._compute
        with compute.use():
            kept = Launched(*(part.clone() for part in launched))
        self._turn = (self._turn + 1) % KEPT
        buffer = self._buffers[self._turn]
        if compute.order.ledger.on:
            buffer.size = kept.out.nbytes
            compute.order.ledger.issue(buffer, "allocation")
        compute.declare("keeping of logits", writes=(buffer,))
        self._stream.wait(compute.record("logits kept"))
        compute.settle()
        self._waiting = _Waiting(step, requests, kept, work, pending, self)
        pending.until(self._waiting)

    def wait(self) -> None:
        """Wait for the masks of the step that lacks them, if one does, and launch its sampling."""
        if self._waiting is not None:
            self.sample(self.masks_of(self._waiting.step))

    def masks_of(self, step: Step) -> list[Mask]:
        """Wait for the masks that come behind a step, while the device computes layers, or idles behind them."""
        with self._ring.operation(Kind.MASK, self._compute.order.step, size=len(step.late)):
            return self._late_masks(step.number)

    def sample(self, masks: list[Mask]) -> None:
        """Launch the sampling of the step that waits for `masks`."""
        waiting, self._waiting, stream = self._waiting, None, self._stream
        assert waiting is not None and waiting.pending is not None and stream is not None
        step = waiting.step
        step.masks = step.masks + masks
        stream.declare("use of kept logits", reads=(self._buffers[self._turn],))
        with stream.working(), waiting.work.elsewhere(stream):
            self._sampler.sample(step, waiting.requests, waiting.kept, None, waiting.pending, stream)
        self._sampled = stream.record("sampled late")
        waiting.pending = None

    def settle(self) -> bool:
        """Let compute wait for all sampling that is launched; return whether it may have to."""
        sampled, self._sampled = self._sampled, None
        if sampled is not None:
            self._compute.wait(sampled)
        return sampled is not None

    def before(self, slots: Iterable[int]) -> None:
        """Make tables of these slots free for new requests: a row of the one before may still be sampled."""
        waiting = self._waiting
        if waiting is not None and not {one.slot for one in waiting.requests}.isdisjoint(slots):
            self.wait()
        self.settle()
