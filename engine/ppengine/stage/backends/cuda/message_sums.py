"""Checksums of hidden states as this stage's device makes them, on its compute stream; no host waits for them.

A sum is made behind the layers, and travels with its message. The next stage's device makes it
again, once the message lies where its layers read it. The host compares both at the end of the
step.
"""

from __future__ import annotations

import torch
from ppkernels.weighted_sum import weighted_sum
from torch import Tensor

from ppengine.stage.backends.cuda.peer_memory import SUM_BYTES
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.checks import StageChecks
from ppengine.stage.checksum import BY_DEVICE, Arrival, as_checksum
from ppengine.stage.edge import Edge
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.pending_step import Pending

_CELLS = 16
"""More than the steps that are under way."""


class MessageSums:
    """Memory and launches of the sums of one stage; kept for life."""

    def __init__(self, compute: Stream, device: torch.device) -> None:
        self._compute = compute
        self._scratch = torch.zeros(2, dtype=torch.int64, device=device)
        self.made = torch.zeros(1, dtype=torch.int64, device=device)
        """Sum of the newest message that this stage computed."""
        pinned = torch.zeros(_CELLS, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._cells = list(pinned.unbind())
        """By message, in turn: the sum of what has come, and the one that came along. The device writes both."""
        self._addresses = [cell.data_ptr() for cell in self._cells]
        self._turn = 0

    @property
    def behind(self) -> int:
        """Host address for the sum that comes with the next message, if it lies behind it."""
        return self._addresses[self._turn] + SUM_BYTES

    def make(self, hidden: Tensor) -> int:
        """Launch the sum of hidden states into `made`; return the checksum of a message that it travels with."""
        with self._compute.doing("checksum"), self._compute.use():
            weighted_sum(hidden.contiguous(), self.made, self._scratch)
        return BY_DEVICE

    def compare(
        self, edge: Edge, step: int, hidden: Tensor, source: Buffer, checks: StageChecks, pending: Pending
    ) -> None:
        """Launch the sum of the newest message, which is in `source`, and have it compared at the end of the step.

        The step must wait for later work on the stream. A message that carries no sum of a device
        is not compared.
        """
        if not edge.checksum & BY_DEVICE:
            return
        arrival, cell = Arrival.newest(edge, step, hidden), self._cells[self._turn]
        self._turn = (self._turn + 1) % _CELLS
        # Not `doing`: strict order waits for a neighbour's message with the layers.
        self._compute.declare("checksum", (source,))
        with self._compute.use():
            weighted_sum(hidden, cell, self._scratch)

        def judge() -> None:
            arrived, behind = map(as_checksum, cell.tolist())
            checks.compare_sums(arrival, behind if arrival.checksum == BY_DEVICE else arrival.checksum, arrived)

        pending.finally_do(judge)

    def warm_up(self, hidden: Tensor) -> None:
        """Compile the kernel for hidden states like `hidden`, before the first message would wait for it."""
        with self._compute.use():
            for result in (self.made, self._cells[0]):
                weighted_sum(hidden, result, self._scratch)
