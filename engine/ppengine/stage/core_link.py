"""The step loop's connection to the core: steps come in, acknowledgements go out."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import zmq

from ppengine.common.config import EngineConfig
from ppengine.common.sockets import readable
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.stage_lifecycle import EdgeAddress, NewGeneration, Shutdown
from ppengine.protocol.steps import LateMasks, Mask, Step, ToStage
from ppengine.stage.generations import Generations

_LINGER_MS = 1000
RECONNECT_MS = 20


def open_socket(context: zmq.Context[Any], config: EngineConfig, stage: int, rank: int) -> zmq.Socket[bytes]:
    """Return the socket of stage and rank, connected to the core."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, f"s{stage}.{rank}".encode())
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    # A core that is restarted binds again; zmq would try after 100 ms.
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    config.connect(socket, "steps")
    return socket


class CoreLink:
    """Belongs to the step loop's thread. `stop` is set when the control thread has received Shutdown."""

    def __init__(self, socket: zmq.Socket[bytes], generations: Generations, stop: threading.Event) -> None:
        self._socket = socket
        self._generations = generations
        self._stop = stop
        self._codec = Codec(ToStage)
        self._shutdown = False
        self.edges: dict[str, EdgeAddress] = {}
        """Addresses of edges by name, as far as this stage has asked."""
        self.late_masks: dict[int, list[Mask]] = {}
        """Masks that came behind their steps, by step, until they are taken."""

    @property
    def leaving(self) -> bool:
        """Whether the stage must end."""
        return self._shutdown or self._stop.is_set()

    def over(self) -> bool:
        """Return whether the present generation is over, or the stage must end."""
        return self.leaving or self._generations.superseded

    def receive(self, timeout_ms: int) -> list[Step]:
        """Wait for a message, and take all that have come; return new steps of the present generation."""
        steps: list[Step] = []
        # A look at the socket takes a fifth of a poll, and loops that wait for a device look all the time.
        while not self._shutdown and (readable(self._socket) or (timeout_ms and self._socket.poll(timeout_ms))):
            timeout_ms = 0
            message = self._codec.decode(self._socket.recv())
            if isinstance(message, Step) and message.generation == self._generations.current:
                steps.append(message)
            elif isinstance(message, LateMasks):
                if message.generation == self._generations.current:
                    self.late_masks[message.number] = message.masks
            elif isinstance(message, EdgeAddress):
                self.edges[message.name] = message
            elif isinstance(message, Shutdown):
                self._shutdown = True
            elif isinstance(message, NewGeneration):
                self._generations.announce(message.generation, message.started)
        return steps

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; does not wait."""
        self._socket.send(encode(message))

    def close(self) -> None:
        """Close the socket once messages are out, at the latest after its linger time."""
        self._socket.close()
