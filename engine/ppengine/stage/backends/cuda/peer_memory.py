"""Device memory that two processes share: one allocates and offers it, the other opens it and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppengine.stage.backends.cuda.dlpack import tensor_over
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.edge_offers import Offer, RefusedError

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver

_PIECE = 2 * 2**20
"""Smaller allocations may lie in one piece of memory with others, which would be opened with them."""
_ALIGNMENT = 256
"""Slots begin at multiples of it, as allocations do: copies of aligned memory are faster."""
SUM_BYTES = 8
"""Size of the checksum at the end of a message's slot."""


def message_slot_bytes(size: int) -> int:
    """Return the size of a slot for a message of at most `size` bytes and its checksum."""
    return -(-(size + SUM_BYTES) // _ALIGNMENT) * _ALIGNMENT


class SharedMemory:
    """Slots on this card, made once and kept for life, so that a sender that is slow to leave writes nowhere else."""

    def __init__(self, driver: Driver, uuid: str, slot_bytes: int, slots: int = 1) -> None:
        """Allocate them, zeroed. Raises DriverError if there is too little memory."""
        self._slot_bytes, self._slots, self._device = slot_bytes, slots, driver.device
        self.address = driver.allocate(-(-slots * slot_bytes // _PIECE) * _PIECE)
        try:
            self._offer: Offer | str = Offer(uuid, driver.export(self.address), slot_bytes, slots)
        except DriverError as error:
            self._offer = str(error)

    @property
    def offer(self) -> Offer:
        """The offer by which a neighbour opens it. Raises RefusedError if the driver does not let others in."""
        if isinstance(self._offer, str):
            raise RefusedError(self._offer)
        return self._offer

    def slot(self, number: int) -> Tensor:
        """Return a slot as uint8 [slot_bytes]."""
        return tensor_over(self.address + number * self._slot_bytes, self._slot_bytes, self._device)


class OpenedMemory:
    """Another process's memory, as this process's device sees it."""

    def __init__(self, driver: Driver, offer: Offer) -> None:
        """Open it. Raises DriverError if the cards cannot reach each other, or the driver does not let us in."""
        self._driver, self.offer = driver, offer
        self.address = driver.open(offer.handle)

    def tensor(self, device: torch.device) -> Tensor:
        """Return all slots as uint8 [size], for kernels that run on `device`."""
        return tensor_over(self.address, self.offer.size, device)

    def close(self) -> None:
        """Unmap it; no stream may be using it."""
        self._driver.shut(self.address)
