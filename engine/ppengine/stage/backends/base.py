"""The parts of a stage that each backend makes in its own way: KV memory, and the ends of edges.

`hardware` has the interface that makes them; `cpu` and `cuda` have the implementations.
"""

from __future__ import annotations

import math
import mmap
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppengine.stage.edge import Edge
from ppengine.stage.edge_offers import Offer
from ppengine.stage.pending_step import Pending
from ppengine.stage.wire import PeerLostError

Slots = NDArray[np.int64]


# --- KV memory ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one stage's cache; all sizes in bytes unless they say otherwise."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def layer_block_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return 2 * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """One block in all layers of the stage."""
        return self.layers * self.layer_block_bytes

    def quantum_blocks(self, granule: int = mmap.PAGESIZE) -> int:
        """Return the smallest number of blocks that fill whole granules (pages, handles; bytes) in every layer."""
        return granule // math.gcd(granule, self.layer_block_bytes)


class KvCache(ABC):
    """The device cache of a stage. `layers` holds the mapped blocks only, so that a stale index raises.

    Block 0 is the null block and always mapped.
    """

    def __init__(self, shape: KvShape, reserved_blocks: int) -> None:
        self.shape = shape
        self.reserved = reserved_blocks
        self.mapped = 0
        self.layers: list[Tensor] = []

    def prepare(self, count: int) -> None:  # noqa: B027 (many caches have nothing to prepare)
        """Begin a change to `count` blocks, if it takes long; `map_blocks` ends it. Blocks that go are out of reach."""

    def prepared(self, count: int) -> bool:
        """Return whether `map_blocks(count)` would not wait for the change that `prepare` began."""
        return True

    @abstractmethod
    def map_blocks(self, count: int) -> str:
        """Make exactly `count` blocks usable; new ones read as zeros. Return an error line, empty on success.

        After an error `mapped` has the present number of blocks; a growth that failed has changed
        nothing.
        """

    @property
    @abstractmethod
    def base(self) -> int:
        """First reserved address."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Reserved bytes."""

    @property
    def mapped_bytes(self) -> int:
        """Device memory behind the cache."""
        return self.mapped * self.shape.block_bytes

    def out_of_range(self, count: int) -> str:
        """Return why `count` blocks can never be mapped; empty when they can."""
        if 1 <= count <= self.reserved:
            return ""
        return f"cannot map {count} blocks: addresses are reserved for 1 to {self.reserved}"


def slot_file(length: int) -> int:
    """Return the descriptor of `length` bytes of memory that a store can map, and which end with their last user."""
    fd = os.memfd_create("ppengine-slots", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, length)
    except OSError:
        os.close(fd)
        raise
    return fd


class SwapSpace(Protocol):
    """Host memory of swapped blocks; `layers` as those of a cache. Slot `n` begins at byte `n * block_bytes`."""

    blocks: int
    fd: int
    """Descriptor of the memory, if a store maps it, too; -1: it is private."""
    layers: list[Tensor]
    base: int
    """First address."""
    length: int
    """Bytes."""

    def forget(self) -> None:
        """Forget all blocks."""


# --- ends of edges ------------------------------------------------------------------------------------------


class EdgeEnd(Protocol):
    """One end of an edge. Through the wire a host waits; between devices a stream does, and the host looks."""

    def check_peer(self) -> None:
        """Raise PeerLostError if a device may be waiting for a neighbour that is gone."""

    def release(self) -> None:
        """Let a device that waits for the neighbour run on; any thread may call it, also after `close`."""

    def close(self) -> None:
        """Close the edge; no device may be using it."""


class ActivationReceiver(EdgeEnd, Protocol):
    """Receives hidden states from the stage before."""

    @property
    def edge(self) -> Edge:
        """The edge that the messages come by."""

    def expect(self, step: int, tokens: int) -> None:
        """Announce, in step order, that `step` brings hidden states of `tokens` tokens."""

    def take(self, step: int) -> Tensor:
        """Return the hidden states [tokens, width] of the oldest expected step, valid until the next `take`.

        On a device they are there when its compute stream has passed this point.
        """


class Sender(EdgeEnd, Protocol):
    """A sending end; `error` is the failure of a delivery that a thread was left with."""

    error: PeerLostError | None

    @property
    def edge(self) -> Edge:
        """The edge that the messages go by."""

    def put(self, step: int, tensor: Tensor) -> None:
        """Send one contiguous tensor, which must stay unchanged until it is delivered."""

    def finish(self, timeout: float | None = None) -> None:
        """Let messages that wait for room be delivered, for at most `timeout` seconds."""


class ActivationSender(Sender, Protocol):
    """Sends hidden states to the next stage."""

    checksum: int
    """Checksum of the next message; 0: it carries none."""

    def send(self, step: int, hidden: Tensor, pending: Pending) -> None:
        """Send `hidden` [T, H] of `step`, at once or when the device has computed it; `pending` waits for that."""


class TokenSender(Sender, Protocol):
    """Sends sampled tokens from the last stage back to the first."""

    @property
    def newest(self) -> Tensor | None:
        """The first stage's table of newest tokens [slots] to sample into; None: this stage has its own."""

    def sampled(self, step: int, tokens: Tensor, *, late: bool = False) -> None:
        """Note that sampling of tokens [R] is done, or launched on the device; `late`: on the stream for late masks."""

    def retired(self, step: int, tokens: Tensor) -> None:
        """Note that tokens [R] of `step` are in host memory."""


class TokenTable(EdgeEnd, Protocol):
    """The newest sampled token of each slot, as the first stage knows it."""

    def store(self, slots: Slots, tokens: Slots) -> None:
        """Note tokens that this stage has sampled itself."""

    def expect(self, step: int, slots: Slots) -> None:
        """Note that a token will be sampled for each of `slots` in `step`."""

    def tokens(self, slots: Slots) -> Slots:
        """Return the newest token of each slot; -1 if it is in a device's table once the stream has passed `arrive`.

        Raises ValueError for a slot without a token.
        """

    def arrive(self) -> None:
        """Let the compute stream wait for tokens that `tokens` was called for."""

    def forget(self, slots: list[int]) -> None:
        """Drop the tokens of released slots, so that a wrong marker fails and finds no other request's token."""


class OfferedReceiver(ActivationReceiver, Protocol):
    """A receiver whose memory the sender's device writes, if the sender accepts the offer."""

    offer: Offer

    def drop(self) -> None:
        """Leave the edge to the wire."""


class OfferedTokens(TokenTable, Protocol):
    """A token table whose memory the last stage's device writes, if that stage accepts the offer."""

    offer: Offer

    def drop(self) -> None:
        """Leave the edge to the wire."""


class Ends(NamedTuple):
    """This stage's ends of its edges, None for an edge that it does not have."""

    receiver: ActivationReceiver | None = None
    """First stage: None."""
    sender: ActivationSender | None = None
    """Last stage: None."""
    token_sender: TokenSender | None = None
    """Last of several stages, if the core schedules ahead."""
    tokens: TokenTable | None = None
    """First stage, if the core schedules ahead."""
