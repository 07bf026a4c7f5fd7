"""The ends of an edge whose messages go from card to card, written by the sender's device into the receiver's memory.

No host waits for a device: each end launches on its compute stream and goes on. The sender copies a message into its
slot, then writes FILLED; the receiver waits for FILLED, takes the message out, then writes READ, for which the sender
waits before it takes the slot again. Sampled tokens need no slots: the last stage samples straight into the first one's
table of newest tokens, where a token stays until its own step has been through all stages.

A wait is launched only for what the other side has launched already, as the header on the wire tells. So a device
waits for nothing but devices, in the order of steps and stages, and a host that waits for its device holds nobody up
for ever. A neighbour that is gone or stuck is the host's to notice: `release` lets the stream run on, and all that
comes of it is thrown away.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ppengine.common.ring import Kind
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.peer_memory import OpenedMemory
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.edge import Edge
from ppengine.stage.edge_flags import Word
from ppengine.stage.edge_offers import Offer, RefusedError
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.ledger.ledger import HOST
from ppengine.stage.recorder import Recorder
from ppengine.stage.token_return import KEEP_RETURNS, Slots
from ppengine.stage.transport import Due

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.device_buffers import CudaState
    from ppengine.stage.backends.cuda.driver_api import Driver


class DeviceInlet:
    """Receives hidden states into `CudaState.incoming`; see `Inlet`."""

    by_device = True

    def __init__(self, edge: Edge, offer: Offer, signals: Signals, driver: Driver, card: CudaState) -> None:
        assert card.incoming is not None and card.landing is not None
        self.edge, self.offer = edge, offer
        self._signals, self._driver, self._stream = signals, driver, card.compute
        self._slots, self._into = card.landing.address, card.incoming
        self._landing, self._incoming = _anew(card.landed), card.fed
        self._due = Due()

    def expect(self, step: int, tokens: int) -> None:
        """Announce, in step order, that `step` brings hidden states of `tokens` tokens."""
        self._due.add(step, tokens)

    def take(self, step: int) -> Tensor:
        """Return the hidden states [tokens, H] of the oldest expected step: there when the stream gets to it."""
        view = self._into[: self._due.next(step)]
        number = self.edge.hear(view, step)
        slot, source = self._landing[number % self.offer.slots], self._slots + self.offer.offset(number)
        self._signals.peer_does(number, f"send of m{step}", self.offer.before(number), writes=(slot,))
        self._signals.wait(Word.FILLED, number)
        self._stream.declare("receive", (slot,), (self._incoming,))
        self._driver.copy(view.data_ptr(), source, view.nbytes, self._stream.handle)
        self._signals.write(Word.READ, number)
        return view

    def release(self) -> None:
        """See `Runner.release`."""
        self._signals.release(Word.FILLED)

    def drop(self) -> None:
        """Leave the edge to the wire."""
        self._signals.close()

    def close(self) -> None:
        """Close the edge; the stream must be done with it."""
        self._due.clear()
        self._signals.close()
        self.edge.close()


class _DeviceSender:
    """What senders have in common: a message is launched, then announced."""

    by_device = True
    error = None

    def __init__(self, edge: Edge, signals: Signals, memory: OpenedMemory, main: Recorder) -> None:
        self.edge = edge
        self._signals, self._memory, self._main = signals, memory, main

    def _announce(self, step: int, tensor: Tensor) -> None:
        sending = self.edge.announce(tensor, step)
        if sending.rest:
            with self._main.operation(Kind.ROOM, step, self.edge.peer, tensor.nbytes):
                self.edge.finish(sending)

    def finish(self, timeout: float | None = None) -> None:
        """Nothing is kept back here; see `Outbox`."""

    def release(self) -> None:
        """See `Runner.release`."""
        self._signals.release(Word.READ)

    def close(self) -> None:
        """Close the edge; the stream must be done with it."""
        self._signals.close()
        self._memory.close()
        self.edge.close()


class DeviceOutbox(_DeviceSender):
    """Sends hidden states into the next stage's slots."""

    def __init__(
        self, edge: Edge, signals: Signals, memory: OpenedMemory, main: Recorder, driver: Driver, card: CudaState
    ) -> None:
        super().__init__(edge, signals, memory, main)
        self._driver, self._stream = driver, card.compute
        names = (f"slot {slot} of stage {edge.peer}" for slot in range(memory.offer.slots))
        self._slots = _anew([card.compute.buffer(name, memory.offer.slot_bytes) for name in names])

    def put(self, step: int, tensor: Tensor) -> None:
        """Launch the sending of a contiguous tensor, which must stay as it is until the stream has passed."""
        offer, number = self._memory.offer, self.edge.number + 1
        if tensor.nbytes > offer.slot_bytes:
            raise ValueError(f"a message of {tensor.nbytes} bytes, the next stage takes {offer.slot_bytes} at most")
        self.edge.wire.check_sendable()
        self._signals.wait(Word.READ, offer.before(number))
        slot, target = self._slots[number % offer.slots], self._memory.address + offer.offset(number)
        self._stream.declare("send", writes=(slot,))
        self._driver.copy(target, tensor.data_ptr(), tensor.nbytes, self._stream.handle)
        self._signals.write(Word.FILLED, number)
        self._signals.peer_does(number, f"receive of m{step}", number, reads=(slot,))
        self._announce(step, tensor)


