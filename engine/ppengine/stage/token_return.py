"""Sampled tokens back to the first stage, for rows whose input token the core has not seen (`TOKEN_ON_DEVICE`)."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from ppengine.common.ring import Kind
from ppengine.stage.backends.base import Slots
from ppengine.stage.edge import Edge
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.storage import StorageBuffers
from ppengine.stage.recorder import Recorder
from ppengine.stage.transport import WireEnd

_TOKEN_RETURN = Kind.TOKEN_RETURN.value
KEEP_RETURNS = 32
"""Returns left unread before the oldest is taken in; far above the steps that the core keeps in flight."""


class HostTokenTable(WireEnd):
    """The newest sampled token of each slot, in host memory of the first stage.

    With one stage the sampler fills it (`store`). With more, each step that samples announces a
    return (`expect`), and returns are taken in, in step order, when a row needs one (`tokens`).
    """

    def __init__(self, ring: Recorder, edge: Edge | None = None, ledger: Ledger | None = None) -> None:
        self._ring = ring
        self.edge = edge
        self._ledger = ledger = ledger or Ledger()
        name = "" if edge is None else f"tokens<{edge.peer}"
        self._stream = self._peer = None
        if edge is not None:
            self._stream, self._peer = ledger.stream(name, "receive"), ledger.peer(f"stage {edge.peer}")
        self._buffers = StorageBuffers(ledger, f"{name} buffer")
        self._latest: Slots = np.full(64, -1, np.int64)
        self._awaited: Slots = np.zeros(64, np.int64)
        """Step of the newest return that brings, or brought, the token of each slot."""
        self._pending: deque[tuple[int, Slots]] = deque()

    def store(self, slots: Slots, tokens: Slots) -> None:
        """Note tokens that this stage has sampled itself."""
        self._make_room(slots)
        self._latest[slots] = tokens

    def expect(self, step: int, slots: Slots) -> None:
        """Note that the last stage will sample a token for each of `slots` in `step`."""
        if self.edge is None:
            return
        self._pending.append((step, slots))
        self._make_room(slots)
        self._awaited[slots] = step
        if len(self._pending) > KEEP_RETURNS:
            self._take_oldest()

    def tokens(self, slots: Slots) -> Slots:
        """Return the newest sampled token of each slot; waits for one that is still on its way."""
        self._make_room(slots)
        newest = self._awaited[slots].max()
        while self._pending and self._pending[0][0] <= newest:
            self._take_oldest()
        tokens = self._latest[slots]
        if (tokens < 0).any():
            raise ValueError(f"slot {int(slots[tokens < 0][0])} has no sampled token on this stage")
        return tokens

    def arrive(self) -> None:
        """Do nothing: `tokens` has waited."""

    def forget(self, slots: list[int]) -> None:
        """Drop the tokens of released slots, so that a wrong marker fails and finds no other request's token."""
        self._latest[[slot for slot in slots if slot < len(self._latest)]] = -1

    def close(self) -> None:
        """Drop the returns that are on their way and close the edge."""
        self._pending.clear()
        if self._stream is not None:
            self._ledger.close(self._stream)
        if self.edge is not None:
            self.edge.close()

    def _make_room(self, slots: Slots) -> None:
        size, have = int(slots.max()) + 1, len(self._latest)
        if size > have:
            more = max(size, 2 * have) - have
            self._latest = np.concatenate([self._latest, np.full(more, -1, np.int64)])
            self._awaited = np.concatenate([self._awaited, np.zeros(more, np.int64)])

    def _take_oldest(self) -> None:
        step, slots = self._pending.popleft()
        assert self.edge is not None  # only `expect` fills the queue, and only with an edge
        buffer = torch.empty(len(slots), dtype=torch.int64)
        ledger, declared = self._ledger, None
        if ledger.on and self._stream is not None:
            known = self._buffers.of(buffer.untyped_storage(), buffer.data_ptr(), buffer.nbytes)
            declared = known, ledger.launch(self._stream, f"tokens of m{step}", writes=[known])
        seq = self._ring.begin(_TOKEN_RETURN, step, self.edge.peer, buffer.nbytes)
        try:
            self.edge.receive(buffer, step)
        finally:
            self._ring.end(seq)
        if ledger.on and declared is not None:
            if self._peer is not None and self._stream is not None:
                ledger.passed(self._peer, self._stream, "message")
            ledger.sync(declared[1])
            ledger.read(declared[0], f"tokens of m{step}")
        self.store(slots, buffer.numpy())
