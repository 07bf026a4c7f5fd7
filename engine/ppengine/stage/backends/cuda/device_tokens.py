"""Sampled tokens that stay on devices: tables of newest tokens, and the end that announces them to the first stage.

Tokens need no slots: the last stage samples straight into the first one's table of newest tokens,
where a token stays until its own step has been through all stages.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ppengine.common.ring import Kind
from ppengine.stage.backends.base import Slots
from ppengine.stage.backends.cuda.device_edges import StreamSender
from ppengine.stage.backends.cuda.peer_memory import OpenedMemory
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.edge import Edge
from ppengine.stage.edge_flags import Flag
from ppengine.stage.edge_offers import Offer
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.recorder import Recorder
from ppengine.stage.token_return import KEEP_RETURNS


class DeviceTokenSender(StreamSender):
    """Leads from the last stage back to the first. `newest` [SLOTS] int32 is the first one's table, to sample into."""

    def __init__(
        self, edge: Edge, signals: Signals, memory: OpenedMemory, ring: Recorder, device: torch.device,
        late: Stream | None = None,
    ) -> None:  # fmt: skip
        """`late`: the stream that samples behind masks which come later."""
        super().__init__(edge, signals, memory, ring)
        self.newest = memory.tensor(device).view(torch.int32)
        self._late, self._writer = late, late

    def sampled(self, step: int, tokens: Tensor, *, late: bool = False) -> None:
        """Announce tokens [R] of `step`, which the launched kernels sample into `newest`."""
        self._writer = self._late if late else None
        self._record_put(step, tokens)

    def retired(self, step: int, tokens: Tensor) -> None:
        """Do nothing: the device has written them."""

    @override
    def put(self, step: int, tensor: Tensor) -> None:
        """Announce that tokens [R] of `step` are in `newest` behind all work launched so far."""
        self.edge.wire.check_sendable()
        number = self.edge.number + 1
        self._signals.write(Flag.FILLED, number, self._writer)
        self._signals.peer_does(number, "use of tokens", number)
        self._announce(step, tensor)


class LocalTokenTable:
    """Sampled tokens of a stage that samples itself, in a table on its card: the compute stream has the order."""

    def __init__(self) -> None:
        self._number = 0
        """Number of the newest return that will come."""
        self._awaited: Slots = np.zeros(64, np.int64)
        """Number of the newest return that brings, or brought, the token of each slot; 0: none."""

    def store(self, slots: Slots, tokens: Slots) -> None:
        """Do nothing: the sampling kernel writes the table."""

    def expect(self, step: int, slots: Slots) -> None:
        """Note that a token will be sampled for each of `slots` in `step`."""
        self._number += 1
        self._make_room(slots)
        self._awaited[slots] = self._number

    def tokens(self, slots: Slots) -> Slots:
        """Return -1 for each slot: its newest token is in the table once the stream has passed `arrive`."""
        self._newest_return(slots)
        return np.full(len(slots), -1, np.int64)

    def arrive(self) -> None:
        """Do nothing: sampling was launched on the same stream."""

    def forget(self, slots: list[int]) -> None:
        """Drop the tokens of released slots, so that a wrong marker fails and finds no other request's token."""
        self._awaited[[slot for slot in slots if slot < len(self._awaited)]] = 0

    def check_peer(self) -> None:
        """Do nothing: there is no peer."""

    def release(self) -> None:
        """Do nothing: the stream waits for no other."""

    def close(self) -> None:
        """Do nothing: there is no edge."""

    def _newest_return(self, slots: Slots) -> int:
        """Return the number of the newest return that any of `slots` needs. Raises ValueError for one without."""
        self._make_room(slots)
        awaited = self._awaited[slots]
        if (awaited == 0).any():
            raise ValueError(f"slot {int(slots[awaited == 0][0])} has no sampled token on this stage")
        return int(awaited.max())

    def _make_room(self, slots: Slots) -> None:
        more = int(slots.max()) + 1 - len(self._awaited)
        if more > 0:
            self._awaited = np.concatenate([self._awaited, np.zeros(max(more, len(self._awaited)), np.int64)])


class DeviceTokenTable(LocalTokenTable):
    """The first stage's side of sampled tokens that the last stage's device writes into a table on this card."""

    def __init__(self, ring: Recorder, edge: Edge, offer: Offer, signals: Signals, table: Buffer) -> None:
        super().__init__()
        self._ring, self.edge, self.offer, self._signals = ring, edge, offer, signals
        self._table = table
        """The table as the ledger knows it."""
        self._wanted = self._ordered = 0
        """Newest return that a row has needed, and newest return that the stream has waited for, or will have."""
        self._coming: deque[tuple[int, int]] = deque()
        """Step and number of tokens of returns whose headers were not read."""

    @override
    def expect(self, step: int, slots: Slots) -> None:
        super().expect(step, slots)
        self._coming.append((step, len(slots)))
        if len(self._coming) > KEEP_RETURNS:
            self._receive_oldest()

    @override
    def tokens(self, slots: Slots) -> Slots:
        self._wanted = max(self._wanted, self._newest_return(slots))
        while self._number - len(self._coming) < self._wanted:
            self._receive_oldest()
        return np.full(len(slots), -1, np.int64)

    @override
    def arrive(self) -> None:
        """Let the stream wait for the returns that `tokens` was called for."""
        if self._wanted > self._ordered:
            # Slots that are written now are not read: a read comes a step through all stages later.
            self._table.forget()
            self._signals.peer_does(self._wanted, "sampling", writes=(self._table,))
            self._signals.wait(Flag.FILLED, self._wanted)
            self._ordered = self._wanted

    @override
    def check_peer(self) -> None:
        """Raise PeerLostError if the last stage is gone."""
        self.edge.wire.check_open()

    @override
    def release(self) -> None:
        """Let the stream run on; any thread may call it."""
        self._signals.release(Flag.FILLED)

    def drop(self) -> None:
        """Leave the edge to the wire."""
        self._signals.close()

    @override
    def close(self) -> None:
        """Close the edge; the stream must be done with it."""
        self._coming.clear()
        self.drop()
        self.edge.close()

    def _receive_oldest(self) -> None:
        step, count = self._coming.popleft()
        like = torch.empty(count, dtype=torch.int64, device="meta")
        with self._ring.operation(Kind.TOKEN_RETURN, step, self.edge.peer, like.nbytes):
            self.edge.receive_header(like, step)
