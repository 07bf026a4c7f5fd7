"""Ends of edges whose messages go through pinned host memory, on a stage that computes on a GPU.

Hidden states are copied out behind the layers and sent once that copy is done. Incoming ones are
copied to the device on the stream `upload`, for which the compute stream waits.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from ppengine.stage.backends.cuda.device_buffers import LANDING_SLOTS, DeviceBuffers, Landing
from ppengine.stage.backends.cuda.host_copies import HostCopies
from ppengine.stage.backends.cuda.message_sums import MessageSums
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.checksum import as_checksum
from ppengine.stage.edge import Edge
from ppengine.stage.pending_step import Pending
from ppengine.stage.recorder import Recorder
from ppengine.stage.transport import WireReceiver, WireSender


class StagedReceiver(WireReceiver):
    """Receives hidden states into pinned memory, and launches their copies into `Landing.incoming`."""

    def __init__(self, edge: Edge, buffers: DeviceBuffers, landing: Landing) -> None:
        tokens, width = landing.incoming.shape
        ledger = buffers.compute.order.ledger
        super().__init__(edge, tokens, width, landing.incoming.dtype, ledger, pinned=_can_pin(landing.incoming))
        self._compute, self._upload_stream, self._landing = buffers.compute, buffers.upload, landing

    @override
    def take(self, step: int) -> Tensor:
        hidden = super().take(step)
        with self._upload_stream.working():
            self._upload(hidden)
        return self._landing.incoming[: len(hidden)]

    def _upload(self, hidden: Tensor) -> None:
        """Copy a message to the device. The receive buffer is free again when this returns."""
        landing, upload, compute, rows = self._landing, self._upload_stream, self._compute, len(hidden)
        turn = landing.turn = (landing.turn + 1) % LANDING_SLOTS
        slot, read = landing.slots[turn], landing.read[turn]
        if read is not None:
            upload.wait(read)
        filled = (landing.slot_buffers[turn],)
        with upload.doing("upload", (self.buffer,), filled), upload.use():
            slot[:rows].copy_(hidden, non_blocking=True)
        uploaded = upload.record("uploaded")
        compute.wait(uploaded)
        with compute.doing("taking in", filled, (landing.buffer,)), compute.use():
            landing.incoming[:rows].copy_(slot[:rows])
        landing.read[turn] = compute.record("arrived read")
        uploaded.synchronize()


class StagedSender(WireSender):
    """Sends hidden states once they are in host memory."""

    def __init__(self, edge: Edge, ring: Recorder, compute: Stream, copies: HostCopies, sums: MessageSums) -> None:
        super().__init__(edge, ring, compute.order.ledger)
        self._compute, self._copies, self._made = compute, copies, sums.made

    @override
    def send(self, step: int, hidden: Tensor, pending: Pending) -> None:
        parts = (hidden, self._made) if self.checksum else (hidden,)
        with self._compute.use():
            hosts = self._copies.launch(self._compute, *parts)
        pending.until(self._compute.record("copied out"))
        # The sum is not declared: it comes in the same copies, and a missing wait is one finding.
        pending.finally_do(lambda: self._send_copies(step, *self._copies.read(hosts[:1]), *hosts[1:]))

    def _send_copies(self, step: int, hidden: Tensor, made: Tensor | None = None) -> None:
        self.checksum = 0 if made is None else as_checksum(int(made))
        self._record_put(step, hidden)


class StagedTokenSender(WireSender):
    """Sends sampled tokens once the step is done: they are copied to the host for its acknowledgement anyway."""

    newest = None

    def sampled(self, step: int, tokens: Tensor, *, late: bool = False) -> None:
        """Do nothing yet: the tokens are on the device."""

    def retired(self, step: int, tokens: Tensor) -> None:
        """Send tokens [R] of `step`, which are in host memory."""
        self._record_put(step, tokens)


def _can_pin(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"