class DeviceReturn(_DeviceSender):
    """Leads from the last stage back to the first. `newest` [SLOTS] int32: the first one's table, to sample into."""

    def __init__(
        self, edge: Edge, signals: Signals, memory: OpenedMemory, main: Recorder, device: torch.device
    ) -> None:
        super().__init__(edge, signals, memory, main)
        self.newest = memory.tensor(device).view(torch.int32)

    def put(self, step: int, tokens: Tensor) -> None:
        """Tell that tokens [R] of `step` were sampled into `newest` by what was launched so far."""
        self.edge.wire.check_sendable()
        number = self.edge.number + 1
        self._signals.write(Word.FILLED, number)
        self._signals.peer_does(number, "use of tokens", number)
        self._announce(step, tokens)


class DeviceTokens:
    """The first stage's side of sampled tokens, which lie in a table on its card; see `TokenTable`.

    Without an edge this stage samples itself, and its stream has the order.
    """

    def __init__(
        self,
        ring: Recorder,
        edge: Edge | None = None,
        offer: Offer | None = None,
        signals: Signals | None = None,
        sampled: Buffer | None = None,
    ) -> None:
        self._ring, self.edge, self.offer, self._signals = ring, edge, offer, signals
        self._sampled = sampled or Buffer("newest tokens", HOST)
        """The table, as the ledger knows it."""
        self.by_device = edge is not None
        self._number = 0
        """Of the newest return that will come."""
        self._wanted = self._ordered = 0
        """Of the newest return that was asked for, and of the newest that the stream has waited for, or will have."""
        self._coming: deque[tuple[int, int]] = deque()
        """Step and number of tokens of returns whose headers were not read."""
        self._awaited: Slots = np.zeros(64, np.int64)
        """Number of the newest return that brings, or brought, the token of each slot; 0: none."""

    def expect(self, step: int, slots: Slots) -> None:
        """Note that a token will be sampled for each of `slots` in `step`."""
        self._number += 1
        self._make_room(slots)
        self._awaited[slots] = self._number
        if self.edge is not None:
            self._coming.append((step, len(slots)))
            if len(self._coming) > KEEP_RETURNS:
                self._hear_oldest(self.edge)

    def tokens(self, slots: Slots) -> Slots:
        """Return -1 for each slot: its newest token will be in the table, once the stream has passed `arrive`."""
        self._make_room(slots)
        awaited = self._awaited[slots]
        if (awaited == 0).any():
            raise ValueError(f"slot {int(slots[awaited == 0][0])} has no sampled token on this stage")
        self._wanted = max(self._wanted, int(awaited.max()))
        while self.edge is not None and self._number - len(self._coming) < self._wanted:
            self._hear_oldest(self.edge)
        return np.full(len(slots), -1, np.int64)

    def arrive(self) -> None:
        """Let the stream wait for the tokens that were asked for."""
        if self._signals is not None and self._wanted > self._ordered:
            # Slots that are written now are read by nobody: it takes a step through all stages until they are.
            self._sampled.forget()
            self._signals.peer_does(self._wanted, "sampling", writes=(self._sampled,))
            self._signals.wait(Word.FILLED, self._wanted)
            self._ordered = self._wanted

    def forget(self, slots: list[int]) -> None:
        """Drop the tokens of released slots, so that a wrong marker fails instead of finding another's token."""
        self._awaited[[slot for slot in slots if slot < len(self._awaited)]] = 0

    def release(self) -> None:
        """See `Runner.release`."""
        if self._signals is not None:
            self._signals.release(Word.FILLED)

    def drop(self) -> None:
        """Leave the edge to the wire."""
        if self._signals is not None:
            self._signals.close()

    def close(self) -> None:
        """Close the edge; the stream must be done with it."""
        self._coming.clear()
        self.drop()
        if self.edge is not None:
            self.edge.close()

    def _make_room(self, slots: Slots) -> None:
        more = int(slots.max()) + 1 - len(self._awaited)
        if more > 0:
            self._awaited = np.concatenate([self._awaited, np.zeros(max(more, len(self._awaited)), np.int64)])

    def _hear_oldest(self, edge: Edge) -> None:
        step, count = self._coming.popleft()
        like = torch.empty(count, dtype=torch.int64, device="meta")
        with self._ring.operation(Kind.TOKEN_RETURN, step, edge.peer, like.nbytes):
            edge.hear(like, step)


