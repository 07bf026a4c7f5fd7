"""A real stage with a planted mistake: what it sends lies in one buffer, filled again before the last send is done."""

import torch
from ppengine.stage import worker
from ppengine.stage.transport import WireSender
from ppengine.stage.wire import Wire

honest = WireSender.put
buffers: list[torch.Tensor] = []


def put(self: WireSender, step: int, tensor: torch.Tensor) -> None:
    """Copy into the one buffer and send that."""
    if not buffers:
        buffers.append(torch.empty(4096, tensor.shape[-1], dtype=tensor.dtype))
    view = buffers[0][: len(tensor)]
    view.copy_(tensor)
    honest(self, step, view)


WireSender.put = put
# As if messages were too big for the kernel: they wait for room on the send thread.
Wire.push, Wire.send = (lambda self, parts: parts), (lambda self, parts: self._socket.sendmsg(parts))
main = worker.main
