"""KV blocks that are moved between a device and its host, as buffers of the ledger."""

from __future__ import annotations

from collections.abc import Iterable

from ppengine.stage.ledger.actors import HOST, Buffer
from ppengine.stage.ledger.ledger import Ledger

MOST = 4096
"""Blocks that are remembered; beyond, all are forgotten."""


class BlockBuffers:
    """The blocks that swaps have touched since the ledger was switched on.

    They have no name in the ledger, whose tables are for buffers of messages. The writer of a
    device block before its first swap is not known: the last writer of any block is taken for it.
    """

    def __init__(self, ledger: Ledger, device: str) -> None:
        self.whole = ledger.buffer("KV blocks", device)
        """All blocks of the device, for writers of some of them on the stream that computes."""
        self._ledger = ledger
        self._session = 0
        self._blocks: dict[tuple[bool, int], Buffer] = {}

    def of(self, on_device: bool, blocks: Iterable[int]) -> list[Buffer]:
        """Return the buffers of blocks that are moved."""
        if self._session != self._ledger.session or len(self._blocks) > MOST:
            self._session = self._ledger.session
            self._blocks.clear()
        return [self._blocks.get((on_device, block)) or self._add(on_device, block) for block in blocks]

    def forget(self) -> None:
        """Forget all: their contents do not count any more."""
        self._blocks.clear()

    def known(self, blocks: Iterable[int]) -> list[Buffer]:
        """Return the buffers of those blocks of the device that have been moved."""
        if not self._blocks or self._session != self._ledger.session:
            return []
        wanted = set(blocks)
        return [buffer for (on_device, block), buffer in self._blocks.items() if on_device and block in wanted]

    def _add(self, on_device: bool, block: int) -> Buffer:
        name = f"KV block {block}" if on_device else f"host slot {block}"
        buffer = self._blocks[on_device, block] = Buffer(name, self.whole.device if on_device else HOST)
        buffer.writer = self.whole.writer if on_device else None
        return buffer
