"""Making the ends of a stage's edges that its device serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppengine.stage.backends.cuda.device_buffers import DeviceBuffers
from ppengine.stage.backends.cuda.device_edges import DeviceReceiver, DeviceSender
from ppengine.stage.backends.cuda.device_tokens import DeviceTokenSender, DeviceTokenTable
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.peer_memory import OpenedMemory
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.edge import Edge
from ppengine.stage.edge_offers import Offer, RefusedError
from ppengine.stage.recorder import Recorder

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings


class CudaEnds:
    """Makes the ends of a stage's edges. A method raises RefusedError if the wire must carry the messages."""

    def __init__(self, driver: Driver, buffers: DeviceBuffers) -> None:
        self._driver, self._buffers = driver, buffers

    def receiver(self, edge: Edge, flags: Path) -> DeviceReceiver:
        """Return the receiving end for hidden states; its `offer` is for the stage before."""
        compute, landing = self._buffers.compute, self._buffers.landing
        assert landing is not None
        offer = landing.memory.offer
        signals, sums = self._signals(flags, edge, create=True), self._buffers.sums
        return DeviceReceiver(edge, offer, signals, self._driver, compute, landing, sums)

    def tokens(self, edge: Edge, flags: Path, ring: Recorder) -> DeviceTokenTable:
        """Return the first stage's end for sampled tokens; its `offer` is for the last stage."""
        assert self._buffers.token_memory is not None
        offer = self._buffers.token_memory.offer
        signals = self._signals(flags, edge, create=True)
        return DeviceTokenTable(ring, edge, offer, signals, self._buffers.input_buffer)

    def sender(self, edge: Edge, flags: Path, ring: Recorder, offer: Offer) -> DeviceSender:
        """Return the sending end for hidden states."""
        memory, signals = self._open(flags, edge, offer)
        return DeviceSender(edge, signals, memory, ring, self._driver, self._buffers.compute, self._buffers.sums)

    def token_sender(self, edge: Edge, flags: Path, ring: Recorder, offer: Offer) -> DeviceTokenSender:
        """Return the last stage's end for sampled tokens."""
        memory, signals = self._open(flags, edge, offer)
        buffers = self._buffers
        return DeviceTokenSender(edge, signals, memory, ring, buffers.device, buffers.late_sampling)

    def _signals(self, flags: Path, edge: Edge, create: bool) -> Signals:
        try:
            return Signals(self._driver, flags, create, self._buffers.compute, f"stage {edge.peer}")
        except (OSError, ValueError, DriverError) as error:
            raise RefusedError(str(error)) from None

    def _open(self, flags: Path, edge: Edge, offer: Offer) -> tuple[OpenedMemory, Signals]:
        try:
            memory = OpenedMemory(self._driver, offer)
        except DriverError as error:
            raise RefusedError(f"{self._buffers.uuid} does not reach memory of {offer.device}: {error}") from None
        try:
            return memory, self._signals(flags, edge, create=False)
        except RefusedError:
            memory.close()
            raise