class DeviceEnds:
    """Makes the ends of a stage's edges. What cannot be had raises RefusedError: the wire carries messages then."""

    def __init__(self, driver: Driver, card: CudaState) -> None:
        self._driver, self._card = driver, card

    def inlet(self, edge: Edge, path: Path) -> DeviceInlet:
        """Return the receiving end for hidden states; its `offer` is for the stage before."""
        assert self._card.landing is not None
        offer = self._card.landing.offer
        return DeviceInlet(edge, offer, self._signals(path, edge, create=True), self._driver, self._card)

    def tokens(self, edge: Edge, path: Path, ring: Recorder) -> DeviceTokens:
        """Return the first stage's end for sampled tokens; its `offer` is for the last stage."""
        assert self._card.table is not None
        offer = self._card.table.offer
        return DeviceTokens(ring, edge, offer, self._signals(path, edge, create=True), self._card.fed)

    def outbox(self, edge: Edge, path: Path, main: Recorder, offer: Offer) -> DeviceOutbox:
        """Return the sending end for hidden states."""
        memory, signals = self._open(path, edge, offer)
        return DeviceOutbox(edge, signals, memory, main, self._driver, self._card)

    def token_return(self, edge: Edge, path: Path, main: Recorder, offer: Offer) -> DeviceReturn:
        """Return the last stage's end for sampled tokens."""
        memory, signals = self._open(path, edge, offer)
        return DeviceReturn(edge, signals, memory, main, self._card.device)

    def _signals(self, path: Path, edge: Edge, create: bool) -> Signals:
        try:
            return Signals(self._driver, path, create, self._card.compute, edge.peer)
        except (OSError, ValueError, DriverError) as error:
            raise RefusedError(str(error)) from None

    def _open(self, path: Path, edge: Edge, offer: Offer) -> tuple[OpenedMemory, Signals]:
        try:
            memory = OpenedMemory(self._driver, offer)
        except DriverError as error:
            raise RefusedError(f"{self._card.uuid} does not reach memory of {offer.device}: {error}") from None
        try:
            return memory, self._signals(path, edge, create=False)
        except RefusedError:
            memory.close()
            raise


def _anew(slots: list[Buffer]) -> list[Buffer]:
    """Forget who used the slots in an earlier generation: all that is over."""
    for slot in slots:
        slot.forget()
    return slots
