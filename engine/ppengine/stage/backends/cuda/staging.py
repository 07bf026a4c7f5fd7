"""A step's integers on their way to the device: one copy from pinned memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from ppkernels.batch import Batch
from ppkernels.shared_prefixes import on_device

from ppengine.stage.backends.cuda.streams import Event, Stream

STAGED = 4
"""Steps whose integers may be on their way to the device; more than a stage has under way."""


def batch_on_device(batch: Batch, device: torch.device, shared: NDArray[np.int64] | None = None) -> Batch:
    """Return a step's batch on the device, int32; does not wait for the copy.

    `shared` [words_of(B)] are its shared prefixes.
    """
    words = torch.from_numpy(np.zeros(0, np.int64) if shared is None else shared)
    parts = (batch.positions, batch.slot_mapping, batch.query_start, batch.seq_lens, batch.block_tables, words)
    host = torch.cat([part.reshape(-1).to(torch.int32) for part in parts]).pin_memory()
    parts_on_device = torch.split(host.to(device, non_blocking=True), [part.numel() for part in parts])
    positions, slots, starts, lengths, tables, words = parts_on_device
    return Batch(
        positions=positions,
        slot_mapping=slots,
        query_start=starts,
        query_lens=batch.query_lens,
        seq_lens=lengths,
        block_tables=tables.view(batch.block_tables.shape),
        decode_only=batch.decode_only,
        block_size=batch.block_size,
        shared=None if shared is None else on_device(words, len(batch.query_lens)),
    )


class Staging:
    """The integers of a step: `on_device` [length] int32, where graphs read, and host buffers that take turns."""

    def __init__(self, name: str, length: int, compute: Stream, device: torch.device) -> None:
        self.on_device = torch.zeros(length, dtype=torch.int32, device=device)
        self._compute = compute
        pinned = device.type == "cuda"
        self._host = [torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(STAGED)]
        self._copied: list[Event | None] = [None] * STAGED
        self._ledger = compute.order.ledger
        self._known = [self._ledger.buffer(f"{name} {turn}", size=4 * length) for turn in range(STAGED)]
        self._turn = 0

    def next(self) -> NDArray[np.int32]:
        """Return the buffer to fill; it holds the integers of `STAGED` steps ago."""
        self._turn = (self._turn + 1) % STAGED
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if self._ledger.on:
            self._ledger.write(self._known[self._turn], "integers of a step", depth=1)
        array: NDArray[np.int32] = self._host[self._turn].numpy()
        return array

    def send(self, used: int) -> None:
        """Launch the copy of the first `used` integers."""
        with self._compute.doing("copy of integers", (self._known[self._turn],)), self._compute.use():
            self.on_device[:used].copy_(self._host[self._turn][:used], non_blocking=True)
        self._copied[self._turn] = self._compute.record("integers copied")
