"""Buffers of memory that an allocator hands out and takes back: the storage's own end is the free."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.ledger.ledger import Ledger

MOST = 256
"""Addresses that are remembered after they were freed."""


class StorageBuffers:
    """One buffer an address. A storage that comes to an address after another has gone is a new issue of it.

    A storage that is kept and filled again keeps its buffer, so that filling it too early is a
    rewrite.
    """

    def __init__(self, ledger: Ledger, label: str) -> None:
        self._ledger = ledger
        self._label = label
        self._session = 0
        self._known: dict[int, tuple[weakref.ref[Any] | None, Buffer]] = {}

    def of(self, storage: Any, address: int, size: int) -> Buffer:
        """Return the buffer that `storage` at `address` is."""
        ledger = self._ledger
        if self._session != ledger.session:
            self._session = ledger.session
            self._known.clear()
        reference, buffer = self._known.get(address, (None, None))
        if buffer is not None and reference is not None and reference() is storage:
            return buffer
        if buffer is None:
            self._shrink()
            buffer = ledger.buffer(f"{self._label} {len(self._known)}", size=size)
        buffer.size = size
        ledger.issue(buffer, "allocation", depth=1)
        self._known[address] = weakref.ref(storage, partial(self._gone, buffer, ledger.session)), buffer
        return buffer

    def _gone(self, buffer: Buffer, session: int, _: object) -> None:
        if self._ledger.on and session == self._ledger.session:
            self._ledger.dropped(buffer, "end of the storage", depth=1)

    def _shrink(self) -> None:
        """Forget all names when there are too many; live storage comes back as a new issue."""
        if len(self._known) >= MOST:
            for _, buffer in self._known.values():
                buffer.forget()
            self._known.clear()
