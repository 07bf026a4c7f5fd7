"""The ends of an edge whose hidden states go from card to card: the sender's device writes into the receiver's memory.

No host waits for a device: each end launches on its compute stream and goes on. The sender copies a
message and its checksum into a slot, then writes FILLED. The receiver waits for FILLED, takes the message out,
then writes READ, for which the sender waits before it takes the slot again.

A wait is launched only for work that the other side has launched already, as the header on the wire
says. So a device waits for nothing but devices, in the order of steps and stages, and a host that
waits for its device blocks no other stage for ever. The host detects a neighbour that is gone or
stuck: `release` lets the stream run on, and all its results are dropped.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from ppengine.common.ring import Kind
from ppengine.stage.backends.cuda.device_buffers import Landing
from ppengine.stage.backends.cuda.message_sums import MessageSums
from ppengine.stage.backends.cuda.peer_memory import SUM_BYTES, OpenedMemory
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.edge import Edge
from ppengine.stage.edge_flags import Flag
from ppengine.stage.edge_offers import Offer
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.pending_step import Pending
from ppengine.stage.recorder import Recorder
from ppengine.stage.transport import ExpectedSteps, RecordedSender
from ppengine.stage.wire import PeerLostError

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings


class DeviceReceiver:
    """Receives hidden states into `Landing.incoming`."""

    def __init__(
        self,
        edge: Edge,
        offer: Offer,
        signals: Signals,
        driver: Driver,
        compute: Stream,
        landing: Landing,
        sums: MessageSums,
    ) -> None:
        self.edge, self.offer = edge, offer
        self._signals, self._driver, self._stream = signals, driver, compute
        self._slots, self._into, self._incoming = landing.memory.address, landing.incoming, landing.buffer
        self._sums = sums
        self._slot_buffers = _forgotten(landing.slot_buffers)
        self._expected = ExpectedSteps()

    def expect(self, step: int, tokens: int) -> None:
        """Announce, in step order, that `step` brings hidden states of `tokens` tokens."""
        self._expected.append((step, tokens))

    def take(self, step: int) -> Tensor:
        """Return the hidden states [tokens, H] of the oldest expected step: there when the stream gets to it."""
        view = self._into[: self._expected.next(step)]
        number = self.edge.receive_header(view, step)
        slot, source = self._slot_buffers[number % self.offer.slots], self._slots + self.offer.offset(number)
        self._signals.peer_does(number, f"send of m{step}", self.offer.before(number), writes=(slot,))
        self._signals.wait(Flag.FILLED, number)
        self._stream.declare("receive", (slot,), (self._incoming,))
        self._driver.copy(view.data_ptr(), source, view.nbytes, self._stream.handle)
        if self.edge.checksum:
            self._driver.to_host(self._sums.behind, source + _sum_at(self.offer), SUM_BYTES, self._stream.handle)
        self._signals.write(Flag.READ, number)
        return view

    def check_peer(self) -> None:
        """Raise PeerLostError if the sender is gone."""
        self.edge.wire.check_open()

    def release(self) -> None:
        """Let the stream run on; any thread may call it."""
        self._signals.release(Flag.FILLED)

    def drop(self) -> None:
        """Leave the edge to the wire."""
        self._signals.close()

    def close(self) -> None:
        """Close the edge; the stream must be done with it."""
        self._expected.clear()
        self._signals.close()
        self.edge.close()


class StreamSender(RecordedSender):
    """The common part of senders: a message is launched, then announced."""

    error: PeerLostError | None = None

    def __init__(self, edge: Edge, signals: Signals, memory: OpenedMemory, ring: Recorder) -> None:
        super().__init__(edge, ring)
        self._signals, self._memory = signals, memory

    def _announce(self, step: int, tensor: Tensor) -> None:
        sending = self.edge.announce(tensor, step, self.checksum)
        if sending.rest:
            with self._ring.operation(Kind.ROOM, step, self.edge.peer, tensor.nbytes):
                self.edge.finish(sending)

    def finish(self, timeout: float | None = None) -> None:
        """Do nothing: no message is kept back here."""

    def check_peer(self) -> None:
        """Raise PeerLostError if the receiver is gone."""
        self.edge.wire.check_open()

    def release(self) -> None:
        """Let the stream run on; any thread may call it."""
        self._signals.release(Flag.READ)

    def close(self) -> None:
        """Close the edge; the stream must be done with it."""
        self._signals.close()
        self._memory.close()
        self.edge.close()


class DeviceSender(StreamSender):
    """Sends hidden states into the next stage's slots."""

    def __init__(
        self,
        edge: Edge,
        signals: Signals,
        memory: OpenedMemory,
        ring: Recorder,
        driver: Driver,
        compute: Stream,
        sums: MessageSums,
    ) -> None:
        super().__init__(edge, signals, memory, ring)
        self._driver, self._stream, self._made = driver, compute, sums.made
        names = (f"slot {slot} of stage {edge.peer}" for slot in range(memory.offer.slots))
        self._slots = _forgotten([compute.buffer(name, memory.offer.slot_bytes) for name in names])

    def send(self, step: int, hidden: Tensor, pending: Pending) -> None:
        """Launch the sending of `hidden` [T, H]; `pending` waits for it."""
        with self._stream.use():
            self._record_put(step, hidden.contiguous())
        pending.until(self._stream.record("sent"))
        # Strict order waits for the next stage here, as on a CPU.
        self._stream.settle(partial(self._ring.operation, Kind.ROOM, step, self.edge.peer, hidden.nbytes))

    @override
    def put(self, step: int, tensor: Tensor) -> None:
        """Launch the sending of a contiguous tensor, which must stay as it is until the stream has passed."""
        offer, number = self._memory.offer, self.edge.number + 1
        if tensor.nbytes > (most := _sum_at(offer)):
            raise ValueError(f"a message of {tensor.nbytes} bytes, the next stage takes {most} at most")
        self.edge.wire.check_sendable()
        self._signals.wait(Flag.READ, offer.before(number))
        slot, target = self._slots[number % offer.slots], self._memory.address + offer.offset(number)
        self._stream.declare("send", writes=(slot,))
        self._driver.copy(target, tensor.data_ptr(), tensor.nbytes, self._stream.handle)
        if self.checksum:
            self._driver.copy(target + _sum_at(offer), self._made.data_ptr(), SUM_BYTES, self._stream.handle)
        self._signals.write(Flag.FILLED, number)
        self._signals.peer_does(number, f"receive of m{step}", number, reads=(slot,))
        self._announce(step, tensor)


def _sum_at(offer: Offer) -> int:
    """Return where the checksum is in a slot: at its end, behind the longest message."""
    return offer.slot_bytes - SUM_BYTES


def _forgotten(slots: list[Buffer]) -> list[Buffer]:
    """Return `slots`, with the accesses of an earlier generation forgotten: all of them are over."""
    for slot in slots:
        slot.forget()
    return slots
