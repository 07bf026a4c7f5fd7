"""Copies of a step's results into pinned memory, for the host to read once the step is done."""

from __future__ import annotations

import torch
from torch import Tensor

from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.storage import StorageBuffers


class HostCopies:
    """Launches and reads copies. Memory that torch hands out again is the same buffer of the ledger, issued again."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._buffers = StorageBuffers(ledger, "copy out")

    def launch(self, stream: Stream, *parts: Tensor) -> list[Tensor]:
        """Launch copies of `parts` on `stream`, the current one; they are done when its later work is."""
        hosts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
        with stream.doing("copy out", writes=self._known(hosts), depth=1):
            for host, part in zip(hosts, parts, strict=True):
                host.copy_(part, non_blocking=True)
        return hosts

    def read(self, hosts: list[Tensor]) -> list[Tensor]:
        """Return copies that the calling thread is about to read: it must have waited for them."""
        for buffer in self._known(hosts):
            self._ledger.read(buffer, "use of a copy", depth=1)
        return hosts

    def _known(self, hosts: list[Tensor]) -> list[Buffer]:
        """Return the ledger's buffers, none while it is off."""
        if not self._ledger.on:
            return []
        return [self._buffers.of(host.untyped_storage(), host.data_ptr(), host.nbytes) for host in hosts]
