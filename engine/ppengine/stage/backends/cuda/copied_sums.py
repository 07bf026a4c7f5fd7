"""Sums over the ranks of a stage on GPUs, by copies between cards while the cards compute.

A large sum goes in pieces of rows. While the device computes a piece, copy engines exchange others, and
the product behind a sum begins with its first piece. Copies take no multiprocessor; a kernel that
exchanges data could not begin before the running product ends.

Two ranks send their whole parts to each other (`one_shot_sums`), more ranks add shares of rows and send
the sums (`two_shot_sums`). On H200, shares cost two ranks 2 %, and whole parts cost four ranks more
than kernels do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ppengine.models.group import Sum
from ppengine.stage.backends.cuda.peer_lanes import PeerLanes
from ppengine.stage.ledger.actors import Buffer

AT_ONCE_ROWS, LEAST_BYTES = 2048, 2**24
"""Sums of at most these rows for each rank, or smaller ones, go at once.

The launches of a piece take the same time of the host with any number of ranks, and its product takes less with more.
Two ranks take a host 50 to 60 ms, and 4,096 tokens take the device as long. A step that may be a graph has no more
rows: a graph and a step that is launched kernel by kernel must exchange in the same way, because ranks may differ in
that.
"""
_TILE, _ROUND = 128, 2**21
"""All pieces but the last have a multiple of these rows, as tiles of products have; rooms have one of these bytes."""


class CopiedSums(ABC):
    """One rank's side. It lives as long as its lanes."""

    piece_bytes: int
    """Room for a piece."""

    def __init__(self, lanes: PeerLanes) -> None:
        self.lanes = lanes

    def begin(self) -> None:
        """Forget the older generation, all of whose work is over."""
        for buffer in self._buffers():
            buffer.forget()

    @abstractmethod
    def _buffers(self) -> list[Buffer]:
        """Return the ledger's names of all memory."""

    @abstractmethod
    def _counts(self, rows: int) -> tuple[int, ...]:
        """Return the numbers of pieces that a sum of `rows` may go in, the best first."""

    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        """Return the rows of each piece of a sum; one piece if it is none for copies."""
        if rows > AT_ONCE_ROWS * self.lanes.size and rows * row_bytes >= LEAST_BYTES:
            for count in self._counts(rows):
                each = -(-rows // count // _TILE) * _TILE
                if each * row_bytes <= self.piece_bytes:
                    return [slice(first, min(first + each, rows)) for first in range(0, rows, each)]
        return [slice(0, rows)]

    @abstractmethod
    def send(self, part: Tensor) -> Sum:
        """Launch the sending of `part` [T, W], a contiguous piece, behind the product that makes it."""

    def _check(self, part: Tensor) -> None:
        if part.nbytes > self.piece_bytes:
            raise ValueError(f"a piece of {part.nbytes} bytes, there is room for {self.piece_bytes}")


def shaped(memory: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the begin of memory, uint8, as a tensor."""
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def rounded(size: int) -> int:
    """Return the bytes of a room for `size`."""
    return -(-size // _ROUND) * _ROUND
