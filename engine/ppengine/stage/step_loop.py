"""The step loop of one generation: takes steps from the core in order, executes and acknowledges them."""

from __future__ import annotations

import time
from collections import deque

from ppengine.common.ring import Gauge, Kind
from ppengine.protocol.steps import Mask, Step
from ppengine.stage.core_link import CoreLink
from ppengine.stage.generations import Generations
from ppengine.stage.pending_step import Pending
from ppengine.stage.recorder import Recorder
from ppengine.stage.runner import Runner
from ppengine.stage.wire import SupersededError

_IDLE, _STEP = Kind.IDLE.value, Kind.STEP.value
POLL_MS = 100
_CHANGING_POLL_MS = 1
"""While the cache is changed, which takes 10 to 30 ms."""
MOST_PENDING = 2
"""Steps launched and not done: one that the device works on, one that waits for it."""
_GLANCE_S = 2e-5
"""Between two looks at a device that works."""


class StepLoop:
    """Runs in the stage's main thread; one object a generation. `newest` is the number of the newest step, 0: none."""

    def __init__(self, runner: Runner, link: CoreLink, ring: Recorder, generations: Generations) -> None:
        self.newest = 0
        self._runner = runner
        self._link = link
        self._ring = ring
        self._generations = generations
        self._inbox: deque[Step] = deque()
        self._pending: deque[Pending] = deque()
        link.late_masks.clear()

    def run(self) -> None:
        """Execute steps until the generation is over or the stage must end. Raises errors of steps and neighbours."""
        while (step := self._next()) is not None:
            self._execute(step)

    def meanwhile(self) -> bool:
        """Acknowledge finished work while a neighbour's message is waited for; return whether there will be more."""
        self._retire()
        self._send_mapped()
        if not (self._pending or self._runner.changing) or self._link.over():
            return False
        if self._runner.lacks_masks:
            # The stage before may need its tokens for the message.
            self._take(0)
        time.sleep(_GLANCE_S)
        return True

    def late_masks(self, number: int) -> list[Mask]:
        """Wait for the masks that come behind step `number`; acknowledge finished work and prepare the next meanwhile.

        Masks follow from tokens of the steps before. Raises SupersededError, PeerLostError.
        """
        masks = self._link.late_masks
        while number not in masks:
            if self._link.over():
                raise SupersededError(f"step {number} waited for its masks")
            self._retire()
            self._receive(0 if self._pending else POLL_MS)
            if self._inbox:
                self._runner.prepare(self._inbox[0])
            if self._pending:
                self._runner.check_neighbours()
                time.sleep(_GLANCE_S)
        return masks.pop(number)

    def _execute(self, step: Step) -> None:
        ring, number = self._ring, step.number
        if self.newest and number != self.newest + 1:
            raise ValueError(f"step {number} came after step {self.newest}; steps count without gaps")
        self.newest = number
        ring.gauge(Gauge.STEP_BEGUN, number)
        tokens = sum(row.count for row in step.rows)
        context = sum(row.start + row.count for row in step.rows)
        seq = ring.begin(_STEP, number, -1, tokens, context)
        try:
            self._pending.append(self._runner.execute(step))
        finally:
            ring.end(seq)
        self._retire()
        while len(self._pending) > MOST_PENDING:
            self._watch()
            if self._link.over():
                raise SupersededError(f"step {number} was launched")

    def _retire(self) -> None:
        """Acknowledge the steps that are done, in order. A step that is done because of a release is void."""
        while self._pending and self._pending[0].done and not self._generations.superseded:
            retired = self._pending.popleft().finish()
            self._ring.gauge(Gauge.STEP_FINISHED, retired.number)
            self._link.send(retired)

    def _send_mapped(self) -> None:
        """Report a change of the cache that has ended."""
        if self._runner.changing and (mapped := self._runner.mapped()) is not None:
            self._link.send(mapped)

    def _next(self) -> Step | None:
        """Return the next step, None if the generation is over or the stage must end.

        All messages are taken off the socket first, so that they can be counted.
        """
        link, runner = self._link, self._runner
        self._take(0)
        while self._pending and not self._inbox and not link.over():
            self._watch(until_step=True)
        if not self._inbox and not link.leaving:
            seq = self._ring.begin(_IDLE)
            try:
                while not self._inbox and not link.over():
                    self._take(_CHANGING_POLL_MS if runner.changing else POLL_MS)
                    if runner.outgoing is not None and runner.outgoing.error is not None:
                        raise runner.outgoing.error
            finally:
                self._ring.end(seq)
        if link.over():
            return None
        step = self._inbox.popleft()
        self._ring.gauge(Gauge.INBOX, len(self._inbox))
        return step

    def _watch(self, until_step: bool = False) -> None:
        """Wait until the device has done a step or the wait is over, for its masks, or, with `until_step`, for a step.

        It looks at the device again and again: the message that a device waits for may never come.
        Raises PeerLostError.
        """
        number, lacking = self._pending[0].retired.number, self._runner.lacks_masks
        # Behind its masks the step waits for the device: as a wait for masks, that one would hide a stuck kernel.
        with self._ring.operation(Kind.MASK if number == lacking else Kind.DEVICE, number):
            while not self._pending[0].done and not (until_step and self._inbox) and not self._link.over():
                if number == lacking != self._runner.lacks_masks:
                    break
                time.sleep(_GLANCE_S)
                self._take(0)
                self._runner.check_neighbours()
        self._retire()

    def _take(self, timeout_ms: int) -> None:
        """Receive, and launch the sampling of a step whose masks have come."""
        self._receive(timeout_ms)
        masks, number = self._link.late_masks, self._runner.lacks_masks
        if number and number in masks:
            self._runner.sample_late(masks.pop(number))

    def _receive(self, timeout_ms: int) -> None:
        self._ring.tick()
        self._send_mapped()
        for step in self._link.receive(timeout_ms):
            self._inbox.append(step)
            self._ring.gauge(Gauge.INBOX, len(self._inbox))
            self._runner.announce(step)
