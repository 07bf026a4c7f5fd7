"""An edge between stages: the format of a message, and its records on both sides.

Shapes are known from the step, so a message is a header and the bytes of one tensor. They travel
from the sender's tensor into the receiver's preallocated buffer. The header describes the tensor,
and a message that was not due is refused. There is no timeout: the diagnosis reports a hang, a dead
peer raises `PeerLostError` on the other side.

Between GPUs of one host the bytes go from device to device (`backends/cuda/device_edges`), and the
wire carries headers alone. A header is sent once the sender's device has the write in its queue:
the receiver may let its device wait for the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from time import monotonic_ns
from typing import NamedTuple

import torch
from torch import Tensor

from ppengine.common.ring import DTYPES, Kind, shape_code, shape_text
from ppengine.stage.recorder import Recorder
from ppengine.stage.wire import PeerLostError, Wire

_HEADER = struct.Struct("<QQQQII")
"""Number of the message on this edge, step, bytes, checksum (0: none), shape code, and whether a body follows."""
_WITH_BODY, _BY_DEVICE = 0x45505031, 0x45505032
_CODES = {getattr(torch, name): shape_code(name, 0) for name in DTYPES}


class Sending(NamedTuple):
    """A message whose first `push` has been made: its record (0: none) and the rest to send."""

    seq: int
    rest: list[memoryview]


class Edge:
    """One wire between two stages, in one direction.

    Both sides count the messages from 1 and record each one in `ring`, which belongs to the thread
    that uses the edge: handed over, call returned, done. A send is recorded once its call is back;
    one that raised leaves none.
    """

    def __init__(
        self,
        wire: Wire,
        upstream: bool,
        ring: Recorder | None = None,
        meanwhile: Callable[[], bool] | None = None,
    ) -> None:
        """Take over a wire. While a message is waited for, `meanwhile` is called until it returns False."""
        self.peer = wire.peer
        self.wire = wire
        self._ring = ring
        self._kind = (Kind.SEND if upstream else Kind.RECEIVE).value
        self.number = 0
        """Number of the newest message."""
        self.checksum = 0
        """Checksum of the newest message that has arrived; 0: it carries none."""
        self.sum_arrival: Callable[[Tensor], int] | None = None
        """Makes the checksum of each message at its arrival, before anything else can reach it; None: not wanted."""
        self.arrived = 0
        """That of the newest message; 0: none was made."""
        self._open = 0
        """Record of the message that is not done; one goes after the other."""
        self.meanwhile = meanwhile

    def send(self, tensor: Tensor, step: int = 0, checksum: int = 0, since_ns: int = 0) -> Sending:
        """Send as much of a contiguous tensor as there is room for; it must stay unchanged until all is sent.

        `since_ns`: when it was handed over; 0: just now.
        """
        return self._push(tensor, step, checksum, _WITH_BODY, since_ns, _bytes_of(tensor))

    def announce(self, tensor: Tensor, step: int = 0, checksum: int = 0) -> Sending:
        """Send the header of a message whose bytes a device carries, as far as there is room."""
        return self._push(tensor, step, checksum, _BY_DEVICE, 0)

    def _push(
        self, tensor: Tensor, step: int, checksum: int, constant: int, since_ns: int, *body: memoryview
    ) -> Sending:
        self.wire.check_sendable()
        begun_ns, code = since_ns or monotonic_ns(), self._count(tensor)
        header = _HEADER.pack(self.number, step, tensor.nbytes, checksum, code, constant)
        rest = self.wire.push([memoryview(header), *body])
        if self._ring is None:
            return Sending(0, rest)
        returned_ns = monotonic_ns()
        seq = self._ring.begin(
            self._kind, step, self.peer, tensor.nbytes, self.number, code, begun_ns, returned_ns,
            0 if rest else returned_ns,
        )  # fmt: skip
        if rest:
            self._open = seq
        return Sending(seq, rest)

    def finish(self, sending: Sending) -> None:
        """Send the rest of a message, waiting for room. Raises PeerLostError, SupersededError."""
        self.wire.send(sending.rest)
        self._end(sending.seq)

    def receive(self, tensor: Tensor, step: int = 0) -> None:
        """Wait for the next message and fill a contiguous tensor with it.

        Raises PeerLostError, also for a message that is not of this step, size and element type;
        SupersededError.
        """
        body = _bytes_of(tensor)
        seq, count = self._read(tensor, step, _WITH_BODY, body)
        self.wire.receive(body[count:])
        self.arrived = 0 if self.sum_arrival is None else self.sum_arrival(tensor)
        self._end(seq)

    def receive_header(self, tensor: Tensor, step: int = 0) -> int:
        """Wait for the header of the next message, which a device writes into `tensor`; return its number.

        Raises as `receive` does.
        """
        seq, _ = self._read(tensor, step, _BY_DEVICE)
        self._end(seq)
        return self.number

    def _read(self, tensor: Tensor, step: int, constant: int, *body: memoryview) -> tuple[int, int]:
        """Wait for the next message; return its record and how many bytes of its body have come with the header."""
        code, seq = self._count(tensor), 0
        if self._ring is not None:
            now = monotonic_ns()
            self._open = seq = self._ring.begin(self._kind, step, self.peer, tensor.nbytes, self.number, code, now, now)
        while self.meanwhile is not None and not self.wire.readable and self.meanwhile():
            pass
        header = memoryview(bytearray(_HEADER.size))
        count = self.wire.read([header, *body])
        self.wire.receive(header[count:])
        number, sent_step, size, self.checksum, sent_code, sent_constant = _HEADER.unpack(header)
        if (number, sent_step, size, sent_code) != (self.number, step, tensor.nbytes, code):
            raise PeerLostError(
                f"stage {self.peer} sent message {number} (m{sent_step}, {shape_text(size, sent_code)}), due was "
                f"message {self.number} (m{step}, {shape_text(tensor.nbytes, code)})",
                self.peer,
                rows=tensor.shape[0],
            )
        if sent_constant != constant:
            raise PeerLostError(
                f"stage {self.peer} sent a header of kind {sent_constant:#x}, due was {constant:#x}", self.peer
            )
        return seq, max(0, count - _HEADER.size)

    def close(self) -> None:
        """Close the connection; the peer sees it at once."""
        self.wire.close()
        if self._open:  # or the ring would show it under way for ever
            self._end(self._open)

    def _count(self, tensor: Tensor) -> int:
        """Count a message; return its shape code."""
        self.number += 1
        return _CODES.get(tensor.dtype, 0) + (tensor.shape[-1] if tensor.dim() > 1 else 1)

    def _end(self, seq: int) -> None:
        if self._ring is not None:
            self._ring.end(seq)
            self._open = 0


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.dtype is torch.bfloat16:  # numpy has no such type
        tensor = tensor.view(torch.int16)
    return tensor.numpy().data.cast("B")
